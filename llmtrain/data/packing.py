"""Rows of tokens on the disk, as memory-mapped Arrow files, which ``datasets`` reads too.

Documents of any length become packed rows of one length with as little padding as can be, and no document is split.
A packed row holds whole documents one after the other. ``position_ids`` restart at each, which is how attention knows
where one ends; the first label of each is -100, since nothing before it belongs to it.

Of answers that are judged a row holds whole pairs, and ``answers`` says which a place belongs to: 4 k for the first of
the k-th pair, 4 k + 1 for the second, 2 more where the first is undesirable, -1 for padding. The second may go on from
the first's prompt: its ``position_ids`` then begin where that ends, and its first token is the last of the prompt.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

from llmtrain.types import IGNORED

if TYPE_CHECKING:
    import datasets
    import pyarrow

Rows: TypeAlias = "TokenRows | datasets.Dataset"
COLUMNS = ["input_ids", "labels", "position_ids"]
JUDGED = ["input_ids", "labels", "answers", "position_ids"]
TOKENS_PER_BATCH = (
    1 << 22
)  # written at a time: 16 MiB a column. Readers hold some kilobytes for each batch


@dataclass
class Counts:
    """Counts of what has become of one side's records, of whatever kind they are."""

    bad: int = 0  # records left out, with --on_bad_row skip
    overlong: int = 0  # dropped, or truncated, as --overlong says
    kept: int = 0
    tokens: int = 0  # of what is kept
    rows: int = 0
    places: int = 0  # of all rows, filled or not


class Written(NamedTuple):
    """One side of a source: the rows to train on, or those held out."""

    documents: int
    rows: int
    targets: int  # tokens that are trained on, or counted in an evaluation
    bytes: int  # of the targets' text in UTF-8
    sha256: str  # of the tokens
    audit: Counts | None = None  # of conversations, or of pairs
    pairs: int = 0  # that a row has, at most


@contextlib.contextmanager
def row_table(path: Path, columns: Sequence[str], width: int) -> Iterator[Callable[..., None]]:
    """Open a new file, and yield a function that appends rows to it: of each column an int32 [rows, width]."""
    import pyarrow

    kind = pyarrow.list_(pyarrow.int32(), width)
    schema = pyarrow.schema([(name, kind) for name in columns])

    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write(*values: np.ndarray) -> None:
            flat = [np.ascontiguousarray(value, np.int32).ravel() for value in values]
            arrays = [pyarrow.FixedSizeListArray.from_arrays(value, type=kind) for value in flat]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))

        yield write


class TokenRows:
    """Rows of tokens: columns of integer lists of one length.

    A run reads them without ``datasets``, whose import would cost every start half a second.
    """

    def __init__(self, data: "pyarrow.Table") -> None:
        self.data = data
        self.column_names: list[str] = data.column_names

    @classmethod
    def open(cls, paths: Sequence[Path]) -> "TokenRows":
        """Map the rows of files, one after the other. Raises ``OSError`` or ``ValueError`` where one is damaged."""
        import pyarrow

        streams = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) for path in paths]
        return cls(pyarrow.concat_tables(stream.read_all() for stream in streams))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return dict(self.data.slice(row, 1).to_pylist()[0])

    @property
    def dataset(self) -> "datasets.Dataset":
        """A ``datasets.Dataset`` of the rows."""
        import datasets
        from datasets.fingerprint import generate_random_fingerprint

        return datasets.Dataset(
            datasets.table.InMemoryTable(self.data), fingerprint=generate_random_fingerprint()
        )


def as_matrices(column: "pyarrow.ChunkedArray") -> list[np.ndarray]:
    """Return the chunks of a column of lists of one length, each as [rows, length], without a copy."""
    # not by to_numpy(), which imports pandas
    return [
        np.from_dlpack(chunk.flatten()).reshape(len(chunk), -1)
        for chunk in column.chunks
        if len(chunk)
    ]


def hash_place(text: str) -> float:
    """Return the place of a text in [0, 1), which its content alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Return which documents share a row, by best-fit decreasing (Johnson 1973).

    The longest document that waits goes where the least room is left that holds it. For language models: Ding et al.
    2024, arXiv:2404.10830.

    Args:
        lengths: int [documents], each from 1 to ``capacity``.
    Returns:
        A list of document numbers a row, in their own order.
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows with so many places left
    rooms = 0  # bit r is set where by_room[r] is not empty
    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            rooms &= ~(int(not by_room[room]) << room)
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        left = room - length
        by_room[left].append(row)
        rooms |= 1 << left
    return [sorted(row) for row in rows]


class Second(NamedTuple):
    """The second answer of a pair, whose tokens stand behind the first's."""

    at: int  # where they begin
    position: int  # of the first of them
    desirable: bool  # the first answer


class TokenStore:
    """Documents of tokens, or pairs of them, kept in a file while it is not known which of them share a row.

    A token that is not trained is kept as its complement, which is below zero.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".tokens")
        self._file = self._path.open("wb")
        self.lengths: list[int] = []
        self.seconds: list[Second] = []  # where documents are pairs
        self.pairs = 0  # of the row that has most
        self.digest = hashlib.sha256()  # of what is stored, and then of how it became rows

    def add(self, ids: np.ndarray, trained: np.ndarray, second: Second | None = None) -> None:
        """Add a document, or a pair: its tokens, and of each whether it is trained."""
        self._file.write(np.where(trained, ids, ~ids).astype(np.int32).tobytes())
        self.digest.update(ids.astype("<i4").tobytes() + np.packbits(trained).tobytes())
        self.lengths.append(len(ids))
        if second is not None:
            self.seconds.append(second)
            self.digest.update(" ".join(map(str, second)).encode())

    def write_rows(self, path: Path, width: int, packing: bool) -> int:
        """Write all documents as rows of ``width`` tokens, drop the file, and return the number of rows.

        Without ``packing`` a document has a row to itself, and each answer of a pair half of one.
        """
        self._file.close()
        rows = (
            best_fit(np.array(self.lengths, np.int64), width)
            if packing
            else [[i] for i in range(len(self.lengths))]
        )
        columns = JUDGED if self.seconds else COLUMNS
        columns = (
            columns if packing else columns[:-1]
        )  # alone in its row a document needs no position_ids
        self.pairs = max(map(len, rows), default=0) if self.seconds else 0
        with row_table(path, columns, width) as write:
            count = max(TOKENS_PER_BATCH // width, 1)
            for start in range(0, len(rows), count):
                filled = self._filled(rows[start : start + count], width, packing)
                write(*(filled[name] for name in columns))
        self._path.unlink()
        self.digest.update(f"{width} {packing}".encode())
        return len(rows)

    def _filled(self, rows: list[list[int]], width: int, packing: bool) -> dict[str, np.ndarray]:
        stored = np.memmap(self._path, np.int32, "r")
        ends = np.cumsum(self.lengths)
        shape, longest = (len(rows), width), width // 2 if self.seconds else width
        ids, labels, positions, answers = (
            np.full(shape, empty, np.int32) for empty in (0, IGNORED, 0, -1)
        )
        for i, documents in enumerate(rows):
            at = 0
            for number, document in enumerate(documents):
                tokens = stored[ends[document] - self.lengths[document] : ends[document]]
                second = self.seconds[document] if self.seconds else Second(len(tokens), 0, True)
                code = 4 * number + 2 * (not second.desirable)
                for part, first, which in (
                    (tokens[: second.at], 0, 0),
                    (tokens[second.at :], second.position, 1),
                ):
                    at = width // 2 if which and not packing else at
                    here = slice(at, at + len(part))
                    ids[i, here] = np.maximum(part, ~part)
                    labels[i, here] = np.where(part < 0, IGNORED, part)
                    labels[i, at : at + bool(len(part))] = IGNORED
                    positions[i, here] = np.arange(first, first + len(part))
                    answers[i, here] = code + which
                    at = here.stop
            positions[i, at:] = (
                np.arange(width - at) % longest
            )  # padding is a document of its own, or two
        return {"input_ids": ids, "labels": labels, "position_ids": positions, "answers": answers}
