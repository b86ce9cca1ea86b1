"""The records of a source as tokens in a temporary file, which become rows once a length is known.

Each record is read, rendered and encoded once. Then ``--max_length`` can be chosen, and each split
is written as rows. There are three kinds: :mod:`llmtrain.data.corpus` for text,
:mod:`llmtrain.data.conversations` and :mod:`llmtrain.data.pairs`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from tqdm import tqdm

from llmtrain.console import can_show_bars, check_interrupt
from llmtrain.data.audit import Audit, RecordCounts, Unit, check_not_all_overlong, describe_overlong
from llmtrain.data.config import RowConfig
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Examples, write_rows
from llmtrain.data.records import ReadRecord, Records
from llmtrain.data.render import AnyRenderer, Rendered
from llmtrain.data.rendering_pool import render_all
from llmtrain.data.splits import Split
from llmtrain.data.store import TokenStore

R = TypeVar("R", Conversation, PreferenceRecord)


class SplitStats(NamedTuple):
    """Counts and the hash of the rows that were written for one split of a source.

    Attributes:
        records: documents, conversations or preference records that could be read.
        rows: rows.
        targets: target tokens.
        bytes: UTF-8 bytes of the target tokens' text.
        sha256: a hex digest of the tokens.
        audit: counts of the conversations or pairs; ``None`` for text.
        pairs: the largest number of pairs in a row; 0 unless the rows hold preference data.
    """

    records: int
    rows: int
    targets: int
    bytes: int
    sha256: str
    audit: Audit | None = None
    pairs: int = 0


class EncodedSource(ABC):
    """The records of a source as tokens.

    Args:
        folder: the folder of the temporary file.
    """

    def __init__(self, folder: Path) -> None:
        self.store = TokenStore(folder / "tokens")

    def close(self) -> None:
        """Delete the temporary file."""
        self.store.close()

    @abstractmethod
    def encode(self) -> None:
        """Read and encode all records once.

        Raises:
            UserError: with the place of a record that cannot be used, if the flags do not say to
                go on without it.
        """

    @abstractmethod
    def lengths(self, split: Split) -> np.ndarray:
        """Return the smallest ``--max_length`` that holds each example; empty for text."""

    @abstractmethod
    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split.

        Raises:
            UserError: if the flags do not say to go on without an example that is too long, or if
                no training data are left.
        """


@dataclass
class Fitted:
    """The examples of a split that fit in a row, possibly after truncation.

    Attributes:
        examples: their tokens.
        counts: counts for the :class:`Audit`, by the names of its fields.
        target_bytes: UTF-8 bytes of the targets' text.
    """

    examples: Examples
    counts: Mapping[str, int]
    target_bytes: int


class EncodedExamples(EncodedSource, Generic[R]):
    """The conversations or pairs of a source as tokens.

    Args:
        records: the records.
        renderer: renders them.
        config: says how they become rows.
        folder: the folder of the temporary file.
        unit: the unit of the counts.
        digest_note: a further text that the hash of the rows depends on.
    """

    def __init__(
        self,
        records: Records[R],
        renderer: AnyRenderer,
        config: RowConfig,
        folder: Path,
        unit: Unit,
        digest_note: str = "",
    ) -> None:
        super().__init__(folder)
        self.records: Records[R] = records
        self.renderer = renderer
        self.config = config
        self.unit = unit
        self.digest_note = digest_note
        self._counts = RecordCounts()

    def encode(self) -> None:
        """Read and render all records; see :class:`EncodedSource`."""
        items = ((read, read.record) for read in self.records.used())
        results = render_all(self.renderer, items, self.config.rendering_processes)
        bar = tqdm(
            results, desc="rendering", unit=" records", leave=False, disable=not can_show_bars()
        )
        for read, _, rendered in bar:
            check_interrupt()
            if isinstance(rendered, BadRecord):
                self.refuse(read, rendered)
                continue
            self._counts.add(read.number, {**rendered.counts, **self.add(read, rendered)})

    def refuse(self, read: ReadRecord[R], error: BadRecord) -> None:
        """Leave out a record that cannot be rendered, or raise :class:`UserError`."""
        self.records.refuse(read.place, error)
        self._counts.add(read.number, {"bad": 1})

    @abstractmethod
    def add(self, read: ReadRecord[R], rendered: Rendered) -> dict[str, int]:
        """Store the examples of a rendered record.

        Returns:
            Counts for the :class:`Audit`.
        """

    @abstractmethod
    def row_width(self, max_length: int) -> int:
        """Return the number of tokens in a row."""

    @abstractmethod
    def fit(self, split: Split, max_length: int) -> Fitted:
        """Choose the examples of a split that become rows, and truncate them if need be."""

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split; see :class:`EncodedSource`."""
        is_selected = self.records.is_in(split)
        readable = int((is_selected & self.records.is_readable).sum())
        audit = Audit(
            unit=self.unit,
            truncates=self.config.overlong == "truncate",
            records=int(is_selected.sum()),
        )
        audit.bad = audit.records - readable
        audit.add(self._counts.total(is_selected))

        fitted = self.fit(split, max_length)
        width = self.row_width(max_length)
        written = write_rows(
            path,
            self.store,
            fitted.examples,
            width,
            packing=self.config.is_packed,
            note=self.digest_note,
        )
        audit.add(fitted.counts)
        audit.rows = written.rows
        audit.positions = written.rows * width
        if split == "train":
            self._check(audit, max_length)
        return SplitStats(
            records=readable,
            rows=written.rows,
            targets=audit.targets,
            bytes=fitted.target_bytes,
            sha256=written.sha256,
            audit=audit,
            pairs=written.pairs,
        )

    def _check(self, audit: Audit, max_length: int) -> None:
        """Raise :class:`UserError` if there is nothing to train on.

        Args:
            audit: the counts of the training data.
            max_length: the value of ``--max_length``.
        """
        name = self.records.source.name
        lengths = self.lengths("train")
        if self.config.overlong == "drop":
            check_not_all_overlong(lengths, name, self.unit, max_length)
        overlong = describe_overlong(lengths, max_length)
        audit.check(name, overlong, self.records.first_fault)
