"""Conversations -> documents of tokens, of which the assistant's turns are trained as they would be generated."""

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


class Document(NamedTuple):
    """Tokens that are trained on together.

    Attributes:
        ids: int32 [n].
        trained: bool [n], whether a token is a target.
        trained_bytes: UTF-8 bytes of the trained text; control tokens count none.
        turns: of the assistant that are targets.
        ended: turns whose last trained token is one that ends a turn.
    """

    ids: np.ndarray
    trained: np.ndarray
    trained_bytes: int
    turns: int
    ended: int


class Rendered(NamedTuple):
    """One conversation as documents, each turn of the assistant's a target in one of them.

    Attributes:
        left_answers, left_calls: turns in none, since the template shows them otherwise than it prompts for them.
        unshown: turns whose reasoning, or whose words beside a call, the template does not show.
        remade: turns that ``{% generation %}`` marks elsewhere than they would be generated.
    """

    documents: list[Document]
    left_answers: int = 0
    left_calls: int = 0
    unshown: int = 0
    remade: int = 0


class _Turn(NamedTuple):
    before: list[Message]
    said: list[Message]
    tools: list[Fields] | None
    thoughts: list[str]


class Renderer:
    """Conversations -> documents, by the chat template that the tokenizer has.

    A turn's prompt is what a chat would send at that point; its target is what should come back, to the token that ends
    it. Turns share a document where the tokens of the next prompt begin with it. Else each has one of its own, since
    the template changes what came before: it drops earlier reasoning, say. Where the template has ``{% generation %}``
    blocks, they say what of such a turn is trained; a token is where all its characters are. ``last`` trains the turns
    since the last question alone.
    """

    def __init__(
        self, tokenizer: FastTokenizer, stops: Collection[int] = (), last: bool = False
    ) -> None:
        self.tokenizer, self.template, self.last = tokenizer, ChatTemplate(tokenizer, stops), last
        self.control_ids = np.array(list(self.template.controls))
        self._controls = any_of(self.template.controls.values())
        # A copy, because others have the tokenizer read "<|im_end|>" as text. A post-processor would add nothing here,
        # but may take white space out of the offsets.
        self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = False
        self.backend.post_processor = None

    def judged(self, record: PreferenceRecord, answer: list[Message]) -> Document:
        """Render the prompt and an answer to it, of which the turns of the assistant's are judged."""
        rendered = self(Conversation(record.prompt + answer, record.tools), len(record.prompt))
        if rendered.left_answers or rendered.left_calls or len(rendered.documents) != 1:
            raise BadRow("the chat template shows the answer otherwise than it prompts for it")
        return rendered.documents[0]

    def __call__(self, conversation: Conversation, after: int | None = None) -> Rendered:
        """Render a conversation.

        Args:
            conversation: The messages and the tools.
            after: Train only turns that end after this many messages. By default all turns are trained, or with
                ``last`` those after the last user message.

        Raises:
            BadRow: If the chat template refuses the conversation or does not show it, or if its text cannot be used.
        """
        tools = conversation.tools
        messages, thoughts = self.template.fitted(conversation.messages)
        self._check_text(messages, tools)
        whole, marks = render(self.tokenizer, messages, tools)
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
                before=messages[:start],
                said=messages[start:stop],
                tools=tools,
                thoughts=[thought for thought in thoughts[start:stop] if thought],
            )
            prompted = self._prompted(turn)
            if prompted is None:
                if "tool_calls" in turn.said[-1]:
                    left_calls += 1
                else:
                    left_answers += 1
                continue
            prompt, target, stop_token = prompted

            contents = [message["content"].strip() for message in turn.said]
            unshown += any(text not in target for text in [*turn.thoughts, *contents])

            spans = [(0, len(target))]
            if marks is not None:
                if whole.startswith(prompt + target):
                    spans = _clipped(marks, start=len(prompt), length=len(target))
                else:
                    remade += 1
            if spans:
                spans.append((len(target), len(target + stop_token)))
                self._add(documents, prompt, target + stop_token, spans)
        return Rendered(documents, left_answers, left_calls, unshown, remade)

    def _check_text(self, messages: list[Message], tools: list[Fields] | None) -> None:
        """Raise :class:`BadRow` if a message or a tool holds a control token or is not valid text."""
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
        if not self.last:
            return 0
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        return max(questions, default=0)

    def cut(self, document: Document, width: int) -> Document:
        """Return its first ``width`` tokens. Where their turns end is lost."""
        ids, trained = document.ids[:width], document.trained[:width]
        said = ids[trained & ~np.isin(ids, self.control_ids)].tolist()
        return Document(
            ids, trained, len(self.backend.decode(said, skip_special_tokens=False).encode()), 0, 0
        )

    def _prompted(self, turn: _Turn) -> tuple[str, str, str] | None:
        """Return the prompt for a turn, what should come back, and the token to end that with where it has none.

        ``None`` where the template does not show what should come back.
        """
        for reasons in [True, False] if turn.thoughts else [False]:
            for switch in self.template.switches(reasons):
                prompt, _ = render(self.tokenizer, turn.before, turn.tools, True, switch)
                text, _ = render(self.tokenizer, turn.before + turn.said, turn.tools, False, switch)
                target = (
                    text[len(prompt) :]
                    if text.startswith(prompt)
                    else _reasoned(turn, prompt, text)
                )
                if target is None:
                    target = self._behind_another_history(turn, prompt, text, switch)
                if target is not None and (
                    not reasons or any(thought in target for thought in turn.thoughts)
                ):
                    return prompt, *self._to_its_end(turn, prompt, target, switch)
        return None

    def _behind_another_history(
        self, turn: _Turn, prompt: str, text: str, switch: Switch
    ) -> str | None:
        """Return what follows the words that ask for a turn, where those before them are not the prompt's."""
        asks, altered = self._asks(turn, prompt, switch), [*map(_altered, turn.said)]
        try:
            other, _ = render(self.tokenizer, turn.before + altered, turn.tools, False, switch)
        except BadRow:
            return None
        pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other, strict=False))
        at = text.rfind(asks, 0, sum(1 for _ in pairs))
        return text[at + len(asks) :] if asks and at >= 0 else None

    def _asks(self, turn: _Turn, prompt: str, switch: Switch) -> str:
        """Return what a prompt has behind the messages before it; nothing where it has these otherwise."""
        history, _ = render(self.tokenizer, turn.before, turn.tools, False, switch)
        return prompt[len(history) :] if prompt.startswith(history) else ""

    def _to_its_end(self, turn: _Turn, prompt: str, target: str, switch: Switch) -> tuple[str, str]:
        """Cut a target behind the token that ends the turn.

        Returns:
            The target, and the token that ends it if the template shows none (else an empty string).

        Raises:
            BadRow: If the template shows nothing of the turn, or if one of its messages follows an ended turn.
        """
        number = len(turn.before) + len(turn.said)
        end = self.template.end.search(target)
        if end:
            text = target[: end.start()]
            rest = target[end.end() :]
        else:
            text = target
            rest = ""
        if not text.strip():
            raise BadRow(f"the chat template shows nothing of message {number} (assistant)")

        if len(turn.said) > 1:
            asks = self._asks(turn, prompt, switch).strip()
            if self._controls.sub("", rest).strip() or (asks and asks in text):
                raise BadRow(
                    f"message {number} (assistant) follows a turn of the assistant's that has ended"
                )
        if end:
            return target[: end.end()], ""
        return target.rstrip(), self.template.stop_of(turn.said[-1])

    def _add(self, documents: list[Document], prompt: str, target: str, spans: list[Span]) -> None:
        """Add a turn to the last document, if the tokens of its prompt begin with that, or else as one of its own."""
        before = self.backend.encode(prompt, add_special_tokens=False).ids
        encoding, shift = (
            self.backend.encode(prompt + target, add_special_tokens=False),
            len(prompt),
        )
        if (
            encoding.ids[: len(before)] != before
        ):  # they would grow together, which a model that answers cannot do
            encoding, shift = self.backend.encode(target, add_special_tokens=False), 0
        skipped = len(before) if shift else 0
        ids, prompt_ids = np.array(encoding.ids[skipped:], np.int32), np.array(before, np.int32)
        offsets = np.array(encoding.offsets[skipped:], int).reshape(-1, 2)
        first, last = offsets.T - shift  # a token is target[first:last]
        controls = np.flatnonzero(np.isin(ids, self.control_ids))
        for i in controls:  # some take in the white space beside them
            token = target[first[i] : last[i]]
            first[i], last[i] = last[i] - len(token.lstrip()), first[i] + len(token.rstrip())

        earlier = _NOTHING
        if documents and np.array_equal(prompt_ids[: len(documents[-1].ids)], documents[-1].ids):
            earlier = documents.pop()
        trained, size = np.zeros(len(ids), bool), 0
        for start, end in spans:
            inside = np.flatnonzero((start <= first) & (last <= end))
            if len(inside):
                trained[inside] = True
                size += len(target[first[inside[0]] : last[inside[-1]]].encode())
        size -= sum(len(target[first[i] : last[i]].encode()) for i in controls if trained[i])
        ended = trained.any() and int(ids[trained][-1]) in self.template.ends
        between = np.zeros(len(prompt_ids) - len(earlier.ids), bool)
        every, targets = (
            np.concatenate([prompt_ids, ids]),
            np.concatenate([earlier.trained, between, trained]),
        )
        targets[:1] = False  # nothing comes before it
        size += earlier.trained_bytes
        documents.append(
            Document(every, targets, size, earlier.turns + 1, earlier.ended + int(ended))
        )


_NOTHING = Document(np.zeros(0, np.int32), np.zeros(0, bool), 0, 0, 0)


def _clipped(spans: list[Span], start: int, length: int) -> list[Span]:
    """Return the parts of spans that lie in a stretch of text, counted from its ``start``."""
    clipped = []
    for first, last in spans:
        first_inside = max(first - start, 0)
        last_inside = min(last - start, length)
        if first_inside < last_inside:
            clipped.append((first_inside, last_inside))
    return clipped


def _turns_of(messages: list[Message]) -> Iterator[tuple[int, int]]:
    """Yield where each turn of the assistant's begins and ends; not of one that nothing comes before."""
    at = 0
    for speaks, run in itertools.groupby(message["role"] == "assistant" for message in messages):
        start, at = at, at + len(list(run))
        if speaks and start:
            yield start, at


def _reasoned(turn: _Turn, prompt: str, text: str) -> str | None:
    """Return a turn whose prompt has begun its reasoning, which the template does not show behind it."""
    opened = OPENED.search(prompt)
    if opened is None or not text.startswith(prompt[: opened.start()]):
        return None
    said = text[opened.start() :].rpartition("</think>")[2].lstrip("\n")
    return "\n".join(turn.thoughts) + f"\n</think>\n\n{said}"


def _altered(value: Any) -> Any:
    """Return a message that says something else from its first letter on."""
    if isinstance(value, dict):
        return {
            key: one if key in ("role", "type", "id") else _altered(one)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [*map(_altered, value)]
    return f"~{value}" if isinstance(value, str) and value else value


def _strings(value: object) -> Iterator[str]:
    """Yield the texts in what JSON can hold."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)
