"""Render conversations and preference records as tokens with a loss mask.

The assistant's turns are the targets, exactly as the model would have to generate them.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from llmtrain.data.escaping import texts_of
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import (
    BadRecord,
    Message,
    other_fields_of,
    trained_messages,
    without_weights,
)
from llmtrain.data.prompt_completion import PromptCompletionRenderer
from llmtrain.data.rendered import Rendered, TokenSequence, TurnEnd
from llmtrain.data.sources import Fields
from llmtrain.data.template_messages import AdaptedMessages, adapt_messages
from llmtrain.data.template_properties import TemplateProperties
from llmtrain.data.text_encoder import TextEncoder, Tokens
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.data.turns import ConversationTexts, Turn, TurnFinder

_HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair


class _EncodedTurn(NamedTuple):
    """An assistant turn as tokens.

    Attributes:
        turn: the turn. No special tokens in its target are escaped.
        ids: int32 [n], the tokens of the prompt and of the target.
        prompt_length: the number of tokens of the prompt.
        tokens: the tokens of a text that holds the target.
        tokens_before: the number of these tokens before the target.
        characters_before: the number of characters before the target.
    """

    turn: Turn
    ids: np.ndarray
    prompt_length: int
    tokens: Tokens
    tokens_before: int
    characters_before: int

    @property
    def target_ids(self) -> np.ndarray:
        """The tokens of the target, int32 [n]."""
        return self.ids[self.prompt_length :]


class _TargetMask(NamedTuple):
    """The tokens of a target that are trained.

    Attributes:
        is_trained: bool [n].
        target_bytes: UTF-8 bytes of their text, without control tokens.
        has_end: whether the last one ends a turn.
    """

    is_trained: np.ndarray
    target_bytes: int
    has_end: bool


class Renderer:
    """Renders conversations and preference records, with the chat template of the tokenizer.

    Each assistant turn is a prompt and a target; see :mod:`llmtrain.data.turns`. Turns share a
    sequence if the tokens of each next prompt begin with those of the sequence so far. If they do
    not, because the template changes what came before (it may drop earlier reasoning), a turn gets
    its own sequence. If the template has ``{% generation %}`` blocks, only their text is trained. A
    token is trained if all its characters are in a block.

    Special tokens in messages are encoded as ordinary text.

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
        self.template = TemplateProperties(tokenizer, stop_token_ids)
        self.only_last_turns = only_last_turns
        self.encoder = TextEncoder(tokenizer, self.template.control_tokens)
        self._turn_finder = TurnFinder(self.template)
        self._arguments = (tokenizer, tuple(stop_token_ids), only_last_turns)

    def __reduce__(self) -> tuple[Any, ...]:
        # A compiled template cannot be pickled, so another process makes it again.
        return type(self), self._arguments

    @property
    def stop_token_ids(self) -> set[int]:
        """The tokens at which an answer ends."""
        return self.template.stop_token_ids

    def __call__(self, record: Conversation | PreferenceRecord) -> Rendered:
        """Render a conversation, or the prompt of a preference record with each of its answers.

        Raises:
            BadRecord: if the chat template refuses the record or does not show it, or if its text
                cannot be used.
        """
        if isinstance(record, PreferenceRecord):
            return self._render_answers(record)
        if self.only_last_turns:
            roles = [message["role"] for message in record.messages]
            questions = [i for i, role in enumerate(roles) if role == "user"]
            record = record._replace(untrained=max([record.untrained, *questions]))
        return self._render_conversation(record)

    def _render_answers(self, record: PreferenceRecord) -> Rendered:
        sequences = []
        for answer in record.answers:
            conversation = Conversation(
                record.prompt + answer, record.tools, untrained=len(record.prompt)
            )
            rendered = self._render_conversation(conversation)
            counts = rendered.counts
            mismatched = counts["mismatched_answers"] + counts["mismatched_calls"]
            if mismatched or len(rendered.sequences) != 1:
                raise BadRecord(
                    "the chat template shows the answer differently from the way it prompts for it"
                )
            sequences += rendered.sequences

        # The prompt, which is in all sequences, is counted once.
        _, special_as_text = self.encoder.escaping.escape([record.messages, record.tools])
        return Rendered(
            sequences,
            counts=Counter(special_as_text=special_as_text),
            unread_fields=other_fields_of(record.messages),
        )

    def _render_conversation(self, conversation: Conversation) -> Rendered:
        texts, special_as_text = self._texts_of(conversation.messages, conversation.tools)
        counts = Counter(special_as_text=special_as_text)
        turns = self._turn_finder.find(
            texts,
            is_trained=trained_messages(conversation.messages),
            after=conversation.untrained,
            counts=counts,
        )

        sequences: list[TokenSequence] = []
        for encoded in self._encode(turns, has_escapes=special_as_text > 0):
            self._add(sequences, encoded)
        return Rendered(sequences, counts=counts, unread_fields=other_fields_of(texts.messages))

    def prompt(
        self, messages: list[Message], tools: list[Fields] | None, thinking: bool | None
    ) -> list[int]:
        """Return the tokens of a conversation, with those that ask for the next answer.

        An answer of the assistant is trained after the same tokens.

        Args:
            messages: the conversation.
            tools: the tools that it may call.
            thinking: ask for an answer with or without reasoning, if the template can. ``None``:
                leave that to the template.

        Raises:
            BadRecord: if the chat template refuses the conversation, or its text cannot be used.
        """
        texts, special_as_text = self._texts_of(messages, tools)
        options = {} if thinking is None else self.template.prompt_options(thinking)[0]
        text = texts.prompt(len(messages), options)
        return self.encoder.encode(text, has_escapes=special_as_text > 0).ids

    def _texts_of(
        self, messages: list[Message], tools: list[Fields] | None
    ) -> tuple[ConversationTexts, int]:
        """Return the texts of a conversation, and the number of special tokens in its messages.

        These are escaped.
        """
        adapted = adapt_messages(without_weights(messages), self.template)
        # The template shows the messages. Some targets are made of reasoning that is not in them.
        shown: list[Any] = [adapted.messages, tools]
        if self.template.opens_reasoning and self.template.reasoning_field is None:
            shown.append(adapted.reasoning)
        _check_text(shown, adapted)
        escaped, special_as_text = self.encoder.escaping.escape(shown)
        if special_as_text:
            messages, tools = escaped[:2]
            reasoning, _ = self.encoder.escaping.escape(adapted.reasoning)
            adapted = AdaptedMessages(messages, reasoning)
        texts = ConversationTexts(self.template.jinja, adapted, tools)
        if special_as_text:
            self.encoder.escaping.check_json(texts.complete.text)
        return texts, special_as_text

    # --- from text to tokens

    def _encode(self, turns: list[Turn], has_escapes: bool) -> Iterator[_EncodedTurn]:
        """Encode the turns of a conversation.

        Turns whose texts continue each other are encoded together: forty turns would take twenty
        times as long one by one. That is possible if each turn ends with a control token at which
        every text is divided. Otherwise the tokens of a prompt are known only by encoding it, so
        each turn is encoded by itself.

        Args:
            turns: the turns.
            has_escapes: whether special tokens in their texts are escaped.
        """
        for run in _runs_of(turns):
            encoded = None if has_escapes else self._encode_together(run)
            if encoded is None:
                encoded = [self._encode_alone(turn, has_escapes) for turn in run]
            yield from encoded

    def _encode_together(self, run: list[Turn]) -> list[_EncodedTurn] | None:
        """Encode turns whose texts are all beginnings of the last one's.

        Returns:
            The turns; ``None`` if the tokens of a text may be others than the first tokens of the
            last text.
        """
        text = run[-1].text
        tokens = self.encoder.encode(text)
        controls = self.encoder.controls_of(text, tokens)
        if controls is None:
            return None
        encoded = []
        for turn in run:
            prompt_end = len(turn.prompt)
            first = self.encoder.count_before(text, tokens, controls, prompt_end)
            last = len(tokens.ids)
            if turn is not run[-1]:
                target_end = prompt_end + len(turn.target)
                last = self.encoder.count_to_control(tokens, controls, target_end)
            if first < 0 or last < 0:
                return None
            encoded.append(
                _EncodedTurn(
                    turn=turn,
                    ids=tokens.array[:last],
                    prompt_length=first,
                    tokens=tokens,
                    tokens_before=first,
                    characters_before=prompt_end,
                )
            )
        return encoded

    def _encode_alone(self, turn: Turn, has_escapes: bool) -> _EncodedTurn:
        """Encode the prompt of a turn, and the turn behind it.

        If the last characters of the prompt and the first of the target became one token, the
        target is encoded without the prompt: a model that answers begins with a new token.
        """
        prompt_ids = self.encoder.encode(turn.prompt, has_escapes).ids
        tokens = self.encoder.encode(turn.text, has_escapes)
        tokens_before = len(prompt_ids)
        characters_before = len(turn.prompt)
        if tokens.ids[:tokens_before] != prompt_ids:
            tokens = self.encoder.encode(turn.target, has_escapes)
            tokens_before = 0
            characters_before = 0
        if has_escapes:
            turn = turn._replace(target=self.encoder.escaping.unescape(turn.target))
        return _EncodedTurn(
            turn=turn,
            ids=np.array(prompt_ids + tokens.ids[tokens_before:], np.int32),
            prompt_length=len(prompt_ids),
            tokens=tokens,
            tokens_before=tokens_before,
            characters_before=characters_before,
        )

    def _add(self, sequences: list[TokenSequence], encoded: _EncodedTurn) -> None:
        """Add a turn to the last sequence if its prompt continues it, and as a new one otherwise.

        Args:
            sequences: the sequences of the conversation so far.
            encoded: the turn.
        """
        earlier = _EMPTY_SEQUENCE
        if sequences:
            beginning = encoded.ids[: encoded.prompt_length][: len(sequences[-1].ids)]
            if np.array_equal(beginning, sequences[-1].ids):
                earlier = sequences.pop()

        mask = self._mask_of(encoded)
        loss_mask = np.zeros(len(encoded.ids), bool)
        loss_mask[: len(earlier.ids)] = earlier.loss_mask
        loss_mask[encoded.prompt_length :] = mask.is_trained
        loss_mask[:1] = False  # the first token has no context
        turn_end = TurnEnd(
            length=len(loss_mask),
            targets=int(np.count_nonzero(loss_mask)),
            target_bytes=earlier.target_bytes + mask.target_bytes,
            ended=earlier.ended + int(mask.has_end),
        )
        sequences.append(
            TokenSequence(
                ids=encoded.ids,
                loss_mask=loss_mask,
                target_bytes=turn_end.target_bytes,
                turn_ends=(*earlier.turn_ends, turn_end),
            )
        )

    def _mask_of(self, encoded: _EncodedTurn) -> _TargetMask:
        """Find the tokens of a turn that are trained: those that lie in its spans."""
        turn = encoded.turn
        ids = encoded.target_ids
        if turn.is_trained_completely and self.encoder.fill(ids, turn.target):
            # To find the characters of each token would take longer than to find the tokens.
            is_trained = np.ones(len(ids), bool)
            target_bytes = len(turn.target.encode())
        else:
            start, stop = self._characters_of(encoded)
            is_trained = np.zeros(len(ids), bool)
            target_bytes = 0
            for span_start, span_stop in turn.spans:
                inside = np.flatnonzero((span_start <= start) & (stop <= span_stop))
                if len(inside):
                    is_trained[inside] = True
                    text = turn.target[start[inside[0]] : stop[inside[-1]]]
                    target_bytes += len(text.encode())

        trained_ids = ids[is_trained]
        return _TargetMask(
            is_trained=is_trained,
            target_bytes=target_bytes - self.encoder.control_bytes(trained_ids),
            has_end=len(trained_ids) > 0 and int(trained_ids[-1]) in self.stop_token_ids,
        )

    def _characters_of(self, encoded: _EncodedTurn) -> tuple[np.ndarray, np.ndarray]:
        """Return the characters of a target at which each of its tokens begins and ends.

        Returns:
            Two arrays, int [n].
        """
        ids = encoded.target_ids
        last = encoded.tokens_before + len(ids)
        spans = np.array(encoded.tokens.spans[encoded.tokens_before : last], int).reshape(-1, 2)
        start, stop = (spans - encoded.characters_before).T
        # Some control tokens include the white space around them.
        for i in np.flatnonzero(self.encoder.are_controls(ids)):
            token = encoded.turn.target[start[i] : stop[i]]
            inner_start = stop[i] - len(token.lstrip())
            inner_stop = start[i] + len(token.rstrip())
            start[i] = inner_start
            stop[i] = inner_stop
        return start, stop


AnyRenderer: TypeAlias = Renderer | PromptCompletionRenderer


def make_renderer(
    tokenizer: FastTokenizer,
    stop_token_ids: Collection[int] = (),
    only_last_turns: bool = False,
) -> AnyRenderer:
    """Return the renderer for a tokenizer, which uses its chat template if it has one.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        only_last_turns: train only the turns after the last user message.
    """
    if tokenizer.chat_template is None:
        return PromptCompletionRenderer(tokenizer)
    return Renderer(tokenizer, stop_token_ids, only_last_turns)


_EMPTY_SEQUENCE = TokenSequence(
    ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool), target_bytes=0
)


def _runs_of(turns: list[Turn]) -> Iterator[list[Turn]]:
    """Divide turns into runs in which each prompt begins with the text of the turn before."""
    run: list[Turn] = []
    for turn in turns:
        if run and not turn.prompt.startswith(run[-1].text):
            yield run
            run = []
        run.append(turn)
    if run:
        yield run


def _check_text(shown: list[Any], adapted: AdaptedMessages) -> None:
    """Raise :class:`BadRecord` if a conversation holds half of a surrogate pair.

    Args:
        shown: all that the template or a target may show.
        adapted: the messages and their reasoning.
    """
    try:
        "".join(texts_of(shown)).encode()
        return
    except UnicodeEncodeError:
        pass

    reason = "holds half of a surrogate pair, which is not valid text"
    for number, (message, reasoning) in enumerate(zip(*adapted, strict=True), start=1):
        if any(map(_HALF.search, texts_of([message, reasoning]))):
            raise BadRecord(f"message {number} ({message['role']}) {reason}")
    raise BadRecord(f"field 'tools' {reason}")
