"""Render conversations and preference records as tokens with a loss mask.

The assistant's turns are the targets, exactly as the model would have to generate them. Without a
chat template, a prompt and its completions are plain text.
"""

from collections import Counter
from collections.abc import Collection
from typing import NamedTuple, TypeAlias

import numpy as np

from llmtrain.data.chat_template import REASONING_OPTION, ChatTemplate, TemplateOptions
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.readers import Fields
from llmtrain.data.text_encoder import TextEncoder
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos, control_tokens_of
from llmtrain.data.turns import Turn, TurnFinder


class TurnEnd(NamedTuple):
    """The part of a token sequence up to the end of one of its assistant turns.

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
        turn_ends: the end of each assistant turn that is a target. The last one is the end of the
            sequence.
    """

    ids: np.ndarray
    loss_mask: np.ndarray
    turn_ends: tuple[TurnEnd, ...]

    @property
    def end(self) -> TurnEnd:
        """The end of the last turn."""
        return self.turn_ends[-1] if self.turn_ends else TurnEnd(0, 0, 0, 0)


_EMPTY = TokenSequence(ids=np.zeros(0, np.int32), loss_mask=np.zeros(0, bool), turn_ends=())


class Rendered(NamedTuple):
    """A conversation or a preference record as token sequences.

    Attributes:
        sequences: the token sequences. Each assistant turn of a conversation is a target in one of
            them; each answer of a preference record has its own.
        counts: ``special_as_text``, the number of special tokens in messages that are encoded as
            text, and the counts of :meth:`llmtrain.data.turns.TurnFinder.turns`.
    """

    sequences: list[TokenSequence]
    counts: Counter[str]


class Renderer:
    """Renders conversations and preference records, with the chat template of the tokenizer.

    Turns share a sequence if the tokens of each next prompt begin with those of the sequence so
    far. If they do not, because the template changes what came before (it may drop earlier
    reasoning), a turn gets its own sequence. If the template has ``{% generation %}`` blocks, only
    tokens all of whose characters are in a block are trained. Special tokens in messages are
    encoded as ordinary text.

    Args:
        tokenizer: a tokenizer with a chat template.
        stop_token_ids: the tokens at which the model stops generating, as far as its folder lists
            them.
        only_last_turns: train only the turns after the last user message.

    Attributes:
        stop_token_ids: the tokens at which an answer ends.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        stop_token_ids: Collection[int] = (),
        only_last_turns: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.template = ChatTemplate(tokenizer, stop_token_ids)
        self.stop_token_ids = self.template.stop_token_ids
        self.only_last_turns = only_last_turns
        self.encoder = TextEncoder(tokenizer, self.template.control_tokens)

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
        counts: Counter[str] = Counter()
        for answer in record.answers:
            conversation = Conversation(
                record.prompt + answer, record.tools, untrained=len(record.prompt)
            )
            rendered = self._render_conversation(conversation)
            if rendered.counts["untrained_turns"] or len(rendered.sequences) != 1:
                raise BadRecord(
                    "the chat template shows the answer differently from the way it prompts for it"
                )
            sequences += rendered.sequences
            counts += rendered.counts

        # The prompt, which is in all sequences, is counted once.
        counts["special_as_text"] = 0
        self.encoder.escaped([record.messages, record.tools], counts)
        return Rendered(sequences, counts)

    def _render_conversation(self, conversation: Conversation) -> Rendered:
        messages, reasoning, tools, counts = self._escaped(
            conversation.messages, conversation.tools
        )
        finder = TurnFinder(self.template, messages, reasoning, tools)
        self.encoder.check_escapes(counts, finder.complete)
        has_escapes = counts["special_as_text"] > 0
        is_trained = [message.get("weight") != 0 for message in conversation.messages]
        turns = finder.turns(is_trained, after=conversation.untrained, counts=counts)

        sequences: list[TokenSequence] = []
        beginning = ""
        for turn in turns:
            beginning = self._add(sequences, turn, beginning, has_escapes)
        return Rendered(sequences, counts)

    def prompt(
        self, messages: list[Message], tools: list[Fields] | None, thinking: bool | None
    ) -> list[int]:
        """Return the tokens of a conversation, with those that ask for the next answer.

        An answer of the assistant is trained after the same tokens.

        Args:
            messages: the conversation.
            tools: the tools that it may call.
            thinking: whether to ask for reasoning; ``None`` leaves that to the template.

        Raises:
            BadRecord: if the chat template refuses the conversation, or its text cannot be used.
        """
        messages, _, tools, counts = self._escaped(messages, tools)
        options: TemplateOptions = {}
        if thinking is not None and self.template.has_reasoning_option:
            options = {REASONING_OPTION: thinking}
        text = self.template.render(messages, tools, options, add_generation_prompt=True)
        self.encoder.check_escapes(counts, text)
        return self.encoder.encode(text, has_escapes=counts["special_as_text"] > 0)

    def _escaped(
        self, messages: list[Message], tools: list[Fields] | None
    ) -> tuple[list[Message], list[str], list[Fields] | None, Counter[str]]:
        """Bring a conversation into the form that the template takes, without special tokens.

        Returns:
            The messages, the reasoning of each, the tools, and the counts of
            :meth:`TextEncoder.escaped`.
        """
        adapted, reasoning = self.template.adapt(messages)
        counts: Counter[str] = Counter()
        place = ""
        try:
            for index, message in enumerate(adapted):
                place = f"message {index + 1} ({message['role']})"
                escaped: Message = self.encoder.escaped(message, counts)
                escaped.pop("weight", None)
                adapted[index] = escaped
                # The message holds it, unless only a prompt begins it.
                is_counted = "reasoning_content" in message or not self.template.opens_reasoning
                reasoning[index] = self.encoder.escaped(
                    reasoning[index], counts=Counter() if is_counted else counts
                )
                if "reasoning_content" in message:  # templates look for it in several fields
                    escaped.update(dict.fromkeys(REASONING, reasoning[index]))
            place = "field 'tools'"
            tools = self.encoder.escaped(tools, counts)
        except UnicodeEncodeError:
            raise BadRecord(
                f"{place} holds half of a surrogate pair, which is not valid text"
            ) from None
        return adapted, reasoning, tools, counts

    def _add(
        self, sequences: list[TokenSequence], turn: Turn, beginning: str, has_escapes: bool
    ) -> str:
        """Add a turn to the last sequence if its prompt continues it, and as a new one otherwise.

        Args:
            sequences: the sequences of the conversation so far.
            turn: the turn.
            beginning: a text whose tokens are all tokens of the last sequence but one. They need
                not be encoded again if the prompt goes on with a token at which every text is
                divided: forty turns would take twenty times as long otherwise.
            has_escapes: whether special tokens of messages in the text are escaped.

        Returns:
            Such a beginning for the next turn; empty if there is none.
        """
        last = sequences[-1] if sequences else _EMPTY
        known_ids = _EMPTY.ids
        prompt = turn.prompt
        if beginning and prompt.startswith(beginning):
            rest = prompt[len(beginning) :]
            if self.encoder.borders.match(rest):
                known_ids = last.ids[:-1]
                prompt = rest

        border = self.encoder.last_border(prompt)
        target = self.encoder.encode_after(
            prompt[border:], turn.target, has_escapes, with_spans=turn.spans is not None
        )
        new_ids = self.encoder.encode(prompt[:border], has_escapes) + target.ids_before
        prompt_ids = np.concatenate([known_ids, np.array(new_ids, np.int32)])
        if sequences and np.array_equal(prompt_ids[: len(last.ids)], last.ids):
            sequences.pop()
        else:
            last = _EMPTY

        target_ids = np.array(target.ids, np.int32)
        if turn.spans is None:
            is_trained = np.ones(len(target_ids), bool)
            target_bytes = self.encoder.plain_bytes(turn.target)
        else:
            # A token is trained if all of its characters are.
            is_trained = np.zeros(len(target_ids), bool)
            target_bytes = 0
            for trained_start, trained_stop in turn.spans:
                for token, (start, stop) in enumerate(target.spans):
                    is_trained[token] |= trained_start <= start and stop <= trained_stop
                target_bytes += self.encoder.plain_bytes(turn.target[trained_start:trained_stop])
        trained_ids = target_ids[is_trained].tolist()
        has_end = bool(trained_ids) and trained_ids[-1] in self.stop_token_ids
        sequences.append(
            _with_turn(last, prompt_ids, target_ids, is_trained, target_bytes, has_end)
        )

        end = self.encoder.last_border(turn.target)
        if target.is_joined and self.encoder.borders.fullmatch(turn.target[end:]):
            return turn.prompt + turn.target[:end]
        return ""


class PromptCompletionRenderer:
    """Makes a token sequence of a prompt, its completion and EOS, without a chat template.

    It has the interface of :class:`Renderer`. A sequence begins with BOS if the tokenizer begins
    every text with it. Special tokens in the texts are encoded as ordinary text, except for one EOS
    at the end of a completion, which is the EOS of the sequence.
    """

    def __init__(self, tokenizer: FastTokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoder = TextEncoder(tokenizer, control_tokens_of(tokenizer))
        self._beginning: list[int] = []
        if begins_with_bos(tokenizer):
            self._beginning = [int(tokenizer.bos_token_id)]

    @property
    def stop_token_ids(self) -> set[int]:
        """The token at which a completion ends."""
        return {int(self.tokenizer.eos_token_id)}

    def __call__(self, record: Conversation | PreferenceRecord) -> Rendered:
        """Encode a prompt with its completion, or with each of its answers.

        Raises:
            BadRecord: if they are not plain texts, or if their text cannot be used.
        """
        if not record.is_plain_text:
            raise BadRecord(
                "the record is not plain text (a prompt and completions without roles and tools), "
                "and there is no chat template; use --chat_template chatml"
            )
        # Every sequence ends with EOS anyway.
        eos = str(self.tokenizer.eos_token)
        texts = [message["content"] for message in record.messages]
        texts[1:] = [text.removesuffix(eos) for text in texts[1:]]
        (prompt, *completions), special_as_text = self._escaped(texts)

        sequences = []
        for completion in completions:
            encoded = self.encoder.encode_after(prompt, completion, special_as_text > 0)
            prompt_ids = [*self._beginning, *encoded.ids_before]
            target_ids = [*encoded.ids, int(self.tokenizer.eos_token_id)]
            sequence = _with_turn(
                _EMPTY,
                np.array(prompt_ids, np.int32),
                np.array(target_ids, np.int32),
                is_trained=np.ones(len(target_ids), bool),
                target_bytes=self.encoder.plain_bytes(completion),
                has_end=True,
            )
            sequences.append(sequence)
        return Rendered(sequences, counts=Counter(special_as_text=special_as_text))

    def prompt(self, text: str) -> list[int]:
        """Return the tokens of a prompt, after which a completion is trained.

        Raises:
            BadRecord: if the text cannot be used.
        """
        (escaped,), special_as_text = self._escaped([text])
        return [*self._beginning, *self.encoder.encode(escaped, has_escapes=special_as_text > 0)]

    def _escaped(self, texts: list[str]) -> tuple[list[str], int]:
        """Return texts whose special tokens are escaped, and the number of these."""
        counts: Counter[str] = Counter()
        try:
            escaped: list[str] = self.encoder.escaped(texts, counts)
        except UnicodeEncodeError:
            raise BadRecord(
                "the record holds half of a surrogate pair, which is not valid text"
            ) from None
        self.encoder.check_escapes(counts)
        return escaped, counts["special_as_text"]


AnyRenderer: TypeAlias = Renderer | PromptCompletionRenderer


def _with_turn(
    earlier: TokenSequence,
    prompt_ids: np.ndarray,
    target_ids: np.ndarray,
    is_trained: np.ndarray,
    target_bytes: int,
    has_end: bool,
) -> TokenSequence:
    """Return a sequence with a further turn.

    Args:
        earlier: the sequence of the turns before, with whose tokens the prompt begins.
        prompt_ids: int32 [m].
        target_ids: int32 [n].
        is_trained: bool [n], for each token of the target.
        target_bytes: UTF-8 bytes of the trained text, without control tokens.
        has_end: whether the last token that is trained ends the turn.
    """
    ids = np.concatenate([prompt_ids, target_ids])
    loss_mask = np.zeros(len(ids), bool)
    loss_mask[: len(earlier.ids)] = earlier.loss_mask
    loss_mask[len(prompt_ids) :] = is_trained
    loss_mask[:1] = False  # the first token has no context
    turn_end = TurnEnd(
        length=len(ids),
        targets=int(np.count_nonzero(loss_mask)),
        target_bytes=earlier.end.target_bytes + target_bytes,
        ended=earlier.end.ended + int(has_end),
    )
    return TokenSequence(ids, loss_mask, (*earlier.turn_ends, turn_end))
