"""Preference data as tokens: pairs of answers, and single answers with a label.

The two answers of a pair may share one copy of their prompt. Only the last token of the prompt is
then stored for each, because it predicts the first tokens of the answers, which differ.

Single answers (KTO) are stored in pairs, too: each with the answer of the record before it, which
usually has another prompt. From that the loss estimates how far the model has moved (Ethayarajh et
al. 2024, arXiv:2402.01306).
"""

import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.data.config import RowConfig
from llmtrain.data.encoded import EncodedExamples, Fitted
from llmtrain.data.formats import PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Examples
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered, TokenSequence, cut
from llmtrain.data.splits import Split
from llmtrain.errors import UserError


class _Pair(NamedTuple):
    """Two answers that are stored together, as numbers.

    They are the chosen and the rejected answer; or a single one, and the one it is compared with.

    Attributes:
        record: the number of their record.
        shared: the number of tokens of which one copy would do: the prompt without its last token.
        is_first_desirable: whether the first answer is desirable.
        are_same: whether both answers have the same tokens.
        first_targets: the targets of the first answer.
        second_targets: the targets of the second answer.
        first_bytes: UTF-8 bytes of the first answer's targets, without control tokens.
        second_bytes: the same for the second answer.
    """

    record: int
    shared: int
    is_first_desirable: int
    are_same: int
    first_targets: int
    second_targets: int
    first_bytes: int
    second_bytes: int

    @classmethod
    def of(
        cls, record: int, first: TokenSequence, second: TokenSequence, is_first_desirable: bool
    ) -> "_Pair":
        """Measure two rendered answers."""
        return cls(
            record=record,
            shared=_shared_length(first, second),
            is_first_desirable=int(is_first_desirable),
            are_same=int(np.array_equal(first.ids, second.ids)),
            first_targets=int(first.loss_mask.sum()),
            second_targets=int(second.loss_mask.sum()),
            first_bytes=first.target_bytes,
            second_bytes=second.target_bytes,
        )


class _SingleAnswers(NamedTuple):
    """The answers of a record, each of which is compared with that of the record before."""

    read: ReadRecord[PreferenceRecord]
    answers: list[TokenSequence]


class EncodedPairs(EncodedExamples[PreferenceRecord]):
    """The preference data of a source as tokens: two token sequences for each pair.

    Args:
        records: the preference records.
        renderer: renders them.
        config: says how they become rows.
        folder: the folder of the temporary file.
        unpaired: the loss takes single answers. Each answer of a pair is then a single one, too.
        shares_prompts: store the prompt of a pair once for both answers.
    """

    def __init__(
        self,
        records: Records[PreferenceRecord],
        renderer: AnyRenderer,
        config: RowConfig,
        folder: Path,
        unpaired: bool,
        shares_prompts: bool,
    ) -> None:
        super().__init__(
            records,
            renderer,
            config,
            folder,
            unit="answer" if unpaired else "pair",
            digest_note=f" {unpaired}",
        )
        self.unpaired = unpaired
        self.shares_prompts = shares_prompts
        self._pairs = array.array("q")  # the _Pair of each pair, one number after the other
        # Single answers are compared inside their split: the first record of a split, which is
        # compared with the last one, and the last record so far.
        self._first_in_split: dict[bool, _SingleAnswers] = {}
        self._previous_in_split: dict[bool, PreferenceRecord] = {}
        self._is_eval = np.empty(0, bool)

    def encode(self) -> None:
        """Read and render all records; see :class:`EncodedExamples`."""
        if self.unpaired:
            self._is_eval = self.records.is_in("eval")  # a pass over the hashes
        super().encode()
        for answers in self._first_in_split.values():
            self._counts.add(answers.read.number, self._compare(answers))

    def add(self, read: ReadRecord[PreferenceRecord], rendered: Rendered) -> dict[str, int]:
        """Store the answers of a record in pairs."""
        if not self.unpaired:
            chosen, rejected = rendered.sequences
            self._add_pair(read.number, chosen, rejected, read.record.desirable)
            return {"examples": 1}

        is_eval = bool(self._is_eval[read.number])
        answers = _SingleAnswers(read, rendered.sequences)
        counts: dict[str, int] = {}
        if is_eval in self._first_in_split:
            counts = self._compare(answers)
        else:
            self._first_in_split[is_eval] = answers
        self._previous_in_split[is_eval] = read.record
        return counts

    def _compare(self, answers: _SingleAnswers) -> dict[str, int]:
        """Store single answers, each with the first answer of the record before theirs.

        That answer is rendered after their own prompt.
        """
        read = answers.read
        previous = self._previous_in_split[bool(self._is_eval[read.number])]
        answer_to_other = read.record._replace(answers=previous.answers[:1])
        try:
            compared = self.renderer(answer_to_other)
        except BadRecord as error:
            reason = f"compared with the answer of the record before: {error}"
            self.refuse(read, BadRecord(reason))
            return {}
        for number, answer in enumerate(answers.answers):
            # Of two answers, the first is the chosen one.
            is_desirable = read.record.desirable and number == 0
            self._add_pair(read.number, answer, compared.sequences[0], is_desirable)
        return {"examples": len(answers.answers)}

    def _add_pair(
        self, record: int, first: TokenSequence, second: TokenSequence, is_first_desirable: bool
    ) -> None:
        self.store.add(first.ids, first.loss_mask)
        self.store.add(second.ids, second.loss_mask)
        self._pairs.extend(_Pair.of(record, first, second, is_first_desirable))

    def row_width(self, max_length: int) -> int:
        """Return the tokens of two answers with their prompts."""
        return 2 * max_length

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each pair, int64 [pairs].

        The second answer of a single one is only there for comparison, so it does not count.
        """
        return self._longest(self._lengths_of(self._select(split)))

    def fit(self, split: Split, max_length: int) -> Fitted:
        """Choose the pairs that become rows, and truncate answers."""
        selected = self._select(split)
        pairs = self._all_pairs[selected]
        lengths = self._lengths_of(selected)
        longest = self._longest(lengths)
        is_overlong = longest > max_length
        if self.config.overlong == "error" and is_overlong.any():
            example = int(np.argmax(is_overlong))
            raise UserError(
                f"{self.records.place_of(int(pairs[example, 0]))}: an answer with its prompt has "
                f"{longest[example]:,} tokens, more than --max_length {max_length} allows; raise "
                "it, or set --overlong drop or truncate."
            )

        is_kept = np.ones(len(pairs), bool)
        if self.config.overlong == "drop":
            is_kept = ~is_overlong
        untrainable = 0
        # An answer that a single one is compared with is truncated in any case.
        is_too_long = is_kept & (lengths.max(axis=1) > max_length)
        for example in np.flatnonzero(is_too_long).tolist():
            pair = _Pair._make(pairs[example].tolist())
            truncated = self._truncated_pair(int(selected[example]), pair, max_length)
            if truncated is None:
                is_kept[example] = False
                untrainable += 1
            else:
                pairs[example] = truncated

        is_useless = is_kept & self._are_useless(pairs)
        is_kept &= ~is_useless
        kept_lengths = np.where(is_kept[:, None], lengths.clip(max=max_length), 0)

        kept = np.flatnonzero(is_kept)
        columns = _columns(pairs[kept])
        starts = np.zeros((len(kept), 2), np.int64)
        if self.shares_prompts:
            starts[:, 1] = columns["shared"]
        sequences = selected[kept]
        examples = Examples(
            sequences=np.stack([2 * sequences, 2 * sequences + 1], axis=1),
            starts=starts,
            stops=kept_lengths[kept],
            is_first_desirable=columns["is_first_desirable"].astype(bool),
        )
        counts = {
            "untrainable": untrainable + int(is_useless.sum()),
            "overlong": int(is_overlong.sum()),
            "lost_tokens": int((lengths - kept_lengths)[is_overlong].sum()),
            "kept": len(kept),
            "tokens": int(kept_lengths.sum()),
            "targets": int((columns["first_targets"] + columns["second_targets"]).sum()),
            "shared_tokens": int(starts.sum()),
        }
        target_bytes = int((columns["first_bytes"] + columns["second_bytes"]).sum())
        return Fitted(examples, counts, target_bytes)

    @property
    def _all_pairs(self) -> np.ndarray:
        """The :class:`_Pair` of each pair, int64 [pairs, 8]."""
        return np.array(self._pairs, np.int64).reshape(-1, len(_Pair._fields))

    def _select(self, split: Split) -> np.ndarray:
        """Return the numbers of the pairs of a split, int64 [pairs]."""
        records = _columns(self._all_pairs)["record"]
        return np.flatnonzero(self.records.is_in(split)[records])

    def _lengths_of(self, pairs: np.ndarray) -> np.ndarray:
        """Return the number of tokens of each answer with its prompt, int64 [pairs, 2]."""
        lengths: np.ndarray = self.store.lengths.reshape(-1, 2)[pairs]
        return lengths

    def _longest(self, lengths: np.ndarray) -> np.ndarray:
        """Return the length that counts of each pair of answers, int64 [pairs]."""
        longest: np.ndarray = lengths[:, 0] if self.unpaired else lengths.max(axis=1)
        return longest

    def _truncated_pair(self, number: int, pair: _Pair, max_length: int) -> _Pair | None:
        """Truncate the answers of a pair; return ``None`` if one is left without a target."""
        first = self._truncated(2 * number, pair.first_bytes, max_length)
        second = self._truncated(2 * number + 1, pair.second_bytes, max_length)
        truncated = _Pair.of(pair.record, first, second, bool(pair.is_first_desirable))
        has_lost_first = pair.first_targets > 0 and truncated.first_targets == 0
        has_lost_second = pair.second_targets > 0 and truncated.second_targets == 0
        # The second answer of a single one is only there for comparison.
        if not has_lost_first and (self.unpaired or not has_lost_second):
            return truncated

        if self.config.on_bad_row == "error":
            raise UserError(
                f"{self.records.place_of(pair.record)}: the prompt alone fills --max_length "
                f"{max_length}, so truncation would leave no answer; raise it, set --overlong "
                "drop, or leave such records out with --on_bad_row skip."
            )
        return None

    def _truncated(self, sequence: int, target_bytes: int, max_length: int) -> TokenSequence:
        """Return the beginning of a stored sequence, or all of it if it is short enough."""
        ids, loss_mask = self.store.read(sequence)
        stored = TokenSequence(ids, loss_mask, target_bytes)
        if len(ids) <= max_length:
            return stored
        return cut(stored, max_length, self.renderer.encoder)

    def _are_useless(self, pairs: np.ndarray) -> np.ndarray:
        """Return whether an answer has no target, or both have the same tokens, bool [pairs]."""
        columns = _columns(pairs)
        are_useless: np.ndarray = columns["first_targets"] == 0
        if not self.unpaired:
            are_useless |= (columns["second_targets"] == 0) | (columns["are_same"] == 1)
        return are_useless


def _columns(pairs: np.ndarray) -> dict[str, np.ndarray]:
    """Return the fields of pairs [pairs, 8], by their names in :class:`_Pair`."""
    return {name: pairs[:, i] for i, name in enumerate(_Pair._fields)}


def _shared_length(first: TokenSequence, second: TokenSequence) -> int:
    """Return how many tokens two answers can share: their prompt without its last token."""
    length = min(_prompt_length(first), _prompt_length(second))
    differences = np.flatnonzero(first.ids[:length] != second.ids[:length])
    if len(differences):
        length = int(differences[0])
    return max(length - 1, 0)


def _prompt_length(sequence: TokenSequence) -> int:
    """Return the number of tokens before the first target."""
    if not sequence.loss_mask.any():
        return len(sequence.ids)
    return int(np.argmax(sequence.loss_mask))
