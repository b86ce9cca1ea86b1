"""The records of a shard as tokens in a temporary file, which become rows once a length is known.

Each record is rendered and encoded once. Then ``--max_length`` can be chosen, and each split is
written as rows. There are four kinds: conversations, records of tokens and pairs of answers here,
and text in :mod:`llmtrain.data.corpus`.
"""

import array
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, Generic

import numpy as np

from llmtrain.data.audit import Audit, Unit, covering_length
from llmtrain.data.config import PairConfig, RowConfig
from llmtrain.data.formats import PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Examples, TokenStore, write_rows
from llmtrain.data.readers import Split
from llmtrain.data.records import Chat, ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered, TokenSequence, TurnEnd
from llmtrain.data.rendering_pool import render_all
from llmtrain.data.turns import THINKING_COUNTS
from llmtrain.devices import cpu_cores
from llmtrain.errors import UserError

_MOST_DEFAULT_PROCESSES = 16  # that render conversations
# The counts of a rendered record that are kept.
_RENDERED = ("untrained_turns", "hidden_turns", "special_as_text", *THINKING_COUNTS.values())
# The columns of a table of turns: the sequence, and the fields of a TurnEnd.
_SEQUENCE, _LENGTH, _TARGETS, _BYTES, _ENDED = range(5)
_COLUMNS = 5


class EncodedChats(Generic[Chat]):
    """The conversations of a shard as tokens. The assistant's turns are trained.

    A conversation is one token sequence, unless the chat template changes earlier turns. Then it
    is several, and each is an example. In :class:`EncodedPairs`, an example has two parts, the
    answers of a pair. Each part is a sequence in the store, and those of an example follow each
    other.

    Args:
        records: the records of the source.
        shard: the numbers of those in the shard.
        renderer: renders them.
        config: says how they become rows.
        store: the temporary file for their tokens.

    Attributes:
        unit: a word for an example.
        parts: the number of parts of an example.
        own_parts: the number of parts that must fit in a row and have targets. Another part is only
            there for comparison.
        cuts_turns: whether truncation keeps the beginning of a turn that does not fit.
        tokens_beyond: the tokens of a part beyond ``--max_length`` that a row has room for.
        digest_note: a further text that the hash of the rows depends on.
    """

    unit: Unit = "conversation"
    parts = 1
    own_parts = 1
    cuts_turns = False
    tokens_beyond = 1  # the last token of a row predicts nothing
    digest_note = ""

    def __init__(
        self,
        records: Records[Chat],
        shard: range,
        renderer: AnyRenderer,
        config: RowConfig,
        store: TokenStore,
    ) -> None:
        self.records: Records[Chat] = records
        self.shard = shard
        self.store = store
        self.renderer = renderer
        self.config = config
        self._records = array.array("q")  # the number of the record of each example
        self._turns = array.array("q")  # a table with a row for each turn of each sequence
        # For each count, the numbers of the records, each as often as it counts.
        self._counts = {name: array.array("q") for name in _RENDERED}

    def encode(self, records: Iterable[ReadRecord[Chat]]) -> None:
        """Render the records.

        Raises:
            UserError: with the place of a record that cannot be used, if the flags do not say to
                go on without it.
        """
        processes = self.config.dataset_num_proc or min(cpu_cores(), _MOST_DEFAULT_PROCESSES)
        for read, rendered in render_all(self.renderer, iter(records), processes):
            try:
                if isinstance(rendered, BadRecord):
                    raise rendered
                is_single = self.parts * len(rendered.sequences) <= 1
                if not is_single and any(hasattr(v, "__len__") for v in read.extra.values()):
                    raise BadRecord("it makes several sequences, so extra columns need numbers")
                self.add(read, rendered)
            except BadRecord as error:
                self.records.refuse(read.number, read.place, error)
                continue
            for name, numbers in self._counts.items():
                numbers.extend([read.number] * rendered.counts[name])

    def add(self, read: ReadRecord[Chat], rendered: Rendered) -> None:
        """Store the examples of a rendered record."""
        for sequence in rendered.sequences:
            self.add_example(read, sequence)

    def add_example(self, read: ReadRecord[Chat], *sequences: TokenSequence) -> None:
        """Store the parts of an example of a record."""
        for sequence in sequences:
            number = len(self.store)
            self.store.add(sequence.ids, sequence.loss_mask, **read.extra)
            for turn_end in sequence.turn_ends:
                self._turns.append(number)
                self._turns.extend(turn_end)
        self._records.append(read.number)

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each example, int64 [examples]."""
        ends = self.ends()[self._sequences_in(split), _LENGTH]
        lengths: np.ndarray = ends[:, : self.own_parts].max(axis=1) - self.tokens_beyond
        return lengths

    def write(self, path: Path, split: Split, max_length: int, vocabulary: int) -> Audit:
        """Write the rows of a split, whose tokens are below ``vocabulary``.

        Raises:
            UserError: if the flags do not say to go on without an example that is too long.
        """
        sequences = self._sequences_in(split)
        complete = self.ends()[sequences]
        width = max_length + self.tokens_beyond
        is_overlong = self.lengths(split) > max_length
        is_dropped = is_overlong & (self.config.overlong == "drop")
        if self.config.overlong == "error" and is_overlong.any():
            first = sequences[is_overlong][0]
            record = self._records[first[0] // self.parts]
            records = self.records.source.records(self.records.field)
            place = next(islice(records, record, None)).place
            tokens = complete[is_overlong][0, : self.own_parts, _LENGTH].max()
            raise UserError(
                f"{place}: {tokens:,} tokens are more than --max_length {max_length} allows; raise "
                "it, or set --overlong drop or truncate."
            )

        ends = complete.copy()
        is_cut = (complete[..., _LENGTH] > width) & ~is_dropped[:, None]
        if is_cut.any():
            ends[is_cut] = self.truncated(sequences[is_cut], width)
        lengths = ends[..., _LENGTH]
        is_trained = (ends[:, : self.own_parts, _TARGETS] > 0).all(axis=1)
        is_kept = is_trained & ~is_dropped

        examples = self.examples_of(sequences[is_kept], lengths[is_kept])
        audit = write_rows(
            path,
            self.store,
            examples,
            width=self.parts * width,
            packing=self.config.is_packed,
            vocabulary=vocabulary,
            note=self.digest_note,
        )

        audit.unit = self.unit
        self._count_records(audit, split)
        audit.examples += len(sequences)
        audit.untrained += int((~is_trained & ~is_dropped).sum())
        audit.dropped = int(is_dropped.sum())
        audit.truncated = int((is_overlong & ~is_dropped).sum())
        tokens_of_overlong = complete[is_overlong, :, _LENGTH].sum()
        audit.lost_tokens = int(tokens_of_overlong - lengths[is_overlong & is_kept].sum())
        audit.bytes = int(ends[is_kept, :, _BYTES].sum())
        audit.ended = int((ends[is_kept, :, _ENDED] > 0).any(axis=1).sum())
        audit.needed_length = covering_length(self.lengths(split))
        return audit

    def ends(self, max_tokens: int | None = None) -> np.ndarray:
        """Return the last turn of each sequence, int64 [sequences, columns].

        Args:
            max_tokens: the turn must have a target and end in so many tokens. The row of a sequence
                without such a turn is 0.
        """
        turns = np.array(self._turns, np.int64).reshape(-1, _COLUMNS)
        if max_tokens is not None:
            turns = turns[(turns[:, _LENGTH] <= max_tokens) & (turns[:, _TARGETS] > 0)]
        ends = np.zeros((len(self.store), _COLUMNS), np.int64)
        ends[turns[:, _SEQUENCE]] = turns  # later turns replace earlier ones
        return ends

    def truncated(self, sequences: np.ndarray, width: int) -> np.ndarray:
        """Return the ends of sequences that are truncated.

        They end after the last turn that fits, or in a turn, which does not end then.

        Args:
            sequences: int64 [n], the number of each in the store.
            width: the number of tokens that are kept, at most.

        Returns:
            int64 [n, columns], rows of the table of turns.
        """
        ends: np.ndarray = self.ends(max_tokens=width)[sequences]
        if self.cuts_turns:
            starts = self.store.bounds[sequences].tolist()
            for i, start in enumerate(starts):
                encoded = self.store.read(start, start + width)["token"]
                targets = encoded[encoded >= 0]
                text = self.renderer.encoder.decode(targets.tolist())
                ends[i] = (sequences[i], width, len(targets), len(text.encode()), 0)
        return ends

    def examples_of(self, sequences: np.ndarray, lengths: np.ndarray) -> Examples:
        """Return what is written of examples.

        Args:
            sequences: int64 [examples, parts], the number of each part in the store.
            lengths: int64 [examples, parts], how many tokens of each part are written.
        """
        return Examples(sequences, starts=np.zeros_like(lengths), stops=lengths)

    def _sequences_in(self, split: Split) -> np.ndarray:
        """Return the sequences of the examples of a split, int64 [examples, parts]."""
        sequences = np.arange(len(self.store)).reshape(-1, self.parts)
        is_in = self.records.divide()[split][np.array(self._records, np.int64)]
        selected: np.ndarray = sequences[is_in]
        return selected

    def _count_records(self, audit: Audit, split: Split) -> None:
        """Count the records of a split, those that make no example, and what rendering counted."""
        is_in = self.records.divide()[split]
        records = np.array(self._records, np.int64)
        bad = [number for number in self.records.bad if number in self.shard]
        audit.records = int(is_in[self.shard.start : self.shard.stop].sum())
        audit.bad = int(is_in[bad].sum())
        audit.first_fault = self.records.bad[min(bad)] if bad else ""
        audit.untrained = audit.records - audit.bad - len(np.unique(records[is_in[records]]))
        audit.examples = audit.untrained
        for name, numbers in self._counts.items():
            setattr(audit, name, int(is_in[np.array(numbers, np.int64)].sum()))


class EncodedTokens(EncodedChats[Any]):
    """The records of a shard that are already tokens, each as one example."""

    cuts_turns = True

    def encode(self, records: Iterable[ReadRecord[Any]]) -> None:
        """Store the records."""
        for read in records:
            ids, is_target = read.record
            loss_mask = is_target == 1
            loss_mask[:1] = False  # the first token has no context
            targets = ids[loss_mask].tolist()
            text = self.renderer.encoder.decode(targets)
            end = TurnEnd(len(ids), len(targets), target_bytes=len(text.encode()), ended=0)
            self.add_example(read, TokenSequence(ids, loss_mask, (end,)))


class EncodedPairs(EncodedChats[PreferenceRecord]):
    """The preference data of a shard as tokens: pairs of answers, and single answers with a label.

    The two answers of a pair may share one copy of their prompt. Only the last token of the prompt
    is then stored for each, because it predicts the first tokens of the answers, which differ.

    Single answers (KTO) are stored in pairs, too: each with the answer of the record before it in
    the shard, which usually has another prompt. From that the loss estimates how far the model has
    moved (Ethayarajh et al. 2024, arXiv:2402.01306).

    Args:
        records: the preference records of the source.
        shard: the numbers of those in the shard.
        renderer: renders them.
        config: says how they become rows.
        store: the temporary file for their tokens.
        unpaired: the loss takes single answers. Each answer of a pair is then a single one, too.
    """

    parts = 2
    cuts_turns = True
    tokens_beyond = 0

    def __init__(
        self,
        records: Records[PreferenceRecord],
        shard: range,
        renderer: AnyRenderer,
        config: PairConfig,
        store: TokenStore,
        unpaired: bool,
    ) -> None:
        super().__init__(records, shard, renderer, config, store)
        self.unit = "answer" if unpaired else "pair"
        self.own_parts = 1 if unpaired else 2
        self.digest_note = f" {unpaired}"
        self.unpaired = unpaired
        self.shares_prompts = config.shares_prompts
        # For each pair: whether its first answer is desirable, and the tokens of the prompt that
        # are stored for the first answer alone.
        self._are_desirable: list[bool] = []
        self._shared = array.array("q")
        # By whether they are eval data: the first record, which is compared with the last one, with
        # its answers, and the last record so far.
        self._first: dict[bool, tuple[ReadRecord[PreferenceRecord], list[TokenSequence]]] = {}
        self._previous: dict[bool, PreferenceRecord] = {}

    def encode(self, records: Iterable[ReadRecord[PreferenceRecord]]) -> None:
        """Render the records; see :class:`EncodedChats`."""
        super().encode(records)
        for is_eval, (read, answers) in self._first.items():
            self._add_singles(read, answers, self._previous[is_eval])

    def add(self, read: ReadRecord[PreferenceRecord], rendered: Rendered) -> None:
        """Store the answers of a record in pairs."""
        if not self.unpaired:
            chosen, rejected = rendered.sequences
            self._add_pair(read, chosen, rejected, read.record.desirable)
            return

        is_eval = bool(self.records.divide()["eval"][read.number])
        if is_eval in self._first:
            self._add_singles(read, rendered.sequences, self._previous[is_eval])
        else:
            self._first[is_eval] = (read, rendered.sequences)
        self._previous[is_eval] = read.record

    def _add_singles(
        self,
        read: ReadRecord[PreferenceRecord],
        answers: list[TokenSequence],
        previous: PreferenceRecord,
    ) -> None:
        """Store single answers, each with the first answer of the record before theirs.

        That answer is rendered after their own prompt.
        """
        try:
            compared = self.renderer(read.record._replace(answers=previous.answers[:1]))
            for number, answer in enumerate(answers):
                # Of two answers, the first is the chosen one.
                is_desirable = read.record.desirable and number == 0
                self._add_pair(read, answer, compared.sequences[0], is_desirable)
        except BadRecord as error:
            reason = f"compared with the answer of the record before: {error}"
            self.records.refuse(read.number, read.place, BadRecord(reason))

    def _add_pair(
        self, read: ReadRecord[Any], first: TokenSequence, second: TokenSequence, is_desirable: bool
    ) -> None:
        self.add_example(read, first, second)
        self._are_desirable.append(is_desirable)
        shared = 0
        if self.shares_prompts:
            length = min(len(first.ids), len(second.ids))
            is_prompt = first.ids[:length] == second.ids[:length]
            is_prompt &= ~first.loss_mask[:length] & ~second.loss_mask[:length]
            # The last token of the prompt predicts the first one of the answer.
            shared = max(int(np.logical_and.accumulate(is_prompt).sum()) - 1, 0)
        self._shared.append(shared)

    def examples_of(self, sequences: np.ndarray, lengths: np.ndarray) -> Examples:
        """Return what is written of pairs: of the second answer not the prompt that is shared."""
        pairs = sequences[:, 0] // self.parts
        written = super().examples_of(sequences, lengths)
        written.starts[:, 1] = np.array(self._shared, np.int64)[pairs]
        written.is_first_desirable = np.array(self._are_desirable, bool)[pairs]
        return written
