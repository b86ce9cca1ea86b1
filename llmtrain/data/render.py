"""Render conversations as documents of tokens.

The assistant's turns are the targets, exactly as the model would have to generate them.
"""

import copy
import itertools
import re
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from llmtrain.data.chat_template import (
    OPENED,
    BadRow,
    ChatTemplate,
    Message,
    Span,
    Switch,
    any_of,
    render,
)
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.sources import Fields
from llmtrain.data.tokenizer import FastTokenizer

_HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair


class TurnEnd(NamedTuple):
    """The part of a document up to the end of one of its assistant turns.

    Attributes:
        length: the number of tokens.
        targets: the number of targets.
        target_bytes: UTF-8 bytes of the targets' text, without control tokens.
        ended: the number of turns whose last target token ends a turn.
    """

    length: int
    targets: int
    target_bytes: int
    ended: int


class Document(NamedTuple):
    """Tokens that are trained on together.

    Attributes:
        ids: int32 [n].
        loss_mask: bool [n], whether a token is a target.
        target_bytes: UTF-8 bytes of the targets' text, without control tokens.
        turn_ends: the end of each assistant turn that is a target. The last one is the end of the
            document.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    target_bytes: int
    turn_ends: tuple[TurnEnd, ...] = ()


class Rendered(NamedTuple):
    """A conversation as documents. Each assistant turn is a target in one of them.

    Attributes:
        documents: the documents.
        left_answers: answers that are in no document, because the template shows them differently
            from the way it prompts for them.
        left_calls: the same for turns that end with a call.
        unshown: turns whose reasoning, or whose text next to a call, the template does not show.
        remade: turns that are trained in full, because ``{% generation %}`` marks text that their
            prompt does not lead to.
    """

    documents: list[Document]
    left_answers: int = 0
    left_calls: int = 0
    unshown: int = 0
    remade: int = 0


class _Turn(NamedTuple):
    """An assistant turn.

    Attributes:
        history: the messages before it.
        messages: its own messages.
        tools: the tools of the conversation.
        thoughts: the reasoning of its messages.
    """

    history: list[Message]
    messages: list[Message]
    tools: list[Fields] | None
    thoughts: list[str]


class _PromptedTurn(NamedTuple):
    """An assistant turn as text.

    Attributes:
        prompt: the text before it.
        target: its own text.
        end: the token that ends it if the target does not end with one; otherwise empty.
    """

    prompt: str
    target: str
    end: str


class _TargetTokens(NamedTuple):
    """The tokens of a target.

    Attributes:
        ids: int32 [n].
        start: int [n], the character of the target at which each token begins.
        stop: int [n], the character at which it ends.
        controls: the indices of control tokens.
    """

    ids: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    controls: np.ndarray


class Renderer:
    """Renders conversations as documents, with the chat template of the tokenizer.

    The prompt of a turn is the text that a chat would send at that point. Its target is the text
    that should come back, with the token that ends it. Turns share a document if the tokens of each
    next prompt begin with those of the document so far. If they do not, because the template
    changes what came before (it may drop earlier reasoning), a turn gets its own document. If the
    template has ``{% generation %}`` blocks, only their text is trained. A token is trained if all
    its characters are in a block.

    Args:
        tokenizer: a tokenizer with a chat template.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        only_last_turns: train only the turns after the last user message.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        stop_token_ids: Collection[int] = (),
        only_last_turns: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, stop_token_ids)
        self.only_last_turns = only_last_turns
        self.control_ids = np.array(list(self.template.control_tokens))
        self._controls = any_of(self.template.control_tokens.values())

        # A copy, because other code sets up the tokenizer so that "<|im_end|>" is text. Without a
        # post-processor, which would add nothing here, but may remove white space from the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        self.backend.post_processor = None

    def render_answer(self, record: PreferenceRecord, answer: list[Message]) -> Document:
        """Render the prompt of a record and an answer to it. Only the answer is trained."""
        conversation = Conversation(record.prompt + answer, record.tools)
        rendered = self(conversation, after=len(record.prompt))
        if rendered.left_answers or rendered.left_calls or len(rendered.documents) != 1:
            raise BadRow(
                "the chat template shows the answer differently from the way it prompts for it"
            )
        return rendered.documents[0]

    def __call__(self, conversation: Conversation, after: int | None = None) -> Rendered:
        """Render a conversation.

        Args:
            conversation: the messages and the tools.
            after: train only turns that end after this many messages. By default all turns are
                trained, or with ``only_last_turns`` those after the last user message.

        Raises:
            BadRow: if the chat template refuses the conversation or does not show it, or if its
                text cannot be used.
        """
        tools = conversation.tools
        messages, thoughts = self.template.adapt(conversation.messages)
        self._check_text(messages, tools)
        full_text, marks = render(self.tokenizer, messages, tools)
        if marks is not None and all(start == end for start, end in marks):
            raise BadRow("the chat template's {% generation %} marks nothing in it")

        documents: list[Document] = []
        left_answers = 0
        left_calls = 0
        unshown = 0
        remade = 0
        first_trained = self._first_trained(messages) if after is None else after
        for start, stop in _turns_of(messages):
            if stop <= first_trained:
                continue
            turn = _Turn(
                history=messages[:start],
                messages=messages[start:stop],
                tools=tools,
                thoughts=[thought for thought in thoughts[start:stop] if thought],
            )
            prompted = self._prompted(turn)
            if prompted is None:
                if "tool_calls" in turn.messages[-1]:
                    left_calls += 1
                else:
                    left_answers += 1
                continue
            prompt, target, end = prompted

            contents = [message["content"].strip() for message in turn.messages]
            unshown += any(text not in target for text in [*turn.thoughts, *contents])

            spans = [(0, len(target))]
            if marks is not None:
                if full_text.startswith(prompt + target):
                    spans = _clipped(marks, start=len(prompt), length=len(target))
                else:
                    remade += 1
            if spans:
                spans.append((len(target), len(target + end)))
                self._add(documents, prompt, target + end, spans)

        return Rendered(
            documents,
            left_answers=left_answers,
            left_calls=left_calls,
            unshown=unshown,
            remade=remade,
        )

    def _check_text(self, messages: list[Message], tools: list[Fields] | None) -> None:
        """Raise :class:`BadRow` if a message or tool holds a control token or is not valid text."""
        places: list[tuple[str, object]] = [
            (f"message {number} ({message['role']})", message)
            for number, message in enumerate(messages, start=1)
        ]
        places.append(("field 'tools'", tools))
        for place, content in places:
            for text in _strings(content):
                control = self._controls.search(text)
                if control:
                    raise BadRow(f"{place} holds the control token {control[0]}")
                if _HALF.search(text):
                    raise BadRow(f"{place} holds half of a surrogate pair, which is not valid text")

    def _first_trained(self, messages: list[Message]) -> int:
        """Return the number of messages that come before the first turn to train."""
        if not self.only_last_turns:
            return 0
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        return max(questions, default=0)

    def cut(self, document: Document, width: int) -> Document:
        """Return the first ``width`` tokens of a document, without the ends of its turns."""
        ids = document.ids[:width]
        loss_mask = document.loss_mask[:width]
        target_ids = ids[loss_mask & ~np.isin(ids, self.control_ids)].tolist()
        text = self.backend.decode(target_ids, skip_special_tokens=False)
        return Document(ids, loss_mask, target_bytes=len(text.encode()))

    # --- from a turn to its prompt and its target

    def _render(
        self,
        messages: list[Message],
        tools: list[Fields] | None,
        switch: Switch,
        add_generation_prompt: bool = False,
    ) -> str:
        text, _ = render(
            self.tokenizer,
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            switch=switch,
        )
        return text

    def _prompted(self, turn: _Turn) -> _PromptedTurn | None:
        """Return a turn as text, or ``None`` if the template does not show it after any prompt.

        Several ways to prompt are tried. If the turn has reasoning, a prompt that asks for
        reasoning comes first, and is taken only if the target shows some of the reasoning.
        """
        choices = [True, False] if turn.thoughts else [False]
        for with_reasoning in choices:
            for switch in self.template.switches(with_reasoning):
                prompt = self._render(turn.history, turn.tools, switch, add_generation_prompt=True)
                target = self._target(turn, prompt, switch)
                if target is None:
                    continue
                shows_reasoning = any(thought in target for thought in turn.thoughts)
                if shows_reasoning or not with_reasoning:
                    return self._with_end(turn, prompt, target, switch)
        return None

    def _target(self, turn: _Turn, prompt: str, switch: Switch) -> str | None:
        """Return the text that should come back for a prompt, or ``None`` if it is not shown."""
        text = self._render(turn.history + turn.messages, turn.tools, switch)
        if text.startswith(prompt):
            return text[len(prompt) :]
        target = _target_of_opened_reasoning(turn, prompt, text)
        if target is not None:
            return target
        return self._target_after_other_history(turn, prompt, text, switch)

    def _target_after_other_history(
        self, turn: _Turn, prompt: str, text: str, switch: Switch
    ) -> str | None:
        """Return the target if the template shows the history differently from the prompt.

        The target then follows the words that ask for a turn. Of several such places, it is the
        last one before the text depends on the messages of the turn.

        Args:
            turn: the turn.
            prompt: the prompt.
            text: the history and the turn.
            switch: the option of the template.
        """
        request = self._request(turn, prompt, switch)
        altered_messages = [_altered(message) for message in turn.messages]
        try:
            altered = self._render(turn.history + altered_messages, turn.tools, switch)
        except BadRow:
            return None

        common = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(text, altered, strict=False)
        )
        common_length = sum(1 for _ in common)
        place = text.rfind(request, 0, common_length)
        if not request or place < 0:
            return None
        return text[place + len(request) :]

    def _request(self, turn: _Turn, prompt: str, switch: Switch) -> str:
        """Return the words at the end of a prompt that ask for a turn.

        The text is empty if the prompt shows the history differently.
        """
        history = self._render(turn.history, turn.tools, switch)
        return prompt[len(history) :] if prompt.startswith(history) else ""

    def _with_end(self, turn: _Turn, prompt: str, target: str, switch: Switch) -> _PromptedTurn:
        """Cut a target after the token that ends the turn.

        Raises:
            BadRow: if the template shows nothing of the turn, or if one of its messages follows a
                turn that has ended.
        """
        number = len(turn.history) + len(turn.messages)
        end = self.template.end_pattern.search(target)
        if end:
            text = target[: end.start()]
            rest = target[end.end() :]
        else:
            text = target
            rest = ""
        if not text.strip():
            raise BadRow(f"the chat template shows nothing of message {number} (assistant)")

        if len(turn.messages) > 1:
            request = self._request(turn, prompt, switch).strip()
            if self._controls.sub("", rest).strip() or (request and request in text):
                raise BadRow(
                    f"message {number} (assistant) follows an assistant turn that has ended"
                )

        if end:
            return _PromptedTurn(prompt, target[: end.end()], end="")
        end_token = self.template.end_token_of(turn.messages[-1])
        return _PromptedTurn(prompt, target.rstrip(), end_token)

    # --- from text to tokens

    def _add(self, documents: list[Document], prompt: str, target: str, spans: list[Span]) -> None:
        """Add a turn to the last document if its prompt continues it, and as a new one otherwise.

        Args:
            documents: the documents of the conversation so far.
            prompt: the prompt of the turn.
            target: its text, with the token that ends it.
            spans: the parts of the target that are trained.
        """
        prompt_ids = np.array(self.backend.encode(prompt, add_special_tokens=False).ids, np.int32)
        tokens = self._tokens_of_target(prompt, prompt_ids, target)

        earlier = _EMPTY_DOCUMENT
        if documents and np.array_equal(prompt_ids[: len(documents[-1].ids)], documents[-1].ids):
            earlier = documents.pop()

        is_trained = np.zeros(len(tokens.ids), bool)
        target_bytes = 0
        for start, stop in spans:
            inside = np.flatnonzero((start <= tokens.start) & (tokens.stop <= stop))
            if len(inside):
                is_trained[inside] = True
                text = target[tokens.start[inside[0]] : tokens.stop[inside[-1]]]
                target_bytes += len(text.encode())
        for i in tokens.controls:
            if is_trained[i]:
                target_bytes -= len(target[tokens.start[i] : tokens.stop[i]].encode())
        trained_ids = tokens.ids[is_trained]
        has_end = len(trained_ids) > 0 and int(trained_ids[-1]) in self.template.stop_token_ids

        rest_of_prompt = np.zeros(len(prompt_ids) - len(earlier.ids), bool)
        loss_mask = np.concatenate([earlier.loss_mask, rest_of_prompt, is_trained])
        loss_mask[:1] = False  # the first token has no context

        target_bytes += earlier.target_bytes
        ended_before = earlier.turn_ends[-1].ended if earlier.turn_ends else 0
        turn_end = TurnEnd(
            length=len(loss_mask),
            targets=int(loss_mask.sum()),
            target_bytes=target_bytes,
            ended=ended_before + int(has_end),
        )
        documents.append(
            Document(
                ids=np.concatenate([prompt_ids, tokens.ids]),
                loss_mask=loss_mask,
                target_bytes=target_bytes,
                turn_ends=(*earlier.turn_ends, turn_end),
            )
        )

    def _tokens_of_target(self, prompt: str, prompt_ids: np.ndarray, target: str) -> _TargetTokens:
        """Tokenise a target after its prompt.

        If the last characters of the prompt and the first of the target became one token, the
        target is tokenised without the prompt: a model that answers begins with a new token.
        """
        encoding = self.backend.encode(prompt + target, add_special_tokens=False)
        skipped = len(prompt_ids)
        shift = len(prompt)
        if encoding.ids[:skipped] != prompt_ids.tolist():
            encoding = self.backend.encode(target, add_special_tokens=False)
            skipped = 0
            shift = 0

        ids = np.array(encoding.ids[skipped:], np.int32)
        offsets = np.array(encoding.offsets[skipped:], int).reshape(-1, 2) - shift
        start = offsets[:, 0]
        stop = offsets[:, 1]
        controls = np.flatnonzero(np.isin(ids, self.control_ids))
        for i in controls:  # some include the white space around them
            token = target[start[i] : stop[i]]
            inner_start = stop[i] - len(token.lstrip())
            inner_stop = start[i] + len(token.rstrip())
            start[i] = inner_start
            stop[i] = inner_stop
        return _TargetTokens(ids, start, stop, controls)


_EMPTY_DOCUMENT = Document(ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool), target_bytes=0)


def _clipped(spans: list[Span], start: int, length: int) -> list[Span]:
    """Return the parts of spans that lie in a section of the text, counted from its ``start``."""
    clipped = []
    for first, last in spans:
        first_inside = max(first - start, 0)
        last_inside = min(last - start, length)
        if first_inside < last_inside:
            clipped.append((first_inside, last_inside))
    return clipped


def _turns_of(messages: list[Message]) -> Iterator[tuple[int, int]]:
    """Yield the index of each assistant turn's first message, and of the message after the turn.

    A turn at the very beginning of a conversation has no prompt, and is left out.
    """
    stop = 0
    are_assistants = (message["role"] == "assistant" for message in messages)
    for is_assistant, run in itertools.groupby(are_assistants):
        start = stop
        stop += len(list(run))
        if is_assistant and start:
            yield start, stop


def _target_of_opened_reasoning(turn: _Turn, prompt: str, text: str) -> str | None:
    """Return the target of a prompt that has already begun the reasoning.

    Returns:
        The reasoning and the answer; ``None`` if the prompt has begun no reasoning, or if the text
        does not begin with the part of the prompt before the reasoning.
    """
    opened = OPENED.search(prompt)
    if opened is None or not text.startswith(prompt[: opened.start()]):
        return None
    answer = text[opened.start() :].rpartition("</think>")[2].lstrip("\n")
    return "\n".join(turn.thoughts) + f"\n</think>\n\n{answer}"


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


def _strings(value: object) -> Iterator[str]:
    """Yield all texts in a JSON value, with the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
