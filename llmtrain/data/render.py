"""Render conversations as documents of tokens.

The assistant's turns are the targets, exactly as the model would have to generate them.
"""

import itertools
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from llmtrain.data.chat_template import OPENED, ChatTemplate, Span, Switch
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.jinja_template import JinjaTemplate, PlainData, Rendering
from llmtrain.data.messages import (
    BadRecord,
    Message,
    other_fields_of,
    trained_messages,
    without_weights,
)
from llmtrain.data.sources import Fields
from llmtrain.data.text_encoder import Controls, TextEncoder, Tokens, texts_of
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


class TokenSequence(NamedTuple):
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

    @property
    def turns(self) -> int:
        """The number of assistant turns that are targets."""
        return len(self.turn_ends)

    @property
    def ended(self) -> int:
        """The number of these whose last target token ends a turn."""
        return self.turn_ends[-1].ended if self.turn_ends else 0


class Rendered(NamedTuple):
    """A conversation as documents. Each assistant turn is a target in one of them.

    Attributes:
        sequences: the token sequences.
        left_answers: answers that are in no document, because the template shows them differently
            from the way it prompts for them.
        left_calls: the same for turns that end with a call.
        unshown: turns whose reasoning, or whose text next to a call, the template does not show.
        remade: turns that are trained in full, because ``{% generation %}`` marks text that their
            prompt does not lead to.
        unweighted: turns that are not trained, because their weight is 0.
        special_as_text: special tokens in messages that are encoded as text.
        other_fields: the number of messages that have each field that is not read here.
    """

    sequences: list[TokenSequence]
    left_answers: int = 0
    left_calls: int = 0
    unshown: int = 0
    remade: int = 0
    unweighted: int = 0
    special_as_text: int = 0
    other_fields: Counter[str] = Counter()  # noqa: RUF012 - nobody changes it


class _Turn(NamedTuple):
    """An assistant turn.

    Attributes:
        start: the number of messages before it.
        stop: the number of messages up to its end.
        messages: its own messages.
        thoughts: the reasoning of its messages.
    """

    start: int
    stop: int
    messages: list[Message]
    thoughts: list[str]

    @property
    def is_call(self) -> bool:
        """Whether the turn ends with a call."""
        return "tool_calls" in self.messages[-1]


class _PromptedTurn(NamedTuple):
    """An assistant turn as text.

    Attributes:
        prompt: the text before it.
        target: its own text.
        end: the token that ends it if the target does not end with one; otherwise empty.
        text: a text that begins with the prompt and the target.
    """

    prompt: str
    target: str
    end: str
    text: str


class _TrainedTurn(NamedTuple):
    """An assistant turn as text, and the parts of it that are trained.

    Attributes:
        prompt: the text before it.
        target: its own text, with the token that ends it.
        spans: the parts of the target that are trained.
    """

    prompt: str
    target: str
    spans: list[Span]


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
    controls: list[int]


class _TargetMask(NamedTuple):
    """The tokens of a target that are trained.

    Attributes:
        is_trained: bool [n], or ``True`` if all are.
        target_bytes: UTF-8 bytes of their text, without control tokens.
        has_end: whether the last one ends a turn.
    """

    is_trained: np.ndarray | bool
    target_bytes: int
    has_end: bool


@dataclass
class _TurnCounts:
    """Counts of the turns of a conversation; see :class:`Rendered`."""

    left_answers: int = 0
    left_calls: int = 0
    unshown: int = 0
    remade: int = 0
    unweighted: int = 0


class _Texts:
    """The texts of a conversation and of its beginnings, each rendered once.

    Args:
        template: the chat template.
        messages: the messages, as the template takes them.
        tools: the tools.
        has_escapes: whether special tokens in the messages are escaped.
    """

    def __init__(
        self,
        template: JinjaTemplate,
        messages: list[Message],
        tools: list[Fields] | None,
        has_escapes: bool,
    ) -> None:
        self.messages = messages
        self.has_escapes = has_escapes
        self._template = template
        self._data = template.plain_data(messages, tools)
        self._renderings: dict[tuple[tuple[str, bool], ...], Rendering] = {}
        self._texts: dict[tuple[int, tuple[tuple[str, bool], ...]], str] = {}
        self._prompts: dict[tuple[int, tuple[tuple[str, bool], ...]], str] = {}

    def complete(self, switch: Switch) -> Rendering:
        """Return the complete conversation."""
        key = tuple(switch.items())
        if key not in self._renderings:
            self._renderings[key] = self._template.render_completely(self._data, switch)
        return self._renderings[key]

    def text(self, stop: int, switch: Switch) -> str:
        """Return the text of the first messages, up to number ``stop``."""
        if stop == len(self.messages):
            return self.complete(switch).text
        key = stop, tuple(switch.items())
        if key not in self._texts:
            self._texts[key] = self._template.render(self._beginning(stop), switch=switch)
        return self._texts[key]

    def prompt(self, stop: int, switch: Switch) -> str:
        """Return the first messages, up to number ``stop``, with the request for an answer."""
        key = stop, tuple(switch.items())
        if key not in self._prompts:
            self._prompts[key] = self._template.render(
                self._beginning(stop), add_generation_prompt=True, switch=switch
            )
        return self._prompts[key]

    def altered_text(self, turn: _Turn, switch: Switch) -> str:
        """Return the text up to the end of a turn whose messages differ from the first letter."""
        altered = [_altered(message) for message in turn.messages]
        data = self._template.plain_data(altered, None)
        history = self._data.messages[: turn.start]
        return self._template.render(
            PlainData(history + data.messages, self._data.tools), switch=switch
        )

    def _beginning(self, stop: int) -> PlainData:
        return PlainData(self._data.messages[:stop], self._data.tools)


class Renderer:
    """Renders conversations as documents, with the chat template of the tokenizer.

    The prompt of a turn is the text that a chat would send at that point. Its target is the text
    that should come back, with the token that ends it. Turns share a document if the tokens of each
    next prompt begin with those of the document so far. If they do not, because the template
    changes what came before (it may drop earlier reasoning), a turn gets its own document. If the
    template has ``{% generation %}`` blocks, only their text is trained. A token is trained if all
    its characters are in a block.

    Special tokens in messages are encoded as ordinary text.

    Most conversations are rendered completely only once, and encoded once; see
    :class:`JinjaTemplate` and :meth:`TextEncoder.count_before`. If it is not certain that this
    gives the same text and the same tokens, each turn is rendered and encoded by itself.

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
        self.encoder = TextEncoder(tokenizer, self.template.control_tokens)
        self._jinja = JinjaTemplate(tokenizer)
        self._arguments = (tokenizer, tuple(stop_token_ids), only_last_turns)

        # All texts after which a stop token may go on.
        stop_tokens = [self.template.control_tokens[id] for id in self.template.stop_token_ids]
        self._longest_stop = max(map(len, stop_tokens))
        self._stop_beginnings = {
            token[:length] for token in stop_tokens for length in range(len(token))
        }

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled, so another process makes it again.
        return type(self), self._arguments

    @property
    def stop_token_ids(self) -> set[int]:
        """The tokens at which an answer ends."""
        return self.template.stop_token_ids

    def render_answers(self, record: PreferenceRecord) -> Rendered:
        """Render the prompt of a record with each of its answers. Only the answer is trained.

        Returns:
            A document for each answer.

        Raises:
            BadRecord: if an answer cannot be rendered.
        """
        documents = [self.render_answer(record, answer) for answer in record.answers]
        _, special_as_text = self.encoder.escape([record.messages, record.tools])
        return Rendered(
            documents,
            special_as_text=special_as_text,
            other_fields=other_fields_of(record.messages),
        )

    def render_answer(self, record: PreferenceRecord, answer: list[Message]) -> TokenSequence:
        """Render the prompt of a record and an answer to it. Only the answer is trained."""
        conversation = Conversation(record.prompt + answer, record.tools)
        rendered = self(conversation, after=len(record.prompt))
        if rendered.left_answers or rendered.left_calls or len(rendered.sequences) != 1:
            raise BadRecord(
                "the chat template shows the answer differently from the way it prompts for it"
            )
        return rendered.sequences[0]

    def __call__(self, conversation: Conversation, after: int | None = None) -> Rendered:
        """Render a conversation.

        Args:
            conversation: the messages and the tools.
            after: train only turns that end after this many messages. By default all turns are
                trained, or with ``only_last_turns`` those after the last user message.

        Raises:
            BadRecord: if the chat template refuses the conversation or does not show it, or if its
                text cannot be used.
        """
        tools = conversation.tools
        is_trained = trained_messages(conversation.messages)
        messages, thoughts = self.template.adapt(without_weights(conversation.messages))
        # The template shows the messages. Some targets are made of reasoning that is not in them.
        shown: list[Any] = [messages, tools]
        if self.template.opens_reasoning and self.template.reasoning_field is None:
            shown.append(thoughts)
        _check_text(shown, messages, thoughts)
        escaped, special_as_text = self.encoder.escape(shown)
        if special_as_text:
            messages, tools = escaped[:2]
            thoughts, _ = self.encoder.escape(thoughts)

        texts = _Texts(self._jinja, messages, tools, has_escapes=special_as_text > 0)
        rendering = texts.complete({})
        if texts.has_escapes:
            self.encoder.check_json(rendering.text)
        marks = rendering.marks
        if marks is not None and all(start == end for start, end in marks):
            raise BadRecord("the chat template's {% generation %} marks nothing in it")

        counts = _TurnCounts()
        trained_turns: list[_TrainedTurn] = []
        first_trained = self._first_trained(messages) if after is None else after
        for start, stop in _turns_of(messages):
            if stop <= first_trained:
                continue
            if not is_trained[start]:
                counts.unweighted += 1
                continue
            turn = _Turn(
                start=start,
                stop=stop,
                messages=messages[start:stop],
                thoughts=[thought for thought in thoughts[start:stop] if thought],
            )
            trained_turn = self._trained_turn(texts, turn, counts)
            if trained_turn is not None:
                trained_turns.append(trained_turn)

        return Rendered(
            self._documents(trained_turns, texts.has_escapes),
            left_answers=counts.left_answers,
            left_calls=counts.left_calls,
            unshown=counts.unshown,
            remade=counts.remade,
            unweighted=counts.unweighted,
            special_as_text=special_as_text,
            other_fields=other_fields_of(messages),
        )

    def _first_trained(self, messages: list[Message]) -> int:
        """Return the number of messages that come before the first turn to train."""
        if not self.only_last_turns:
            return 0
        questions = [i for i, message in enumerate(messages) if message["role"] == "user"]
        return max(questions, default=0)

    def cut(self, document: TokenSequence, width: int) -> TokenSequence:
        """Return the first ``width`` tokens of a document; see :func:`cut`."""
        return cut(document, width, self.encoder)

    # --- from a turn to its prompt and its target

    def _trained_turn(self, texts: _Texts, turn: _Turn, counts: _TurnCounts) -> _TrainedTurn | None:
        """Return a turn with the parts of it that are trained, or ``None`` if nothing is.

        Args:
            texts: the texts of the conversation.
            turn: the turn.
            counts: counts of the turns, which are updated.
        """
        prompted = self._prompted(texts, turn)
        if prompted is None:
            if turn.is_call:
                counts.left_calls += 1
            else:
                counts.left_answers += 1
            return None
        prompt, target, end, text = prompted

        contents = [message["content"].strip() for message in turn.messages]
        counts.unshown += any(content not in target for content in [*turn.thoughts, *contents])

        complete = texts.complete({})
        spans = [(0, len(target))]
        if complete.marks is not None:
            if text is complete.text or complete.text.startswith(prompt + target):
                spans = _clipped(complete.marks, start=len(prompt), length=len(target))
            else:
                counts.remade += 1
        if not spans:
            return None
        if end:
            spans.append((len(target), len(target + end)))
        return _TrainedTurn(prompt, target + end, spans)

    def _prompted(self, texts: _Texts, turn: _Turn) -> _PromptedTurn | None:
        """Return a turn as text, or ``None`` if the template does not show it after any prompt.

        Several ways to prompt are tried. If the turn has reasoning, a prompt that asks for
        reasoning comes first, and is taken only if the target shows some of the reasoning.
        """
        prompted = self._prompted_in_conversation(texts, turn)
        if prompted is not None:
            return prompted

        choices = [True, False] if turn.thoughts else [False]
        for with_reasoning in choices:
            for switch in self.template.switches(with_reasoning):
                prompt = texts.prompt(turn.start, switch)
                target = self._target(texts, turn, prompt, switch)
                if target is None:
                    continue
                shows_reasoning = any(thought in target for thought in turn.thoughts)
                if shows_reasoning or not with_reasoning:
                    return self._with_end(texts, turn, prompt, target, switch)
        return None

    def _prompted_in_conversation(self, texts: _Texts, turn: _Turn) -> _PromptedTurn | None:
        """Find a turn in the text of the complete conversation.

        Returns:
            The same as :meth:`_prompted`, or ``None`` if the text of the turn may depend on the
            messages after it.
        """
        if len(turn.messages) > 1:
            return None
        switch = self.template.switches(bool(turn.thoughts))[0]
        text = texts.complete(switch).text
        known = texts.complete(switch).known[turn.stop]
        prompt = texts.prompt(turn.start, switch)
        if known < len(prompt) or not text.startswith(prompt):
            return None

        end = self.template.find_end(text, len(prompt), known)
        is_last = turn.stop == len(texts.messages)
        if end is None or not (is_last or self._is_final(text, end.end(), known)):
            return None
        target = text[len(prompt) : end.end()]
        is_empty = end.start() == len(prompt) or text[len(prompt) : end.start()].isspace()
        shows_reasoning = any(thought in target for thought in turn.thoughts)
        if is_empty or (turn.thoughts and not shows_reasoning):
            return None
        return _PromptedTurn(prompt, target, end="", text=text)

    def _is_final(self, text: str, end: int, known: int) -> bool:
        """Return whether the same stop tokens are found if the text goes on differently.

        Args:
            text: the text of the complete conversation.
            end: the end of the stop tokens that were found.
            known: the length of the text up to which it does not go on differently.
        """
        first = max(known - self._longest_stop + 1, 0)
        return not any(
            text[start:known] in self._stop_beginnings for start in range(first, end + 1)
        )

    def _target(self, texts: _Texts, turn: _Turn, prompt: str, switch: Switch) -> str | None:
        """Return the text that should come back for a prompt, or ``None`` if it is not shown."""
        text = texts.text(turn.stop, switch)
        if text.startswith(prompt):
            return text[len(prompt) :]
        target = _target_of_opened_reasoning(turn, prompt, text)
        if target is not None:
            return target
        return self._target_after_other_history(texts, turn, prompt, text, switch)

    def _target_after_other_history(
        self, texts: _Texts, turn: _Turn, prompt: str, text: str, switch: Switch
    ) -> str | None:
        """Return the target if the template shows the history differently from the prompt.

        The target then follows the words that ask for a turn. Of several such places, it is the
        last one before the text depends on the messages of the turn.

        Args:
            texts: the texts of the conversation.
            turn: the turn.
            prompt: the prompt.
            text: the history and the turn.
            switch: the option of the template.
        """
        request = self._request(texts, turn, prompt, switch)
        try:
            altered = texts.altered_text(turn, switch)
        except BadRecord:
            return None

        common = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(text, altered, strict=False)
        )
        common_length = sum(1 for _ in common)
        place = text.rfind(request, 0, common_length)
        if not request or place < 0:
            return None
        return text[place + len(request) :]

    def _request(self, texts: _Texts, turn: _Turn, prompt: str, switch: Switch) -> str:
        """Return the words at the end of a prompt that ask for a turn.

        The text is empty if the prompt shows the history differently.
        """
        history = texts.text(turn.start, switch)
        return prompt[len(history) :] if prompt.startswith(history) else ""

    def _with_end(
        self, texts: _Texts, turn: _Turn, prompt: str, target: str, switch: Switch
    ) -> _PromptedTurn:
        """Cut a target after the token that ends the turn.

        Raises:
            BadRecord: if the template shows nothing of the turn, or if one of its messages follows
                a turn that has ended.
        """
        end = self.template.find_end(target, 0, len(target))
        if end:
            text = target[: end.start()]
            rest = target[end.end() :]
        else:
            text = target
            rest = ""
        if not text.strip():
            raise BadRecord(f"the chat template shows nothing of message {turn.stop} (assistant)")

        if len(turn.messages) > 1:
            request = self._request(texts, turn, prompt, switch).strip()
            if self.encoder.controls.sub("", rest).strip() or (request and request in text):
                raise BadRecord(
                    f"message {turn.stop} (assistant) follows an assistant turn that has ended"
                )

        if end:
            target = target[: end.end()]
            return _PromptedTurn(prompt, target, end="", text=prompt + target)
        target = target.rstrip()
        end_token = self.template.end_token_of(turn.messages[-1])
        return _PromptedTurn(prompt, target, end_token, text=prompt + target)

    # --- from text to tokens

    def _documents(self, turns: list[_TrainedTurn], has_escapes: bool) -> list[TokenSequence]:
        """Encode the turns of a conversation.

        Args:
            turns: the turns.
            has_escapes: whether special tokens in their texts are escaped.
        """
        documents: list[TokenSequence] = []
        for run in _runs_of(turns):
            if has_escapes or not self._add_run(documents, run):
                for turn in run:
                    self._add(documents, turn, has_escapes)
        return documents

    def _add_run(self, documents: list[TokenSequence], run: list[_TrainedTurn]) -> bool:
        """Add turns whose texts are all beginnings of the last one's, which is encoded once.

        Args:
            documents: the documents of the conversation so far.
            run: the turns.

        Returns:
            Whether the tokens of each text are the beginning of the tokens of the last one.
            Otherwise nothing is added.
        """
        text = run[-1].prompt + run[-1].target
        tokens = self.encoder.encode(text)
        controls = self.encoder.controls_of(text, tokens)
        if controls is None:
            return False
        targets = []
        for turn in run:
            prompt_end = len(turn.prompt)
            first = self.encoder.count_before(text, tokens, controls, prompt_end)
            last = len(tokens.ids)
            if turn is not run[-1]:
                target_end = prompt_end + len(turn.target)
                last = self.encoder.count_to_control(tokens, controls, target_end)
            if first < 0 or last < 0:
                return False
            targets.append((first, last))

        ids = tokens.array
        loss_mask = np.zeros(len(ids), bool)
        earlier = _taken_beginning(documents, ids[: targets[0][0]])
        loss_mask[: len(earlier.ids)] = earlier.loss_mask
        turn_ends = list(earlier.turn_ends)
        for turn, (first, last) in zip(run, targets, strict=True):
            mask = self._mask_of_all(turn, tokens, first, last, controls)
            if mask is None:
                mask = self._mask_of(turn, tokens, first, last, shift=len(turn.prompt))
            loss_mask[first:last] = mask.is_trained
            loss_mask[:1] = False  # the first token has no context
            turn_ends.append(_next_turn_end(turn_ends, mask, loss_mask[:last]))
        documents.append(_document(ids, loss_mask, turn_ends))
        return True

    def _add(self, documents: list[TokenSequence], turn: _TrainedTurn, has_escapes: bool) -> None:
        """Add a turn to the last document if its prompt continues it, and as a new one otherwise.

        If the last characters of the prompt and the first of the target became one token, the
        target is tokenised without the prompt: a model that answers begins with a new token.

        Args:
            documents: the documents of the conversation so far.
            turn: the turn.
            has_escapes: whether special tokens in its text are escaped.
        """
        prompt_ids = self.encoder.encode(turn.prompt, has_escapes).ids
        tokens = self.encoder.encode(turn.prompt + turn.target, has_escapes)
        first = len(prompt_ids)
        shift = len(turn.prompt)
        if tokens.ids[:first] != prompt_ids:
            tokens = self.encoder.encode(turn.target, has_escapes)
            first = 0
            shift = 0

        mask = self._mask_of(
            turn,
            tokens,
            first,
            last=len(tokens.ids),
            shift=shift,
            has_escapes=has_escapes,
        )
        ids = np.array(prompt_ids + tokens.ids[first:], np.int32)
        earlier = _taken_beginning(documents, ids[: len(prompt_ids)])
        rest_of_prompt = np.zeros(len(prompt_ids) - len(earlier.ids), bool)
        is_trained = np.broadcast_to(mask.is_trained, len(ids) - len(prompt_ids))
        loss_mask = np.concatenate([earlier.loss_mask, rest_of_prompt, is_trained])
        loss_mask[:1] = False  # the first token has no context
        turn_end = _next_turn_end(earlier.turn_ends, mask, loss_mask)
        documents.append(_document(ids, loss_mask, [*earlier.turn_ends, turn_end]))

    def _mask_of_all(
        self, turn: _TrainedTurn, tokens: Tokens, first: int, last: int, controls: Controls
    ) -> _TargetMask | None:
        """Return the mask of a turn if all tokens of its target are trained.

        This is the usual case, in which the tokens need not be looked at one by one.

        Args:
            turn: the turn.
            tokens: the tokens of its text.
            first: the index of the first token of the target.
            last: the index after its last token.
            controls: the control tokens of the text.

        Returns:
            The same as :meth:`_mask_of`; ``None`` in all other cases.
        """
        begin = bisect_left(controls.indices, first)
        end = bisect_left(controls.indices, last)
        if not self._is_whole(turn) or begin == end or controls.indices[end - 1] != last - 1:
            return None
        shift = len(turn.prompt)
        start = 0
        if not self.encoder.keeps_beginning(turn.target):
            start = tokens.spans[first][0] - shift
        if start < 0 or controls.ends[end - 1] != shift + len(turn.target):
            return None

        target_bytes = len(turn.target[start:].encode())
        for index in controls.indices[begin:end]:
            text = self.encoder.border_texts.get(tokens.ids[index])
            if text is None:
                return None
            target_bytes -= len(text.encode())
        has_end = tokens.ids[last - 1] in self.template.stop_token_ids
        return _TargetMask(is_trained=True, target_bytes=target_bytes, has_end=has_end)

    def _is_whole(self, turn: _TrainedTurn) -> bool:
        """Return whether the trained parts of a target are all of it."""
        position = 0
        for start, stop in turn.spans:
            if start != position:
                return False
            position = stop
        return position == len(turn.target)

    def _mask_of(
        self,
        turn: _TrainedTurn,
        tokens: Tokens,
        first: int,
        last: int,
        shift: int,
        has_escapes: bool = False,
    ) -> _TargetMask:
        """Find the tokens of a turn that are trained.

        Args:
            turn: the turn.
            tokens: the tokens of its text.
            first: the index of the first token of the target.
            last: the index after its last token.
            shift: the number of characters before the target.
            has_escapes: whether special tokens in the target are escaped.
        """
        target = self._target_tokens(turn.target, tokens, first, last, shift)
        plain_text = self.encoder.unescape(turn.target) if has_escapes else turn.target
        is_trained = np.zeros(len(target.ids), bool)
        target_bytes = 0
        for start, stop in turn.spans:
            inside = np.flatnonzero((start <= target.start) & (target.stop <= stop))
            if len(inside):
                is_trained[inside] = True
                text = plain_text[target.start[inside[0]] : target.stop[inside[-1]]]
                target_bytes += len(text.encode())
        for i in target.controls:
            if is_trained[i]:
                target_bytes -= len(plain_text[target.start[i] : target.stop[i]].encode())
        trained_ids = target.ids[is_trained]
        has_end = len(trained_ids) > 0 and int(trained_ids[-1]) in self.template.stop_token_ids
        return _TargetMask(is_trained, target_bytes, has_end)

    def _target_tokens(
        self, target: str, tokens: Tokens, first: int, last: int, shift: int
    ) -> _TargetTokens:
        """Return the tokens of a target; see :meth:`_mask_of`."""
        ids = np.array(tokens.ids[first:last], np.int32)
        offsets = np.array(tokens.spans[first:last], int).reshape(-1, 2) - shift
        start = offsets[:, 0]
        stop = offsets[:, 1]
        controls = [
            index
            for index, id in enumerate(tokens.ids[first:last])
            if id in self.encoder.control_texts
        ]
        for i in controls:  # some include the white space around them
            token = target[start[i] : stop[i]]
            inner_start = stop[i] - len(token.lstrip())
            inner_stop = start[i] + len(token.rstrip())
            start[i] = inner_start
            stop[i] = inner_stop
        return _TargetTokens(ids, start, stop, controls)


_EMPTY_SEQUENCE = TokenSequence(
    ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool), target_bytes=0
)


def _next_turn_end(
    turn_ends: Sequence[TurnEnd], mask: _TargetMask, loss_mask: np.ndarray
) -> TurnEnd:
    """Return the end of a turn that follows others in its document.

    Args:
        turn_ends: the ends of the turns before it.
        mask: the tokens of the turn that are trained.
        loss_mask: bool [n], of the document up to the end of the turn.
    """
    bytes_before = turn_ends[-1].target_bytes if turn_ends else 0
    ended_before = turn_ends[-1].ended if turn_ends else 0
    return TurnEnd(
        length=len(loss_mask),
        targets=int(np.count_nonzero(loss_mask)),
        target_bytes=bytes_before + mask.target_bytes,
        ended=ended_before + int(mask.has_end),
    )


def _document(ids: np.ndarray, loss_mask: np.ndarray, turn_ends: list[TurnEnd]) -> TokenSequence:
    """Return a document that ends with the last one of its turns."""
    return TokenSequence(ids, loss_mask, turn_ends[-1].target_bytes, tuple(turn_ends))


def cut(document: TokenSequence, width: int, encoder: TextEncoder) -> TokenSequence:
    """Return the first ``width`` tokens of a document.

    The result has no ``turn_ends``, so its turns count neither as turns nor as ended.
    """
    ids = document.ids[:width]
    loss_mask = document.loss_mask[:width]
    target_ids = ids[loss_mask & ~np.isin(ids, encoder.control_ids)].tolist()
    text = encoder.backend.decode(target_ids, skip_special_tokens=False)
    return TokenSequence(ids, loss_mask, target_bytes=len(text.encode()))


def _taken_beginning(documents: list[TokenSequence], prompt_ids: np.ndarray) -> TokenSequence:
    """Remove the last document if a prompt begins with its tokens, and return it.

    Returns:
        The document, or an empty one.
    """
    if documents and np.array_equal(prompt_ids[: len(documents[-1].ids)], documents[-1].ids):
        return documents.pop()
    return _EMPTY_SEQUENCE


def _runs_of(turns: list[_TrainedTurn]) -> Iterator[list[_TrainedTurn]]:
    """Divide turns into runs in which each prompt begins with the text of the turn before."""
    run: list[_TrainedTurn] = []
    for turn in turns:
        if run and not turn.prompt.startswith(run[-1].prompt + run[-1].target):
            yield run
            run = []
        run.append(turn)
    if run:
        yield run


def _check_text(shown: list[Any], messages: list[Message], thoughts: list[str]) -> None:
    """Raise :class:`BadRecord` if a conversation holds half of a surrogate pair.

    Args:
        shown: all that the template or a target may show.
        messages: the messages.
        thoughts: the reasoning of each.
    """
    try:
        "".join(texts_of(shown)).encode()
        return
    except UnicodeEncodeError:
        pass

    reason = "holds half of a surrogate pair, which is not valid text"
    for number, (message, thought) in enumerate(zip(messages, thoughts, strict=True), start=1):
        if any(map(_HALF.search, texts_of([message, thought]))):
            raise BadRecord(f"message {number} ({message['role']}) {reason}")
    raise BadRecord(f"field 'tools' {reason}")


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
