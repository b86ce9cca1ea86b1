"""Answers that were judged -> packed rows of whole pairs, and the audit of what in them is compared.

The two answers of a pair share one copy of their prompt but for its last token, which each begins with: what follows it
differs. An answer that is judged alone is paired with one to another prompt, by which a loss can tell how far the model
has moved (Ethayarajh et al. 2024, arXiv:2402.01306).
"""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from llmtrain.data.chat import Judged, judged_of, recognise
from llmtrain.data.config import DataConfig, PairConfig
from llmtrain.data.conversations import LEFT, Records
from llmtrain.data.sources import Fields, Source
from llmtrain.data.table import Counts, Second, TokenStore, Written
from llmtrain.data.template import BadRow, Message
from llmtrain.data.tokenizer import FastTokenizer
from llmtrain.data.turns import Document, Renderer
from llmtrain.errors import UserError, require


@dataclass
class PairAudit(Counts):
    """Counts of what is compared, over the rows; in ``tokens`` the prompt is counted with each answer."""

    records: int = 0  # that were read
    pairs: int = 0  # that those make that are not bad, or examples
    same: int = 0  # left out: their answers have the same tokens, or none
    judged: int = 0  # tokens
    shared: int = 0  # tokens: positions that sharing prompts has saved
    desirable: int = 0  # of examples

    def left(self, overlong: str) -> str:
        """Return how many pairs are left, and why the others are not, in one line."""
        return (
            f"{self.kept:,} of {self.pairs:,}: {self.overlong:,} overlong {LEFT[overlong]}, {self.same:,} without a "
            f"difference and {self.bad:,} bad ones left out"
        )

    def lines(self, overlong: str) -> list[str]:
        """Return lines for the banner."""
        tokens, held = max(self.tokens, 1), self.tokens - self.shared
        return [
            self.left(overlong),
            f"{self.judged:,} of {self.tokens:,} tokens are judged ({self.judged / tokens:.1%}), {self.shared:,} "
            f"positions saved by sharing prompts ({self.shared / tokens:.1%}), {self.rows:,} rows are "
            f"{held / max(self.places, 1):.1%} full",
        ]


class Pairs(Records[Judged]):
    """The judged answers of a source: pairs, or with ``alone`` examples of one answer each."""

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        chat: PairConfig,
        stops: Collection[int],
        alone: bool,
    ) -> None:
        super().__init__(source, judged_of if alone else _two_answers, config, chat, stops)
        self.share, self.alone = chat.share_prompts and chat.packing, alone

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, held_out: bool
    ) -> Written:
        """Write the rows of one side, each of twice ``block_size`` tokens, which is what one answer may have.

        Raises :class:`UserError` with the place of a pair that cannot be rendered, or is overlong, where the flags do
        not say to go on without it.
        """
        render, width, audit = Renderer(tokenizer, self.stops), 2 * block_size, PairAudit()
        store, size, total = TokenStore(path), 0, self.documents[held_out]
        judged = self._judged(render, held_out, audit)
        for place, answers, desirable in tqdm(judged, total=total, desc="rendering", leave=False):
            audit.pairs += 1
            if max(len(answer.ids) for answer in answers[: 1 if self.alone else 2]) > block_size:
                what = f"an answer with its prompt has more than the {block_size} tokens of --block_size"
                if not self._truncates(audit, f"{place}: {what}"):
                    continue
            first, second = (
                render.cut(a, block_size) if len(a.ids) > block_size else a for a in answers
            )
            untrained = not first.trained.any() or not (self.alone or second.trained.any())
            if untrained or (not self.alone and np.array_equal(first.ids, second.ids)):
                audit.same += 1
                continue
            shared = _shared(first, second) if self.share else 0
            ids = np.concatenate([first.ids, second.ids[shared:]])
            trained = np.concatenate([first.trained, second.trained[shared:]])
            store.add(ids, trained, Second(len(first.ids), shared, desirable))
            audit.kept += 1
            audit.tokens += len(first.ids) + len(second.ids)
            audit.shared += shared
            audit.judged += int(trained.sum())
            audit.desirable += self.alone and desirable
            size += first.trained_bytes + second.trained_bytes
        audit.rows = store.write_rows(path, width, self.chat.packing)
        audit.places = audit.rows * width
        store.digest.update(f" {self.alone}".encode())
        audit.records = total + (
            0 if held_out else self._bad
        )  # which side bad ones would be on, nobody knows
        audit.bad += 0 if held_out else self._bad
        if not held_out and not audit.kept:
            raise UserError(
                f"--dataset {self.source.name}: none of {audit.records:,} records can be compared ({audit.overlong:,} "
                f"are overlong, {audit.bad:,} bad, {audit.same:,} without a difference); check --block_size and the "
                "chat template."
            )
        return Written(
            total, audit.rows, audit.judged, size, store.digest.hexdigest(), audit, store.pairs
        )

    def _judged(
        self, render: Renderer, held_out: bool, audit: PairAudit
    ) -> Iterator[tuple[str, list[Document], bool]]:
        """Yield pairs; or examples, each with an answer to the prompt before it, the first with one to the last.

        That is one that can be rendered, which is why the first comes last.
        """
        rendered = (
            (place, record, found)
            for place, record in self._read(held_out)
            if (found := self._render(render, place, record, record.answers, audit))
        )
        if not self.alone:
            yield from ((place, answers, record.desirable) for place, record, answers in rendered)
            return
        examples = [*itertools.islice(rendered, 1)]
        before = examples[0][1] if examples else None
        for place, record, answers in itertools.chain(rendered, examples):
            assert before is not None
            other = self._render(render, place, record, before.answers[:1], audit)
            for number, answer in enumerate(answers if other else ()):
                yield place, [answer, *other], record.desirable and number == 0
            before = record

    def _render(
        self,
        render: Renderer,
        place: str,
        record: Judged,
        answers: list[list[Message]],
        audit: PairAudit,
    ) -> list[Document]:
        """Return a record's prompt with each of some answers, or nothing where it is bad."""
        try:
            return [render.judged(record, answer) for answer in answers]
        except BadRow as error:
            self._refuse(place, error)
            audit.bad += 1
            return []


def _two_answers(fields: Fields) -> Judged:
    record = judged_of(fields)
    require(
        len(record.answers) > 1,
        "it has one answer and its label, and this loss compares two",
        BadRow,
    )
    return record


def judged_format(source: Source, alone: bool) -> str:
    """Return the format of a source's judged answers, by the fields of its first record.

    Raises :class:`UserError` where it is none, or where answers stand alone and the loss compares two.
    """
    fields = next((first.fields for first in source.records(None)), {})
    found = recognise(fields, judged=True)
    if found is None:
        known = ", ".join(map(str, fields)) or "nothing"
        raise UserError(
            f"--dataset {source.name}: a record has {known}; preferences have prompt, chosen and rejected, or prompt, "
            "completion and label."
        )
    if found == "examples" and not alone:
        raise UserError(
            f"--dataset {source.name} has a label for each answer, and this loss compares two: use --loss_type kto."
        )
    return found


def _shared(first: Document, second: Document) -> int:
    """Return how many tokens of two documents are one prompt's, all but its last."""
    length = min(
        int(np.argmax(each.trained)) if each.trained.any() else len(each.ids)
        for each in (first, second)
    )
    differ = np.flatnonzero(first.ids[:length] != second.ids[:length])
    return max((int(differ[0]) if len(differ) else length) - 1, 0)
