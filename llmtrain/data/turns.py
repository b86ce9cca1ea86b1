"""Find the assistant's turns of a conversation as text, each with its prompt.

The prompt of a turn is the text that a chat would send at that point. Its target is the text that
should come back, with the token that ends it. ChatML makes two turns of two questions and answers:

    prompt  <|im_start|>user↵2 + 3?<|im_end|>↵<|im_start|>assistant↵
    target  5.<|im_end|>

    prompt  <|im_start|>user↵2 + 3?<|im_end|>↵<|im_start|>assistant↵5.<|im_end|>↵
            <|im_start|>user↵2 + 4?<|im_end|>↵<|im_start|>assistant↵
    target  6.<|im_end|>
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llmtrain.data.jinja_template import (
    JinjaTemplate,
    PlainData,
    Span,
    TemplateOptions,
)
from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.rendered import THINKING_COUNTS
from llmtrain.data.sources import Fields
from llmtrain.data.template_messages import AdaptedMessages
from llmtrain.data.template_properties import (
    OPEN_THINK_TAG,
    REASONING_OPTION,
    TemplateProperties,
    any_of,
)


class Turn(NamedTuple):
    """An assistant turn as text.

    Attributes:
        prompt: the text before it.
        target: its own text, with the token that ends it.
        spans: the parts of the target that are trained.
    """

    prompt: str
    target: str
    spans: list[Span]

    @property
    def text(self) -> str:
        """The prompt and the target."""
        return self.prompt + self.target

    @property
    def is_trained_completely(self) -> bool:
        """Whether the spans are all of the target."""
        position = 0
        for start, stop in self.spans:
            if start != position:
                return False
            position = stop
        return position == len(self.target)


class _TurnMessages(NamedTuple):
    """The messages of an assistant turn, which follow each other.

    Attributes:
        start: the number of messages before them.
        stop: the number of messages up to the last of them.
        messages: the messages.
        reasoning: the reasoning of those that have some.
    """

    start: int
    stop: int
    messages: list[Message]
    reasoning: list[str]

    @property
    def is_call(self) -> bool:
        """Whether the turn ends with a call."""
        return "tool_calls" in self.messages[-1]


class _ShownTurn(NamedTuple):
    """An assistant turn as the template shows it.

    Attributes:
        prompt: the text before it.
        target: its own text.
        end_token: the token that ends it if the target does not end with one; otherwise empty.
        options: the options of the template that lead to the prompt.
    """

    prompt: str
    target: str
    end_token: str
    options: TemplateOptions


class ConversationTexts:
    """The texts of a conversation and of its beginnings, each rendered once.

    Args:
        jinja: renders with the chat template.
        adapted: the messages and their reasoning, as the template takes them.
        tools: the tools.

    Attributes:
        complete: the complete conversation, with the spans of ``{% generation %}`` blocks.

    Raises:
        BadRecord: if the template refuses the conversation.
    """

    def __init__(
        self, jinja: JinjaTemplate, adapted: AdaptedMessages, tools: list[Fields] | None
    ) -> None:
        self.messages = adapted.messages
        self.reasoning = adapted.reasoning
        self._jinja = jinja
        self._data = jinja.plain_data(adapted.messages, tools)
        self.complete = jinja.render(self._data, find_spans=True)
        self._beginnings: dict[tuple[int, bool, tuple[tuple[str, bool], ...]], str] = {
            (len(self.messages), False, ()): self.complete.text
        }

    def text(self, stop: int, options: TemplateOptions) -> str:
        """Return the text of the first messages, up to number ``stop``."""
        return self._beginning(stop, is_prompt=False, options=options)

    def prompt(self, stop: int, options: TemplateOptions) -> str:
        """Return the first messages, up to number ``stop``, with the request for an answer."""
        return self._beginning(stop, is_prompt=True, options=options)

    def request(self, stop: int, options: TemplateOptions) -> str:
        """Return the words at the end of a prompt that ask for an answer.

        The text is empty if the prompt shows the history differently.
        """
        prompt = self.prompt(stop, options)
        history = self.text(stop, options)
        return prompt[len(history) :] if prompt.startswith(history) else ""

    def altered_text(self, turn: _TurnMessages, options: TemplateOptions) -> str:
        """Return the text up to the end of a turn whose messages differ from the first letter."""
        altered = [_altered(message) for message in turn.messages]
        data = self._jinja.plain_data(altered, None)
        history = self._data.messages[: turn.start]
        return self._jinja.render(
            PlainData(history + data.messages, self._data.tools), options=options
        ).text

    def _beginning(self, stop: int, is_prompt: bool, options: TemplateOptions) -> str:
        key = (stop, is_prompt, tuple(options.items()))
        if key not in self._beginnings:
            data = PlainData(self._data.messages[:stop], self._data.tools)
            rendered = self._jinja.render(data, add_generation_prompt=is_prompt, options=options)
            self._beginnings[key] = rendered.text
        return self._beginnings[key]


class TurnFinder:
    """Finds the assistant's turns of conversations.

    Args:
        template: the properties of the chat template.
    """

    def __init__(self, template: TemplateProperties) -> None:
        self._template = template
        self._control_tokens = any_of(template.control_tokens.values())

    def find(
        self,
        texts: ConversationTexts,
        is_trained: Sequence[bool],
        after: int,
        counts: Counter[str],
    ) -> list[Turn]:
        """Return the turns that are trained.

        Args:
            texts: the texts of a conversation.
            is_trained: whether the weight of each message lets it be trained.
            after: the number of messages at the beginning that are not trained. If the last of them
                and the next one are the assistant's, they do not share a turn.
            counts: the counts of :class:`llmtrain.data.rendered.Rendered`, which are updated.

        Raises:
            BadRecord: if the template does not show the conversation.
        """
        spans = texts.complete.spans
        if spans is not None and all(start == stop for start, stop in spans):
            raise BadRecord("the chat template's {% generation %} marks nothing in it")

        turns = []
        for messages in _turns_of(texts, after):
            if messages.stop <= after:
                continue
            if not is_trained[messages.start]:
                counts["unweighted_turns"] += 1
                continue
            turn = self._trained_turn(texts, messages, counts)
            if turn is not None:
                turns.append(turn)
        return turns

    def _trained_turn(
        self, texts: ConversationTexts, messages: _TurnMessages, counts: Counter[str]
    ) -> Turn | None:
        """Return a turn with the parts of it that are trained, or ``None`` if nothing is."""
        shown = self._shown_turn(texts, messages)
        if shown is None:
            counts["mismatched_calls" if messages.is_call else "mismatched_answers"] += 1
            return None
        prompt, target, end_token, options = shown

        contents = [message["content"].strip() for message in messages.messages]
        if any(content not in target for content in [*messages.reasoning, *contents]):
            counts["hidden_turns"] += 1

        complete = texts.complete
        spans = [(0, len(target))]
        if complete.spans is not None:
            if complete.text.startswith(prompt + target):
                spans = _clipped(complete.spans, start=len(prompt), length=len(target))
            else:
                counts["unmarked_turns"] += 1
        if not spans:
            return None
        if self._template.has_reasoning_option:
            counts[THINKING_COUNTS[options.get(REASONING_OPTION)]] += 1
        if end_token:
            spans.append((len(target), len(target + end_token)))
        return Turn(prompt, target + end_token, spans)

    def _shown_turn(self, texts: ConversationTexts, messages: _TurnMessages) -> _ShownTurn | None:
        """Return a turn as text, or ``None`` if the template does not show it after any prompt.

        Several ways to prompt are tried. If the turn has reasoning, a prompt that asks for
        reasoning comes first, and is taken only if the target shows some of the reasoning.
        """
        choices = [True, False] if messages.reasoning else [False]
        for with_reasoning in choices:
            for options in self._template.prompt_options(with_reasoning):
                target = _target_of(texts, messages, options)
                if target is None:
                    continue
                shows_reasoning = any(reasoning in target for reasoning in messages.reasoning)
                if shows_reasoning or not with_reasoning:
                    return self._with_end(texts, messages, options, target)
        return None

    def _with_end(
        self,
        texts: ConversationTexts,
        messages: _TurnMessages,
        options: TemplateOptions,
        target: str,
    ) -> _ShownTurn:
        """Cut a target after the token that ends the turn.

        Raises:
            BadRecord: if the template shows nothing of the turn, or if one of its messages follows
                a turn that has ended.
        """
        end = self._template.find_end(target, 0, len(target))
        if end:
            text = target[: end.start()]
            rest = target[end.end() :]
        else:
            text = target
            rest = ""
        if not text.strip():
            raise BadRecord(
                f"the chat template shows nothing of message {messages.stop} (assistant)"
            )

        if len(messages.messages) > 1:
            request = texts.request(messages.start, options).strip()
            if self._control_tokens.sub("", rest).strip() or (request and request in text):
                raise BadRecord(
                    f"message {messages.stop} (assistant) follows an assistant turn that has ended"
                )

        prompt = _prompt_of(texts, messages, options)
        if end:
            return _ShownTurn(prompt, target[: end.end()], end_token="", options=options)
        end_token = self._template.end_token_of(messages.messages[-1])
        return _ShownTurn(prompt, target.rstrip(), end_token, options)


def _turns_of(texts: ConversationTexts, after: int) -> Iterator[_TurnMessages]:
    """Yield the messages of each assistant turn.

    A turn ends before message number ``after``, at the latest, if it begins before it.
    A turn at the very beginning of a conversation has no prompt, and is left out.
    """
    stop = 0
    kinds = [
        (message["role"] == "assistant", number < after)
        for number, message in enumerate(texts.messages)
    ]
    for (is_assistant, _), run in itertools.groupby(kinds):
        start = stop
        stop += len(list(run))
        if is_assistant and start:
            yield _TurnMessages(
                start=start,
                stop=stop,
                messages=texts.messages[start:stop],
                reasoning=[text for text in texts.reasoning[start:stop] if text],
            )


def _target_of(
    texts: ConversationTexts, messages: _TurnMessages, options: TemplateOptions
) -> str | None:
    """Return the text that should come back for a prompt, or ``None`` if it is not shown."""
    prompt = _prompt_of(texts, messages, options)
    text = texts.text(messages.stop, options)
    if text.startswith(prompt):
        return text[len(prompt) :]
    target = _target_of_opened_reasoning(messages, prompt, text)
    if target is not None:
        return target
    return _target_after_other_history(texts, messages, options)


def _prompt_of(texts: ConversationTexts, messages: _TurnMessages, options: TemplateOptions) -> str:
    """Return the text before a turn: the earlier messages, with the request for an answer.

    A prompt may end with the beginning of the answer. Some templates show both as one message,
    which is requested only once:

        request   <|turn>model↵The answer:<turn|>↵<|turn>model↵
        prompt    <|turn>model↵The answer:
        target    5.<turn|>
    """
    prompt = texts.prompt(messages.start, options)
    is_continued = texts.messages[messages.start - 1]["role"] == "assistant"
    if is_continued and not texts.text(messages.stop, options).startswith(prompt):
        return _text_before(texts, messages, options) or prompt
    return prompt


def _target_of_opened_reasoning(messages: _TurnMessages, prompt: str, text: str) -> str | None:
    """Return the target of a prompt that has already begun the reasoning.

    DeepSeek-R1's prompts do so, but its template shows no reasoning of finished turns:

        prompt  <｜User｜>2 + 3?<｜Assistant｜><think>↵
        text    <｜User｜>2 + 3?<｜Assistant｜>5.<｜end▁of▁sentence｜>
        target  I add.↵</think>↵↵5.<｜end▁of▁sentence｜>

    Returns:
        The reasoning and the answer; ``None`` if the prompt has begun no reasoning, or if the text
        does not begin with the part of the prompt before the reasoning.
    """
    opened = OPEN_THINK_TAG.search(prompt)
    if opened is None or not text.startswith(prompt[: opened.start()]):
        return None
    answer = text[opened.start() :].rpartition("</think>")[2].lstrip("\n")
    return "\n".join(messages.reasoning) + f"\n</think>\n\n{answer}"


def _target_after_other_history(
    texts: ConversationTexts, messages: _TurnMessages, options: TemplateOptions
) -> str | None:
    """Return the target if the template shows the history differently from the prompt.

    gpt-oss, for example, drops the reasoning before a call as soon as there is an answer, so that
    the text does not begin with the prompt:

        prompt  2 + 3?<|end|><|start|>assistant I add. to=add 2, 3<|call|>add 5<|start|>assistant
        text    2 + 3?<|end|><|start|>assistant to=add 2, 3<|call|>add 5<|start|>assistant 5.
        altered 2 + 3?<|end|><|start|>assistant to=add 2, 3<|call|>add 5<|start|>assistant ~5.

    The target follows the words that ask for a turn, here ``<|start|>assistant``. Earlier turns
    follow the same words. So the text is rendered again with other messages in this turn, and the
    words are the last ones before the two texts differ.
    """
    text = texts.text(messages.stop, options)
    request = texts.request(messages.start, options)
    position = text.rfind(request, 0, len(_text_before(texts, messages, options)))
    if not request or position < 0:
        return None
    return text[position + len(request) :]


def _text_before(
    texts: ConversationTexts, messages: _TurnMessages, options: TemplateOptions
) -> str:
    """Return the text up to the first letter of a turn; empty if the template does not tell it."""
    try:
        altered = texts.altered_text(messages, options)
    except BadRecord:
        return ""
    pairs = zip(texts.text(messages.stop, options), altered, strict=False)
    common = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return "".join(letter for letter, _ in common)


def _clipped(spans: list[Span], start: int, length: int) -> list[Span]:
    """Return the parts of spans that lie in a section of the text, counted from its ``start``."""
    clipped = []
    for first, last in spans:
        first_inside = max(first - start, 0)
        last_inside = min(last - start, length)
        if first_inside < last_inside:
            clipped.append((first_inside, last_inside))
    return clipped


def _altered(value: Any) -> Any:
    """Return a message whose texts differ from the first letter on."""
    if isinstance(value, dict):
        kept = ("role", "type", "id")
        return {key: field if key in kept else _altered(field) for key, field in value.items()}
    if isinstance(value, list):
        return [_altered(item) for item in value]
    if isinstance(value, str) and value:
        return f"~{value}"
    return value
