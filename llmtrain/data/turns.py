"""Find the assistant's turns of a conversation as text, each with its prompt.

The prompt of a turn is the text that a chat sends to get it. The rest of the text, up to the first
stop token, is its target. ChatML makes two turns of two questions and answers:

    prompt  <|im_start|>user↵2 + 3?<|im_end|>↵<|im_start|>assistant↵
    target  5.<|im_end|>

    prompt  <|im_start|>user↵2 + 3?<|im_end|>↵<|im_start|>assistant↵5.<|im_end|>↵
            <|im_start|>user↵2 + 4?<|im_end|>↵<|im_start|>assistant↵
    target  6.<|im_end|>
"""

import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.data.chat_template import (
    OPEN_THINK_TAG,
    REASONING_OPTION,
    ChatTemplate,
    Span,
    TemplateOptions,
)
from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.readers import Fields

# The counts of trained turns whose prompt asks for reasoning, for none, or leaves that to the
# template. If a template cannot be asked, there are no such counts.
THINKING_COUNTS = {
    True: "thinking_turns",
    False: "no_thinking_turns",
    None: "unset_thinking_turns",
}
_OTHER_TEXT = "\ue000"  # begins like no other text


class Turn(NamedTuple):
    """An assistant turn as text.

    Attributes:
        prompt: the text before it.
        target: its own text, with the token that ends it.
        spans: the parts of the target that are trained; ``None`` if all of it is.
    """

    prompt: str
    target: str
    spans: list[Span] | None


class TurnFinder:
    """Finds the assistant's turns of a conversation. Each beginning of it is rendered once.

    Args:
        template: the chat template.
        messages: the messages in the form that the template takes.
        reasoning: the reasoning of each; an empty text if it has none.
        tools: the tools.

    Attributes:
        complete: the text of the conversation.

    Raises:
        BadRecord: if the template refuses the conversation.
    """

    def __init__(
        self,
        template: ChatTemplate,
        messages: Sequence[Message],
        reasoning: Sequence[str],
        tools: list[Fields] | None,
    ) -> None:
        self._template = template
        self._messages = [*messages]
        self._reasoning = reasoning
        self._tools = tools
        self._texts: dict[tuple[int, bool, bool | None], str] = {}

        self._marks: list[Span] | None = None
        if template.has_marks:
            self._marks = []
            self.complete = template.render(self._messages, tools, marks=self._marks)
            self._texts[len(messages), False, None] = self.complete
        else:
            self.complete = self.text(len(messages), {})

    def turns(self, is_trained: Sequence[bool], after: int, counts: Counter[str]) -> list[Turn]:
        """Return the turns that are trained. An answer at the very beginning has no prompt.

        Args:
            is_trained: whether the weight of each message lets it be trained.
            after: the number of messages at the beginning that are not trained.
            counts: is updated: ``untrained_turns``, whose weight is 0 or which the template shows
                differently from the way it prompts for them; ``hidden_turns``, whose reasoning or
                text next to a call it does not show; and :data:`THINKING_COUNTS`.

        Raises:
            BadRecord: if the template shows nothing of a turn, if a turn follows another one, or if
                no ``{% generation %}`` marks anything.
        """
        if self._marks is not None and all(start == stop for start, stop in self._marks):
            raise BadRecord("the chat template's {% generation %} marks nothing in it")
        turns = []
        for index in range(max(after, 1), len(self._messages)):
            if self._messages[index]["role"] != "assistant":
                continue
            if index > after and self._messages[index - 1]["role"] == "assistant":
                raise BadRecord(
                    f"message {index + 1} (assistant) follows a message of the assistant; make one "
                    "message of both"
                )
            if not is_trained[index]:
                counts["untrained_turns"] += 1
                continue
            turn = self._turn(index, counts)
            if turn is not None:
                turns.append(turn)
        return turns

    def _turn(self, index: int, counts: Counter[str]) -> Turn | None:
        """Return a turn, or ``None`` if nothing of it is trained.

        Several ways to prompt are tried. If the turn has reasoning, a prompt that asks for
        reasoning comes first, and is taken only if the target shows the reasoning.
        """
        reasoning = self._reasoning[index]
        attempts: list[tuple[bool, TemplateOptions]] = []
        for with_reasoning in [True, False] if reasoning else [False]:
            if self._template.has_reasoning_option:
                attempts.append((with_reasoning, {REASONING_OPTION: with_reasoning}))
            attempts.append((with_reasoning, {}))

        for with_reasoning, options in attempts:
            shown = self._after_prompt(index, options) or self._after_request(index, options)
            if shown is None or (with_reasoning and reasoning not in shown[1]):
                continue
            turn = self._cut(index, *shown)
            if turn is None:
                return None
            texts = (self._messages[index]["content"].strip(), reasoning)
            counts["hidden_turns"] += any(text not in turn.target for text in texts)
            if self._template.has_reasoning_option:
                counts[THINKING_COUNTS[options.get(REASONING_OPTION)]] += 1
            return turn
        counts["untrained_turns"] += 1
        return None

    def _after_prompt(self, index: int, options: TemplateOptions) -> tuple[str, str] | None:
        """Return the prompt and the text that the template shows after it.

        Some prompts begin the reasoning, and the template shows no reasoning of finished turns, as
        that of DeepSeek-R1:

            prompt  <｜User｜>2 + 3?<｜Assistant｜><think>↵
            text    <｜User｜>2 + 3?<｜Assistant｜>5.<｜end▁of▁sentence｜>
            target  I add.↵</think>↵↵5.<｜end▁of▁sentence｜>

        Returns:
            Both; ``None`` if the template shows the prompt differently.
        """
        prompt = self.text(index, options, add_generation_prompt=True)
        text = self.text(index + 1, options)
        if text.startswith(prompt):
            return prompt, text[len(prompt) :]
        opened = OPEN_THINK_TAG.search(prompt)
        if opened is None or not text.startswith(prompt[: opened.start()]):
            return None
        answer = text[opened.start() :].rpartition("</think>")[2].lstrip("\n")
        return prompt, f"{self._reasoning[index]}\n</think>\n\n{answer}"

    def _after_request(self, index: int, options: TemplateOptions) -> tuple[str, str] | None:
        """Return the prompt and the turn if the template shows the messages before it differently.

        gpt-oss, for example, drops the reasoning before a call as soon as there is an answer:

            prompt  2 + 3?<|start|>assistant I add. to=add 2, 3<|call|>add 5<|start|>assistant
            text    2 + 3?<|start|>assistant to=add 2, 3<|call|>add 5<|start|>assistant 5.
            other   2 + 3?<|start|>assistant to=add 2, 3<|call|>add 5<|start|>assistant ?

        The turn follows the words that ask for it, here ``<|start|>assistant``. Earlier turns
        follow the same words, so they are the last ones before the text differs from the text with
        another answer. If a turn ends in between, they have asked for that one.

        A prompt may also end with the beginning of the answer, which some templates show as one
        message with the rest. The prompt is then all that the two texts share.
        """
        text = self.text(index + 1, options)
        history = self._messages[:index]
        other_answer: Message = {"role": "assistant", "content": _OTHER_TEXT}
        if self._reasoning[index]:
            other_answer.update(dict.fromkeys(REASONING, _OTHER_TEXT))
        try:
            other = self._template.render([*history, other_answer], self._tools, options)
        except BadRecord:
            return None
        shared = os.path.commonprefix([text, other])  # noqa: RUF071 - of characters, not of folders
        if history[-1]["role"] == "assistant":
            return shared, text[len(shared) :]

        prompt = self.text(index, options, add_generation_prompt=True)
        before = self.text(index, options)
        request = prompt[len(before) :] if prompt.startswith(before) else ""
        start = shared.rfind(request) + len(request)
        is_found = request and request in shared
        if not is_found or self._template.stop_tokens.search(shared, start):
            return None
        return prompt, text[start:]

    def _cut(self, index: int, prompt: str, target: str) -> Turn | None:
        """Cut a target after the token that ends the turn; ``None`` if no mark is in it.

        Raises:
            BadRecord: if the template shows nothing of the turn.
        """
        end = self._template.stop_tokens.search(target)
        content = target[: end.start()] if end else target
        if not content.strip():
            raise BadRecord(f"the chat template shows nothing of message {index + 1} (assistant)")
        end_token = ""
        if end:
            target = target[: end.end()]
        else:
            target = target.rstrip()
            is_call = "tool_calls" in self._messages[index]
            end_token = self._template.end_of_call if is_call else self._template.end_of_answer

        spans = [(0, len(target))]
        if self._marks is not None and self.complete.startswith(prompt + target):
            # The parts of the marks that lie in the target, counted from its beginning.
            spans = []
            for first, last in self._marks:
                first_inside = max(first - len(prompt), 0)
                last_inside = min(last - len(prompt), len(target))
                if first_inside < last_inside:
                    spans.append((first_inside, last_inside))
        if not spans:
            return None
        if spans == [(0, len(target))]:
            return Turn(prompt, target + end_token, spans=None)
        if end_token:
            spans.append((len(target), len(target + end_token)))
        return Turn(prompt, target + end_token, spans)

    def text(
        self, count: int, options: TemplateOptions, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of the first messages, if asked for with the request for an answer."""
        key = (count, add_generation_prompt, options.get(REASONING_OPTION))
        if key not in self._texts:
            self._texts[key] = self._template.render(
                self._messages[:count], self._tools, options, add_generation_prompt
            )
        return self._texts[key]
