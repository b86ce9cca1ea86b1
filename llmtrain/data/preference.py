"""Render preference data as packed rows of pairs of answers, and count the answers' tokens.

The two answers of a pair share one copy of their prompt. Only the last token of the prompt is
stored for each, because it predicts the first tokens of the answers, which differ.

Unpaired answers (KTO) are stored in pairs, too: each with an answer to another prompt, from which
the loss estimates how far the model has moved (Ethayarajh et al. 2024, arXiv:2402.01306).
"""

import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.console import pluralize
from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.formats import PreferenceRecord, detect_format, preference_of
from llmtrain.data.lengths import (
    check_not_all_overlong,
    describe_overlong_count,
    ways_to_fit,
)
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Counts, Examples, Split, SplitStats, TokenStore
from llmtrain.data.parallel_rendering import render_all
from llmtrain.data.prompt_completion import AnyRenderer, make_renderer
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.rendered import TokenSequence
from llmtrain.data.sft import add_counts, lines_about_messages
from llmtrain.data.sources import Fields, Source
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError


@dataclass
class PairAudit(Counts):
    """Counts of pairs, answers and tokens in one split of a source.

    ``tokens`` counts the prompt once for each answer.

    Attributes:
        records: records that were read.
        pairs: pairs, or single answers, in the records that are not bad.
        same: pairs that are left out because their answers have the same tokens, or none.
        judged: target tokens, which are those of the answers.
        shared: tokens that are not stored, because the answers of a pair share a prompt.
        desirable: single answers that are labelled desirable.
        special_as_text: special tokens in messages that are encoded as text.
        other_fields: the number of messages that have each field that llmtrain does not read.
    """

    records: int = 0
    pairs: int = 0
    same: int = 0
    judged: int = 0
    shared: int = 0
    desirable: int = 0
    special_as_text: int = 0
    other_fields: dict[str, int] = field(default_factory=dict)

    def left_out(self, overlong: str) -> str:
        """Return one line that says how many pairs are kept, and why the rest is not.

        Args:
            overlong: the value of ``--overlong``.
        """
        bad = pluralize(self.bad, "bad one")
        return (
            f"{self.kept:,} of {self.pairs:,} kept: "
            f"{self.describe_overlong(overlong)}, "
            f"{self.same:,} without a difference and {bad} left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return the lines of the start-up log."""
        target_share = self.judged / max(self.tokens, 1)
        shared_share = self.shared / max(self.tokens, 1)
        fill = (self.tokens - self.shared) / max(self.places, 1)
        return [
            self.left_out(overlong),
            f"{self.judged:,} of {self.tokens:,} tokens are targets ({target_share:.1%}), "
            f"{self.shared:,} positions saved by sharing prompts ({shared_share:.1%}), "
            f"{pluralize(self.rows, 'row')} {'is' if self.rows == 1 else 'are'} {fill:.1%} full",
            *lines_about_messages(self.special_as_text, self.other_fields),
        ]


class _RenderedRecord(NamedTuple):
    """A record with its rendered answers.

    Attributes:
        read: the record and its place.
        answers: each answer, rendered after the prompt.
    """

    read: ReadRecord[PreferenceRecord]
    answers: list[TokenSequence]


class _Pair(NamedTuple):
    """Two answers that are stored together, as numbers.

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


class Pairs:
    """The preference data of a source.

    Args:
        source: the records, as fields.
        config: holds the share of the eval data.
        chat: says how records become rows.
        stop_token_ids: the tokens at which the model stops generating.
        unpaired: the loss takes single answers with a label, not only pairs. Each answer of a pair
            is then a single answer, too.
        only_split: the split of all records; ``None`` divides them by the hashes of their prompts.
        max_positions: the number of positions of the model, for error messages; ``None`` if there
            is no limit.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        chat: PairConfig,
        stop_token_ids: Collection[int],
        unpaired: bool,
        only_split: Split | None = None,
        max_positions: int | None = None,
    ) -> None:
        self.source = source
        self.only_split = only_split
        self.records = Records[PreferenceRecord](
            source,
            read=lambda fields: _record_of(fields, source.has_artificial_nulls, unpaired),
            config=config,
            chat=chat,
            only_split=only_split,
        )
        self.chat = chat
        self.stop_token_ids = stop_token_ids
        self.processes = chat.rendering_processes
        self.max_positions = max_positions
        self.unpaired = unpaired

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the text of every message in one split, or in both."""
        return self.records.texts(split)

    def encode(self, tokenizer: FastTokenizer, folder: Path) -> "EncodedPairs":
        """Render all records, and write the tokens of their answers to temporary files.

        Args:
            tokenizer: a tokenizer. If it has no chat template, the records are plain text.
            folder: the folder of the temporary files.

        Raises:
            UserError: with the place of a record that cannot be read or rendered, if the flags do
                not say to go on without it.
        """
        renderer = make_renderer(tokenizer, self.stop_token_ids)
        return self.records.encode_settled(lambda: self._encode_once(renderer, folder))

    def _encode_once(self, renderer: AnyRenderer, folder: Path) -> "EncodedPairs":
        encoded = EncodedPairs(
            self.records,
            self.chat,
            self.unpaired,
            renderer,
            folder,
            max_positions=self.max_positions,
        )
        items = ((read, read.record) for read in self.records)
        results = render_all(renderer, items, self.processes)
        for read, _, rendered in self.records.progress(results):
            split = encoded.splits[read.split]
            split.audit.records += 1
            if isinstance(rendered, BadRecord):
                self.records.refuse(read.place, rendered)
                split.audit.bad += 1
                continue
            split.audit.special_as_text += rendered.counts["special_as_text"]
            add_counts(split.audit.other_fields, rendered.unread_fields)
            if self.unpaired:
                self._add_unpaired(renderer, split, _RenderedRecord(read, rendered.sequences))
            else:
                chosen, rejected = rendered.sequences
                split.add(read.number, chosen, rejected, read.record.desirable)

        if self.unpaired:
            # The first record of a split is compared with the last one.
            for split in encoded.splits.values():
                if split.first is not None:
                    self._compare(renderer, split, split.first)
        return encoded

    def _add_unpaired(
        self, renderer: AnyRenderer, split: "_EncodedSplit", rendered: _RenderedRecord
    ) -> None:
        """Add single answers, each with an answer to another prompt.

        That is the first answer of the record before their own in the split, rendered after their
        own prompt.
        """
        if split.first is None:
            split.first = rendered
        else:
            self._compare(renderer, split, rendered)
        split.previous = rendered.read.record

    def _compare(
        self, renderer: AnyRenderer, split: "_EncodedSplit", rendered: _RenderedRecord
    ) -> None:
        """Add the answers of a record, each with an answer of the record before it."""
        assert split.previous is not None
        record = rendered.read.record
        answer_to_other = record._replace(answers=split.previous.answers[:1])
        try:
            compared = renderer(answer_to_other)
        except BadRecord as error:
            self.records.refuse(rendered.read.place, error)
            split.audit.bad += 1
            return
        for number, answer in enumerate(rendered.answers):
            # Of two answers, the first is the chosen one.
            is_desirable = record.desirable and number == 0
            split.add(rendered.read.number, answer, compared.sequences[0], is_desirable)


class _EncodedSplit:
    """The pairs of a split, whose tokens are in a temporary file.

    Attributes:
        store: the tokens of the answers with their prompts, two documents for each pair.
        audit: the counts that do not depend on ``--max_length``.
        first: the first record, if answers are unpaired: it is compared with the last one.
        previous: the last record so far, if answers are unpaired.
    """

    def __init__(self, path: Path) -> None:
        self.store = TokenStore(path)
        self.audit = PairAudit()
        self.first: _RenderedRecord | None = None
        self.previous: PreferenceRecord | None = None
        self._pairs = array.array("q")

    def add(
        self, record: int, first: TokenSequence, second: TokenSequence, is_first_desirable: bool
    ) -> None:
        """Add two answers.

        Args:
            record: the number of their record.
            first: an answer.
            second: the other answer of a pair, or an answer to compare an unpaired one with.
            is_first_desirable: whether the first answer is desirable.
        """
        self.audit.pairs += 1
        self.store.add(first.ids, first.loss_mask)
        self.store.add(second.ids, second.loss_mask)
        self._pairs.extend(_Pair.of(record, first, second, is_first_desirable))

    @property
    def pairs(self) -> np.ndarray:
        """The :class:`_Pair` of each pair, int64 [pairs, 8]."""
        return np.array(self._pairs, np.int64).reshape(-1, len(_Pair._fields))

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each answer with its prompt, int64 [pairs, 2]."""
        return self.store.lengths.reshape(-1, 2)


class EncodedPairs:
    """The preference data of a source as tokens, which do not fit into rows yet.

    Args:
        records: the source's records.
        chat: says how records become rows.
        unpaired: the loss takes single answers.
        renderer: the renderer of the tokens.
        folder: the folder of the temporary files.
        max_positions: the number of positions of the model; ``None`` if there is no limit.
    """

    def __init__(
        self,
        records: Records[PreferenceRecord],
        chat: PairConfig,
        unpaired: bool,
        renderer: AnyRenderer,
        folder: Path,
        max_positions: int | None,
    ) -> None:
        self.records = records
        self.chat = chat
        self.unpaired = unpaired
        self.renderer = renderer
        self.max_positions = max_positions
        self.splits: dict[Split, _EncodedSplit] = {
            "train": _EncodedSplit(folder / "train.tokens"),
            "eval": _EncodedSplit(folder / "eval.tokens"),
        }

    def close(self) -> None:
        """Delete the temporary files."""
        for split in self.splits.values():
            split.store.close()

    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each pair, int64 [pairs].

        The second answer of an unpaired one is only there for comparison, so it does not count.
        """
        lengths = self.splits[split].lengths
        longest: np.ndarray = lengths[:, 0] if self.unpaired else lengths.max(axis=1)
        return longest

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split.

        Args:
            path: the file to write.
            split: the split.
            max_length: the largest length of an answer with its prompt. A row holds twice as many
                tokens.

        Raises:
            UserError: with the place of a pair that is too long, if the flags do not say to go on
                without it; or if no training data are left.
        """
        encoded = self.splits[split]
        audit = replace(encoded.audit)
        pairs = encoded.pairs
        is_kept = self._fit(split, pairs, max_length, audit)

        kept = np.flatnonzero(is_kept)
        pairs = pairs[kept]
        columns = _columns(pairs)
        stops = encoded.lengths[kept].clip(max=max_length)
        starts = np.zeros_like(stops)
        if self.chat.shares_prompts:
            starts[:, 1] = columns["shared"]

        examples = Examples(
            documents=np.stack([2 * kept, 2 * kept + 1], axis=1),
            starts=starts,
            stops=stops,
            is_first_desirable=columns["is_first_desirable"].astype(bool),
        )
        width = 2 * max_length
        written = encoded.store.write_rows(path, examples, width, self.chat.is_packed)
        written.digest.update(f" {self.unpaired}".encode())

        audit.kept = len(kept)
        audit.tokens = int(stops.sum())
        audit.shared = int(starts.sum())
        audit.judged = int((columns["first_targets"] + columns["second_targets"]).sum())
        if self.unpaired:
            audit.desirable = int(columns["is_first_desirable"].sum())
        audit.rows = written.rows
        audit.places = written.rows * width

        documents = audit.records
        # Unreadable records have no hash. If records are divided, they count as training data.
        if split == (self.records.only_split or "train"):
            audit.records += self.records.unreadable
            audit.bad += self.records.unreadable
        if split == "train":
            self._check(audit, max_length)
        return SplitStats(
            documents=documents,
            rows=written.rows,
            targets=audit.judged,
            bytes=int((columns["first_bytes"] + columns["second_bytes"]).sum()),
            sha256=written.digest.hexdigest(),
            audit=audit,
            pairs=written.pairs,
        )

    def _check(self, audit: PairAudit, max_length: int) -> None:
        """Raise :class:`UserError` if there is nothing to train on.

        Args:
            audit: the counts.
            max_length: the largest length of an answer with its prompt.
        """
        if not audit.kept:
            lengths = self.lengths("train")
            if self.chat.overlong == "drop":
                check_not_all_overlong(
                    lengths,
                    name=self.records.source.name,
                    unit="answer" if self.unpaired else "pair",
                    max_length=max_length,
                    max_positions=self.max_positions,
                )
            overlong = describe_overlong_count(lengths, max_length, self.max_positions)
            first_fault = f", the first one {self.records.first_fault}" if audit.bad else ""
            raise UserError(
                f"--dataset {self.records.source.name}: none of "
                f"{pluralize(audit.records, 'record')} can be "
                f"compared ({overlong}, {audit.bad:,} bad{first_fault}, "
                f"{audit.same:,} without a difference); "
                "check --max_length and the chat template."
            )

    def _fit(
        self, split: Split, pairs: np.ndarray, max_length: int, audit: PairAudit
    ) -> np.ndarray:
        """Choose the pairs that become rows, bool [pairs].

        Args:
            split: the split.
            pairs: its pairs, as numbers. Those of truncated answers are replaced.
            max_length: the largest length of an answer with its prompt.
            audit: counts the pairs that are left out.
        """
        encoded = self.splits[split]
        lengths = encoded.lengths
        is_overlong = self.lengths(split) > max_length
        audit.overlong += int(is_overlong.sum())
        if self.chat.overlong == "error" and is_overlong.any():
            self._refuse_overlong(split, pairs, int(np.argmax(is_overlong)), max_length)

        is_kept = np.ones(len(pairs), bool)
        if self.chat.overlong == "drop":
            is_kept = ~is_overlong
        # An answer that an unpaired one is compared with is truncated in any case.
        is_too_long = is_kept & (lengths.max(axis=1) > max_length)
        for number in np.flatnonzero(is_too_long).tolist():
            pair = _Pair._make(pairs[number].tolist())
            cut = self._cut(encoded, number, pair, max_length)
            if cut is None:
                is_kept[number] = False
                audit.same += 1
            else:
                pairs[number] = cut

        is_useless = is_kept & self._are_useless(pairs)
        audit.same += int(is_useless.sum())
        is_kept &= ~is_useless

        kept_lengths = np.where(is_kept[:, None], lengths.clip(max=max_length), 0)
        audit.lost += int((lengths - kept_lengths)[is_overlong].sum())
        return is_kept

    def _refuse_overlong(
        self, split: Split, pairs: np.ndarray, number: int, max_length: int
    ) -> None:
        """Raise :class:`UserError` for a pair that is too long."""
        place = self.records.place_of(_Pair._make(pairs[number].tolist()).record)
        length = int(self.lengths(split)[number])
        raise UserError(
            f"{place}: an answer with its prompt has {length:,} tokens, more than --max_length "
            f"{max_length} allows; {ways_to_fit(length, self.max_positions)}, or set --overlong "
            "drop or truncate."
        )

    def _cut(
        self, encoded: _EncodedSplit, number: int, pair: _Pair, max_length: int
    ) -> _Pair | None:
        """Truncate the answers of a pair; return ``None`` if one is left without a target."""
        first = self._truncated(encoded, 2 * number, pair.first_bytes, max_length)
        second = self._truncated(encoded, 2 * number + 1, pair.second_bytes, max_length)
        cut = _Pair.of(pair.record, first, second, bool(pair.is_first_desirable))
        has_lost_first = pair.first_targets > 0 and cut.first_targets == 0
        has_lost_second = pair.second_targets > 0 and cut.second_targets == 0
        # The second answer of an unpaired one is only there for comparison.
        if not has_lost_first and (self.unpaired or not has_lost_second):
            return cut

        if self.chat.on_bad_row == "error":
            # A larger --max_length holds an answer's first token, unless the model has no more
            # positions.
            ways = ways_to_fit(max_length + 1, self.max_positions)
            raise UserError(
                f"{self.records.place_of(pair.record)}: the prompt alone fills --max_length "
                f"{max_length}, so truncation would leave no answer; {ways}, set --overlong drop, "
                "or leave such records out with --on_bad_row skip."
            )
        return None

    def _truncated(
        self, encoded: _EncodedSplit, number: int, target_bytes: int, max_length: int
    ) -> TokenSequence:
        """Return the beginning of a stored document, or all of it if it is short enough."""
        ids, loss_mask = encoded.store.read(number)
        document = TokenSequence(ids, loss_mask, target_bytes)
        if len(ids) <= max_length:
            return document
        return self.renderer.cut(document, max_length)

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


def _record_of(fields: Fields, has_artificial_nulls: bool, unpaired: bool) -> PreferenceRecord:
    """Read a record, which must have two answers unless the loss takes single ones."""
    record = preference_of(fields, has_artificial_nulls)
    if not unpaired and len(record.answers) < 2:
        raise BadRecord(
            "the record has one answer with a label, but this loss compares two answers"
        )
    return record


def preference_format_of(source: Source, unpaired: bool) -> str:
    """Detect the format of preference data from the fields of the first record.

    Args:
        source: the records.
        unpaired: the loss takes single answers with a label, not only pairs.

    Returns:
        ``pairs`` or ``examples``; see :func:`llmtrain.data.formats.detect_format`.

    Raises:
        UserError: if the record is not preference data, or if it has one answer and the loss
            compares two.
    """
    first = next(source.records(None), None)
    if first is None:
        raise UserError(f"{source.flag} {source.name} holds no records.")
    fields = first.fields
    format = detect_format(fields, preference=True)
    if format is None:
        names = ", ".join(map(str, fields)) or "no fields"
        raise UserError(
            f"{source.flag} {source.name} is not preference data: its first record has {names}. "
            "Records need prompt, chosen and rejected, or prompt, completion and label."
        )
    if format == "examples" and not unpaired:
        raise UserError(
            f"{source.flag} {source.name} has single answers with a label, but this loss compares "
            "two answers: use --loss_type kto."
        )
    return format


def _shared_length(first: TokenSequence, second: TokenSequence) -> int:
    """Return how many tokens two documents can share: their prompt without its last token."""
    length = min(_prompt_length(first), _prompt_length(second))
    differences = np.flatnonzero(first.ids[:length] != second.ids[:length])
    if len(differences):
        length = int(differences[0])
    return max(length - 1, 0)


def _prompt_length(document: TokenSequence) -> int:
    """Return the number of tokens before the first target."""
    if not document.loss_mask.any():
        return len(document.ids)
    return int(np.argmax(document.loss_mask))
