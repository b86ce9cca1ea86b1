"""Render preference data as packed rows of pairs of answers, and count the answers' tokens.

The two answers of a pair share one copy of their prompt. Only the last token of the prompt is
stored for each, because it predicts the first tokens of the answers, which differ.

Unpaired answers (KTO) are stored in pairs, too: each with an answer to another prompt, from which
the loss estimates how far the model has moved (Ethayarajh et al. 2024, arXiv:2402.01306).
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from llmtrain.data.chat_template import BadRow, Message
from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.formats import PreferenceRecord, detect_format, preference_of
from llmtrain.data.packing import Counts, SecondAnswer, Split, SplitStats, TokenStore
from llmtrain.data.render import Document, Renderer
from llmtrain.data.sft import OVERLONG_OUTCOMES, Records
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
    """

    records: int = 0
    pairs: int = 0
    same: int = 0
    judged: int = 0
    shared: int = 0
    desirable: int = 0

    def left_out(self, overlong: str) -> str:
        """Return one line that says how many pairs are kept, and why the rest is not.

        Args:
            overlong: the value of ``--overlong``.
        """
        return (
            f"{self.kept:,} of {self.pairs:,} kept: "
            f"{self.overlong:,} overlong {OVERLONG_OUTCOMES[overlong]}, "
            f"{self.same:,} without a difference and {self.bad:,} bad ones left out"
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
            f"{self.rows:,} rows are {fill:.1%} full",
        ]


class _RenderedRecord(NamedTuple):
    """A record with its rendered answers.

    Attributes:
        place: the file and the line or row.
        record: the record.
        answers: each answer, rendered after the prompt.
    """

    place: str
    record: PreferenceRecord
    answers: list[Document]


class _RenderedPair(NamedTuple):
    """Two rendered answers that are stored together.

    Attributes:
        place: the file and the line or row of the record.
        first: an answer.
        second: the other answer of a pair, or an answer to compare an unpaired one with.
        is_first_desirable: whether the first answer is desirable.
    """

    place: str
    first: Document
    second: Document
    is_first_desirable: bool


class Pairs(Records[PreferenceRecord]):
    """The preference data of a source.

    Args:
        source: the records, as fields.
        config: holds the share of the eval data.
        chat: says how records become rows.
        stop_token_ids: the tokens at which the model stops generating.
        unpaired: the loss takes single answers with a label, not only pairs. Each answer of a pair
            is then a single answer, too.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        chat: PairConfig,
        stop_token_ids: Collection[int],
        unpaired: bool,
    ) -> None:
        super().__init__(
            source,
            read=preference_of if unpaired else _pair_of,
            config=config,
            chat=chat,
            stop_token_ids=stop_token_ids,
        )
        self.share_prompts = chat.shares_prompts
        self.unpaired = unpaired

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, split: Split
    ) -> SplitStats:
        """Render a split and write its rows.

        Args:
            tokenizer: a tokenizer with a chat template.
            block_size: the largest length of an answer with its prompt. A row holds twice as many
                tokens.
            path: the file to write.
            split: the split.

        Raises:
            UserError: with the place of a pair that cannot be rendered or is too long, if the flags
                do not say to go on without it; or if no training data are left.
        """
        renderer = Renderer(tokenizer, self.stop_token_ids)
        store = TokenStore(path)
        audit = PairAudit()
        width = 2 * block_size
        target_bytes = 0
        total = self.documents[split]

        pairs = self._rendered_pairs(renderer, split, audit)
        for full_pair in tqdm(pairs, total=total, desc="rendering", leave=False):
            audit.pairs += 1
            pair = self._fitted(renderer, full_pair, block_size, audit)
            if pair is None:
                continue
            if self._is_useless(pair):
                audit.same += 1
                continue

            first = pair.first
            second = pair.second
            shared = _shared_length(first, second) if self.share_prompts else 0
            ids = np.concatenate([first.ids, second.ids[shared:]])
            loss_mask = np.concatenate([first.loss_mask, second.loss_mask[shared:]])
            second_answer = SecondAnswer(
                start=len(first.ids),
                position=shared,
                is_first_desirable=pair.is_first_desirable,
            )
            store.add(ids, loss_mask, second_answer)

            audit.kept += 1
            audit.tokens += len(first.ids) + len(second.ids)
            audit.shared += shared
            audit.judged += int(loss_mask.sum())
            audit.desirable += self.unpaired and pair.is_first_desirable
            target_bytes += first.target_bytes + second.target_bytes

        audit.rows = store.write_rows(path, width, self.chat.is_packed)
        audit.places = audit.rows * width
        store.digest.update(f" {self.unpaired}".encode())
        audit.records = total
        if split == "train":
            # Unreadable records have no hash, so they are all counted as training data.
            audit.records += self._bad
            audit.bad += self._bad
            self._check(audit)
        return SplitStats(
            documents=total,
            rows=audit.rows,
            targets=audit.judged,
            bytes=target_bytes,
            sha256=store.digest.hexdigest(),
            audit=audit,
            pairs=store.pairs,
        )

    def _check(self, audit: PairAudit) -> None:
        """Raise :class:`UserError` if there is nothing to train on."""
        if not audit.kept:
            raise UserError(
                f"--dataset {self.source.name}: none of {audit.records:,} records can be compared "
                f"({audit.overlong:,} are overlong, {audit.bad:,} bad, {audit.same:,} without a "
                "difference); check --block_size and the chat template."
            )

    def _fitted(
        self, renderer: Renderer, pair: _RenderedPair, block_size: int, audit: PairAudit
    ) -> _RenderedPair | None:
        """Return a pair whose answers fit in half a row, or ``None`` if it is left out.

        The second answer of an unpaired one is only there for comparison. It is cut without being
        counted as overlong.
        """
        lengths = [len(pair.first.ids)]
        if not self.unpaired:
            lengths.append(len(pair.second.ids))
        if max(lengths) > block_size:
            complaint = (
                f"{pair.place}: an answer with its prompt is longer than --block_size {block_size}"
            )
            if not self._truncates(audit, complaint):
                return None

        first = pair.first
        if len(first.ids) > block_size:
            first = renderer.cut(first, block_size)
        second = pair.second
        if len(second.ids) > block_size:
            second = renderer.cut(second, block_size)
        return pair._replace(first=first, second=second)

    def _is_useless(self, pair: _RenderedPair) -> bool:
        """Return whether an answer has no target left, or both answers have the same tokens."""
        if not pair.first.loss_mask.any():
            return True
        if self.unpaired:
            return False
        return not pair.second.loss_mask.any() or np.array_equal(pair.first.ids, pair.second.ids)

    def _rendered_pairs(
        self, renderer: Renderer, split: Split, audit: PairAudit
    ) -> Iterator[_RenderedPair]:
        """Render the records of a split, as pairs.

        If answers are unpaired, each one is stored with the first answer of the record before its
        own, rendered after its own prompt. The first record is stored with an answer of the last
        one, so it comes last.
        """
        rendered = self._rendered_records(renderer, split, audit)
        if not self.unpaired:
            for place, record, (chosen, rejected) in rendered:
                yield _RenderedPair(place, chosen, rejected, record.desirable)
            return

        first = next(rendered, None)
        if first is None:
            return
        previous = first.record
        for place, record, answers in itertools.chain(rendered, [first]):
            compared = self._render(renderer, place, record, previous.answers[:1], audit)
            previous = record
            if not compared:
                continue
            for number, answer in enumerate(answers):
                # Of two answers, the first is the chosen one.
                is_desirable = record.desirable and number == 0
                yield _RenderedPair(place, answer, compared[0], is_desirable)

    def _rendered_records(
        self, renderer: Renderer, split: Split, audit: PairAudit
    ) -> Iterator[_RenderedRecord]:
        """Render each record of a split that is not bad."""
        for place, record in self._read(split):
            documents = self._render(renderer, place, record, record.answers, audit)
            if documents:
                yield _RenderedRecord(place, record, documents)

    def _render(
        self,
        renderer: Renderer,
        place: str,
        record: PreferenceRecord,
        answers: list[list[Message]],
        audit: PairAudit,
    ) -> list[Document]:
        """Render answers after the prompt of a record; return an empty list if one is bad."""
        try:
            return [renderer.render_answer(record, answer) for answer in answers]
        except BadRow as error:
            self._refuse(place, error)
            audit.bad += 1
            return []


def _pair_of(fields: Fields) -> PreferenceRecord:
    """Read a record that must have two answers."""
    record = preference_of(fields)
    if len(record.answers) < 2:
        raise BadRow("the record has one answer with a label, but this loss compares two answers")
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
    fields = first.fields if first is not None else {}
    format = detect_format(fields, preference=True)
    if format is None:
        names = ", ".join(map(str, fields)) or "no fields"
        raise UserError(
            f"--dataset {source.name} is not preference data: its first record has {names}. "
            "Records need prompt, chosen and rejected, or prompt, completion and label."
        )
    if format == "examples" and not unpaired:
        raise UserError(
            f"--dataset {source.name} has single answers with a label, but this loss compares two "
            "answers: use --loss_type kto."
        )
    return format


def _shared_length(first: Document, second: Document) -> int:
    """Return how many tokens two documents can share: their prompt without its last token."""
    length = min(_prompt_length(first), _prompt_length(second))
    differences = np.flatnonzero(first.ids[:length] != second.ids[:length])
    if len(differences):
        length = int(differences[0])
    return max(length - 1, 0)


def _prompt_length(document: Document) -> int:
    """Return the number of tokens before the first target."""
    if not document.loss_mask.any():
        return len(document.ids)
    return int(np.argmax(document.loss_mask))
