"""Rows of tokens on disk, as memory-mapped Arrow files, which ``datasets`` can read, too.

Documents of any length are packed into rows of one length, with as little padding as possible and
without splitting a document. A packed row holds complete documents one after the other. Their
``position_ids`` restart at each document, which tells attention where a document ends. The first
label of each document is -100, because its first token has no context.

A row of preference data holds complete pairs of answers. Its column ``answers`` says to which
answer each position belongs:

- ``4 * k`` for the first answer of pair ``k`` of the row,
- ``4 * k + 1`` for its second answer,
- 2 more if the first answer is undesirable,
- -1 for padding.

An unpacked row holds one document, or a pair with each answer in half of the row. Its column
``lengths`` has the number of tokens in the row, or in each half. The rest is padding.

The second answer of a pair may share the prompt of the first. Then its ``position_ids`` continue
those of the prompt, and its first token is a copy of the last token of the prompt.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from llmtrain.types import IGNORED

if TYPE_CHECKING:
    import datasets
    import pyarrow

Split: TypeAlias = Literal["train", "eval"]
Rows: TypeAlias = "TokenRows | datasets.Dataset"
RowWriter: TypeAlias = Callable[[Mapping[str, np.ndarray]], None]

# Unpacked rows have the column `lengths` instead of the last one.
TOKEN_COLUMNS = ["input_ids", "labels", "position_ids"]
PREFERENCE_COLUMNS = ["input_ids", "labels", "answers", "position_ids"]
LENGTHS = "lengths"
# The tokens that are written at a time: 16 MiB for each column. A reader needs some kilobytes for
# each batch.
TOKENS_PER_BATCH = 1 << 22


@dataclass
class Counts:
    """Counts of the records in one split of a source.

    Attributes:
        bad: records that ``--on_bad_row skip`` has left out.
        overlong: records that were dropped or truncated, as ``--overlong`` says.
        kept: documents or pairs that are in the rows.
        tokens: tokens of the documents or pairs that are kept.
        rows: rows that were written.
        places: positions of these rows, with padding.
    """

    bad: int = 0
    overlong: int = 0
    kept: int = 0
    tokens: int = 0
    rows: int = 0
    places: int = 0


class SplitStats(NamedTuple):
    """Counts and the hash of the rows that were written for one split of a source.

    Attributes:
        documents: documents or conversations.
        rows: rows.
        targets: target tokens.
        bytes: UTF-8 bytes of the target tokens' text.
        sha256: a hex digest of the tokens.
        audit: counts of the conversations or pairs; ``None`` for text.
        pairs: the largest number of pairs in a row; 0 unless the rows hold preference data.
    """

    documents: int
    rows: int
    targets: int
    bytes: int
    sha256: str
    audit: Counts | None = None
    pairs: int = 0


@contextlib.contextmanager
def create_row_file(path: Path, widths: Mapping[str, int]) -> Iterator[RowWriter]:
    """Create a file of rows, and yield a function that appends rows to it.

    The function takes the values of each column, int32 [rows, width], by the column's name.

    Args:
        path: the file.
        widths: the number of values that a row has in each column, by the column's name.
    """
    import pyarrow

    list_types = {name: pyarrow.list_(pyarrow.int32(), width) for name, width in widths.items()}
    schema = pyarrow.schema([*list_types.items()])

    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write(values: Mapping[str, np.ndarray]) -> None:
            arrays = []
            for name, list_type in list_types.items():
                flat = np.ascontiguousarray(values[name], np.int32).ravel()
                arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=list_type))
            writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))

        yield write


class TokenRows:
    """Rows of tokens: columns of integer lists. All lists of a column have the same length.

    A run reads them without ``datasets``, whose import would take half a second at every start.
    """

    def __init__(self, data: "pyarrow.Table") -> None:
        self.data = data
        self.column_names: list[str] = data.column_names

    @classmethod
    def open(cls, paths: Sequence[Path]) -> "TokenRows":
        """Map the rows of several files into memory, one file after the other.

        Raises:
            OSError: if a file is damaged or absent.
            ValueError: if a file is damaged.
        """
        import pyarrow

        streams = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) for path in paths]
        return cls(pyarrow.concat_tables(stream.read_all() for stream in streams))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return dict(self.data.slice(row, 1).to_pylist()[0])

    @property
    def dataset(self) -> "datasets.Dataset":
        """The rows as a ``datasets.Dataset``."""
        import datasets
        from datasets.fingerprint import generate_random_fingerprint

        table = datasets.table.InMemoryTable(self.data)
        return datasets.Dataset(table, fingerprint=generate_random_fingerprint())


def as_matrices(column: "pyarrow.ChunkedArray") -> list[np.ndarray]:
    """Return the chunks of a column of lists, each as an array [rows, length], without a copy."""
    matrices = []
    for chunk in column.chunks:
        if len(chunk):
            values = np.from_dlpack(chunk.flatten())  # to_numpy() would import pandas
            matrices.append(values.reshape(len(chunk), -1))
    return matrices


def hash_fraction(text: str) -> float:
    """Hash a text to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Choose which documents share a row, by best-fit decreasing (Johnson 1973).

    The documents are placed from the longest to the shortest. Each goes into the row with the least
    room that holds it. For language models see Ding et al. 2024, arXiv:2404.10830.

    Args:
        lengths: int [documents], each from 1 to ``capacity``.
        capacity: the number of tokens in a row.

    Returns:
        The numbers of each row's documents, in ascending order.
    """
    rows: list[list[int]] = []
    rows_by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    rooms = 0  # bit r is set if there is a row with room for exactly r more tokens

    for document in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[document])
        fitting = rooms >> length
        if fitting:
            lowest_bit = (fitting & -fitting).bit_length() - 1
            room = length + lowest_bit
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(document)
        else:
            room = capacity
            row = len(rows)
            rows.append([document])

        room_left = room - length
        rows_by_room[room_left].append(row)
        rooms |= 1 << room_left
    return [sorted(row) for row in rows]


class SecondAnswer(NamedTuple):
    """The second answer of a pair, whose tokens are stored after those of the first.

    Attributes:
        start: the index of its first token.
        position: the position id of its first token.
        is_first_desirable: whether the first answer is desirable.
    """

    start: int
    position: int
    is_first_desirable: bool


class _Part(NamedTuple):
    """Stored tokens that are contiguous in a row and have ascending positions.

    Attributes:
        tokens: int32 [n], as they are stored.
        first_position: the position id of the first token.
        answer: the value in the column ``answers``.
    """

    tokens: np.ndarray
    first_position: int
    answer: int


class TokenStore:
    """Documents of tokens, or pairs, kept in a file until it is decided which of them share a row.

    A token that is not a target is stored as its bitwise complement, which is negative.

    Attributes:
        lengths: the number of tokens of each document or pair.
        seconds: the second answer of each pair; empty if the store holds documents.
        pairs: the largest number of pairs in a row, once the rows are written.
        digest: a hash of the content, and later also of how it became rows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.with_suffix(".tokens")
        self._file = self._path.open("wb")
        self.lengths: list[int] = []
        self.seconds: list[SecondAnswer] = []
        self.pairs = 0
        self.digest = hashlib.sha256()

    def add(
        self, ids: np.ndarray, loss_mask: np.ndarray, second: SecondAnswer | None = None
    ) -> None:
        """Add a document or a pair.

        Args:
            ids: int32 [n], the tokens.
            loss_mask: bool [n], whether each token is a target.
            second: the second answer of a pair.
        """
        self._file.write(np.where(loss_mask, ids, ~ids).astype(np.int32).tobytes())
        self.digest.update(ids.astype("<i4").tobytes() + np.packbits(loss_mask).tobytes())
        self.lengths.append(len(ids))
        if second is not None:
            self.seconds.append(second)
            self.digest.update(" ".join(map(str, second)).encode())

    def write_rows(self, path: Path, width: int, packing: bool) -> int:
        """Write all documents as rows, and delete the file of the store.

        Args:
            path: the file to write.
            width: the number of tokens in a row.
            packing: pack several documents or pairs into a row. Otherwise each document gets a row
                of its own, and each answer of a pair half a row.

        Returns:
            The number of rows.
        """
        self._file.close()
        if packing:
            rows = best_fit(np.array(self.lengths, np.int64), width)
        else:
            rows = [[i] for i in range(len(self.lengths))]

        columns = PREFERENCE_COLUMNS if self.seconds else TOKEN_COLUMNS
        widths = dict.fromkeys(columns, width)
        if not packing:
            widths.pop("position_ids")  # a row with one document needs none
            widths[LENGTHS] = 2 if self.seconds else 1
        if self.seconds:
            self.pairs = max(map(len, rows), default=0)

        with create_row_file(path, widths) as write:
            count = max(TOKENS_PER_BATCH // width, 1)
            for start in range(0, len(rows), count):
                write(self._columns(rows[start : start + count], width, packing))
        self._path.unlink()
        self.digest.update(f"{width} {packing}".encode())
        return len(rows)

    def _columns(self, rows: list[list[int]], width: int, packing: bool) -> dict[str, np.ndarray]:
        """Return the columns of some rows, each int32 [rows, width].

        The column ``lengths`` is int32 [rows, 1 or 2]. It is only right if rows are not packed.

        Args:
            rows: the numbers of each row's documents.
            width: the number of tokens in a row.
            packing: whether rows are packed; see :meth:`write_rows`.
        """
        stored = np.memmap(self._path, np.int32, "r")
        ends = np.cumsum(self.lengths)
        half = width // 2
        longest = half if self.seconds else width  # of a document

        shape = (len(rows), width)
        ids = np.full(shape, 0, np.int32)
        labels = np.full(shape, IGNORED, np.int32)
        positions = np.full(shape, 0, np.int32)
        answers = np.full(shape, -1, np.int32)
        lengths = np.zeros((len(rows), 2 if self.seconds else 1), np.int32)
        for i, documents in enumerate(rows):
            end = 0  # of the tokens in the row so far
            for number, document in enumerate(documents):
                tokens = stored[ends[document] - self.lengths[document] : ends[document]]
                for part_number, part in enumerate(self._parts(document, number, tokens)):
                    is_second_half = part_number == 1 and not packing
                    start = half if is_second_half else end
                    end = start + len(part.tokens)
                    lengths[i, part_number] = len(part.tokens)

                    ids[i, start:end] = np.maximum(part.tokens, ~part.tokens)
                    labels[i, start:end] = np.where(part.tokens < 0, IGNORED, part.tokens)
                    labels[i, start : min(start + 1, end)] = IGNORED
                    end_position = part.first_position + len(part.tokens)
                    positions[i, start:end] = np.arange(part.first_position, end_position)
                    answers[i, start:end] = part.answer
            # Padding is a document of its own, or several if it is longer than any document may be.
            positions[i, end:] = np.arange(width - end) % longest
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "answers": answers,
            LENGTHS: lengths,
        }

    def _parts(self, document: int, number_in_row: int, tokens: np.ndarray) -> list[_Part]:
        """Divide the stored tokens of a pair into its two answers; a document has one part."""
        if not self.seconds:
            return [_Part(tokens, first_position=0, answer=0)]

        second = self.seconds[document]
        answer = 4 * number_in_row + (0 if second.is_first_desirable else 2)
        return [
            _Part(tokens[: second.start], first_position=0, answer=answer),
            _Part(tokens[second.start :], first_position=second.position, answer=answer + 1),
        ]
