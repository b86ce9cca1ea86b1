"""Render preference data as packed rows of pairs of answers, and count what is compared.

The two answers of a pair share one copy of their prompt. Only its last token is stored for both, because the first
tokens of the answers, which it predicts, differ.

An answer that is judged alone (KTO) is stored in a pair with an answer to another prompt, from which the loss estimates
how far the model has moved (Ethayarajh et al. 2024, arXiv:2402.01306).
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
from llmtrain.data.packing import Counts, Second, SplitStats, TokenStore
from llmtrain.data.render import Document, Renderer
from llmtrain.data.sft import LEFT, Records
from llmtrain.data.sources import Fields, Source
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.errors import UserError


@dataclass
class PairAudit(Counts):
    """Counts of pairs, answers and tokens in one side (train or eval) of a source.

    In ``tokens`` the prompt is counted once for each answer.

    Attributes:
        records: Records that were read.
        pairs: Pairs, or single answers, in the records that are not bad.
        same: Pairs that are left out because their answers have the same tokens, or none.
        judged: Tokens of the answers.
        shared: Tokens that are not stored, because the answers of a pair share a prompt.
        desirable: Single answers that are labelled desirable.
    """

    records: int = 0
    pairs: int = 0
    same: int = 0
    judged: int = 0
    shared: int = 0
    desirable: int = 0

    def left(self, overlong: str) -> str:
        """Return one line that says how many pairs are kept, and why the others are not."""
        return (
            f"{self.kept:,} of {self.pairs:,}: {self.overlong:,} overlong {LEFT[overlong]}, "
            f"{self.same:,} without a difference and {self.bad:,} bad ones left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return the lines of the start-up log."""
        tokens = max(self.tokens, 1)
        stored = self.tokens - self.shared
        return [
            self.left(overlong),
            f"{self.judged:,} of {self.tokens:,} tokens are judged ({self.judged / tokens:.1%}), "
            f"{self.shared:,} positions saved by sharing prompts ({self.shared / tokens:.1%}), "
            f"{self.rows:,} rows are {stored / max(self.places, 1):.1%} full",
        ]


class _RenderedPair(NamedTuple):
    """Two rendered answers that are stored together."""

    place: str  # of the record: its file and line, or row
    first: Document
    second: Document
    desirable: bool  # the first


class Pairs(Records[PreferenceRecord]):
    """The preference data of a source: pairs of answers, or with ``alone`` single answers that have a label."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        chat: PairConfig,
        stops: Collection[int],
        alone: bool,
    ) -> None:
        super().__init__(
            source,
            read=preference_of if alone else _pair_of,
            config=config,
            chat=chat,
            stops=stops,
        )
        self.share = chat.share_prompts and chat.packing
        self.alone = alone

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, held_out: bool
    ) -> SplitStats:
        """Render the training or the evaluation data and write its rows.

        Args:
            tokenizer: Has a chat template.
            block_size: The largest length of an answer with its prompt. A row holds twice as many tokens.
            path: The file to write.
            held_out: Write the evaluation data instead of the training data.

        Raises:
            UserError: With the place of a pair that cannot be rendered or is too long, if the flags do not say to go
                on without it; or if nothing is left to train on.
        """
        renderer = Renderer(tokenizer, self.stops)
        store = TokenStore(path)
        audit = PairAudit()
        width = 2 * block_size
        trained_bytes = 0
        total = self.documents[held_out]

        pairs = self._rendered(renderer, held_out, audit)
        for whole_pair in tqdm(pairs, total=total, desc="rendering", leave=False):
            audit.pairs += 1
            pair = self._fitted(renderer, whole_pair, block_size, audit)
            if pair is None:
                continue
            if self._is_useless(pair):
                audit.same += 1
                continue

            first = pair.first
            second = pair.second
            shared = _shared_length(first, second) if self.share else 0
            ids = np.concatenate([first.ids, second.ids[shared:]])
            trained = np.concatenate([first.trained, second.trained[shared:]])
            where = Second(start=len(first.ids), position=shared, desirable=pair.desirable)
            store.add(ids, trained, where)

            audit.kept += 1
            audit.tokens += len(first.ids) + len(second.ids)
            audit.shared += shared
            audit.judged += int(trained.sum())
            audit.desirable += self.alone and pair.desirable
            trained_bytes += first.trained_bytes + second.trained_bytes

        audit.rows = store.write_rows(path, width, self.chat.packing)
        audit.places = audit.rows * width
        store.digest.update(f" {self.alone}".encode())
        audit.records = total
        if not held_out:
            # Unreadable records have no hash, so they are all counted as training data.
            audit.records += self._bad
            audit.bad += self._bad
        if not held_out and not audit.kept:
            raise UserError(
                f"--dataset {self.source.name}: none of {audit.records:,} records can be compared "
                f"({audit.overlong:,} are overlong, {audit.bad:,} bad, {audit.same:,} without a difference); "
                "check --block_size and the chat template."
            )
        return SplitStats(
            documents=total,
            rows=audit.rows,
            targets=audit.judged,
            bytes=trained_bytes,
            sha256=store.digest.hexdigest(),
            audit=audit,
            pairs=store.pairs,
        )

    def _fitted(
        self, renderer: Renderer, pair: _RenderedPair, block_size: int, audit: PairAudit
    ) -> _RenderedPair | None:
        """Return a pair whose answers fit in their half of a row, or ``None`` if it is left out.

        The second answer of a single one is there for comparison only. It is cut without being counted as overlong.
        """
        lengths = [len(pair.first.ids)]
        if not self.alone:
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
        """Return whether an answer has no tokens left, or whether both answers have the same."""
        if not pair.first.trained.any():
            return True
        if self.alone:
            return False
        return not pair.second.trained.any() or np.array_equal(pair.first.ids, pair.second.ids)

    def _rendered(
        self, renderer: Renderer, held_out: bool, audit: PairAudit
    ) -> Iterator[_RenderedPair]:
        """Render the records of one side, as pairs.

        With ``alone``, a record with two answers counts as two records with one. Each answer is paired with the first
        answer of the record before it, rendered after its own prompt. The first record is paired with the last one,
        so it comes last.
        """
        rendered = self._rendered_records(renderer, held_out, audit)
        if not self.alone:
            for place, record, (chosen, rejected) in rendered:
                yield _RenderedPair(place, chosen, rejected, record.desirable)
            return

        first_record = list(itertools.islice(rendered, 1))
        if not first_record:
            return
        previous = first_record[0][1]
        for place, record, answers in itertools.chain(rendered, first_record):
            others = self._render(renderer, place, record, previous.answers[:1], audit)
            previous = record
            if not others:
                continue
            for number, answer in enumerate(answers):
                desirable = record.desirable and number == 0  # of a pair, the chosen answer is
                yield _RenderedPair(place, answer, others[0], desirable)

    def _rendered_records(
        self, renderer: Renderer, held_out: bool, audit: PairAudit
    ) -> Iterator[tuple[str, PreferenceRecord, list[Document]]]:
        """Yield each record that is not bad with its place and its rendered answers."""
        for place, record in self._read(held_out):
            documents = self._render(renderer, place, record, record.answers, audit)
            if documents:
                yield place, record, documents

    def _render(
        self,
        renderer: Renderer,
        place: str,
        record: PreferenceRecord,
        answers: list[list[Message]],
        audit: PairAudit,
    ) -> list[Document]:
        """Render the prompt of a record with each of some answers; an empty list if it is bad."""
        try:
            return [renderer.judged(record, answer) for answer in answers]
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


def judged_format(source: Source, alone: bool) -> str:
    """Detect the format of preference data from the fields of the first record.

    Args:
        source: The records.
        alone: The loss takes single answers with a label, not only pairs.

    Returns:
        ``pairs`` or ``examples``; see :func:`llmtrain.data.formats.detect_format`.

    Raises:
        UserError: If the record is not preference data, or if it has one answer and the loss compares two.
    """
    first = next(source.records(None), None)
    fields = first.fields if first is not None else {}
    format = detect_format(fields, preference=True)
    if format is None:
        names = ", ".join(map(str, fields)) or "no fields"
        raise UserError(
            f"--dataset {source.name} is not preference data: its first record has {names}. Records need prompt, "
            "chosen and rejected, or prompt, completion and label."
        )
    if format == "examples" and not alone:
        raise UserError(
            f"--dataset {source.name} has single answers with a label, but this loss compares two answers: "
            "use --loss_type kto."
        )
    return format


def _shared_length(first: Document, second: Document) -> int:
    """Return the number of tokens that two documents can share: their common prompt but its last token."""
    length = min(_prompt_length(first), _prompt_length(second))
    differences = np.flatnonzero(first.ids[:length] != second.ids[:length])
    if len(differences):
        length = int(differences[0])
    return max(length - 1, 0)


def _prompt_length(document: Document) -> int:
    """Return the number of tokens before the first target."""
    if not document.trained.any():
        return len(document.ids)
    return int(np.argmax(document.trained))
