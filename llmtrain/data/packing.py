"""Rows of tokens on disk, as memory-mapped Arrow files, which ``datasets`` can read, too.

Documents of any length are packed into rows of one length, with as little padding as possible and
without splitting a document. A packed row holds complete documents one after the other. Their
``position_ids`` restart at each document, which tells attention where a document ends. The first
label of each document is -100, because its first token has no context.

A row of preference data holds complete pairs of answers. Its column ``answers`` has the code of the
answer that each position belongs to; see :mod:`llmtrain.interfaces.answer_codes`.

An unpacked row holds one document, or a pair with each answer in half of the row. Its column
``lengths`` has the number of tokens in the row, or in each half. The rest is padding.

The second answer of a pair may share the prompt of the first. Then its ``position_ids`` continue
those of the prompt, and its first token is a copy of the last token of the prompt.
"""

import array
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from llmtrain.interfaces.answer_codes import PADDING, answer_code
from llmtrain.interfaces.batches import IGNORED

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
        overlong: documents or pairs that were dropped or truncated, as ``--overlong`` says.
        lost: tokens of these that were dropped or cut off.
        kept: documents or pairs that are in the rows.
        tokens: tokens of the documents or pairs that are kept.
        rows: rows that were written.
        places: positions of these rows, with padding.
    """

    bad: int = 0
    overlong: int = 0
    lost: int = 0
    kept: int = 0
    tokens: int = 0
    rows: int = 0
    places: int = 0

    def describe_overlong(self, overlong: str) -> str:
        """Return how many documents or pairs are overlong, and how many tokens that has cost.

        Args:
            overlong: the value of ``--overlong``.
        """
        if not self.overlong:
            return "0 overlong"
        outcome = {"drop": "dropped", "truncate": "truncated", "error": ""}[overlong]
        share = self.lost / (self.tokens + self.lost)
        return f"{self.overlong:,} overlong {outcome} ({share:.1%} of the tokens)"


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


class _Part(NamedTuple):
    """Tokens of one document that are contiguous in a row.

    Attributes:
        tokens: int32 [n], as they are stored.
        first_position: the position id of the first token.
        answer: the code of the answer; 0 for a conversation.
    """

    tokens: np.ndarray
    first_position: int
    answer: int


@dataclass
class Examples:
    """The tokens of a :class:`TokenStore` that go to the rows, example by example.

    An example is a conversation or a pair of answers. It has one or two parts. Each part is a
    stretch of a stored document, and its position ids begin at ``starts``.

    Attributes:
        documents: int64 [examples, parts], the number of the document of each part.
        starts: int64 [examples, parts], its first token that is written.
        stops: int64 [examples, parts], the token after the last one.
        is_first_desirable: bool [examples], whether the first answer of each pair is desirable;
            ``None`` for conversations.
    """

    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    is_first_desirable: np.ndarray | None = None

    @classmethod
    def of_documents(cls, documents: np.ndarray, lengths: np.ndarray) -> "Examples":
        """Return examples that have one part each.

        Args:
            documents: int64 [examples], the number of each document in the store.
            lengths: int64 [examples], how many of its tokens are written.
        """
        return cls(
            documents=documents[:, None],
            starts=np.zeros((len(documents), 1), np.int64),
            stops=lengths[:, None],
        )

    def __len__(self) -> int:
        return len(self.documents)

    @property
    def are_pairs(self) -> bool:
        """Whether the examples are pairs of answers."""
        return self.is_first_desirable is not None

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each example, int64 [examples]."""
        lengths: np.ndarray = (self.stops - self.starts).sum(axis=1)
        return lengths


class WrittenRows(NamedTuple):
    """Rows that were written.

    Attributes:
        rows: how many there are.
        pairs: the largest number of pairs in a row; 0 for conversations.
        digest: a hash of the tokens, of their loss mask and of how they became rows.
    """

    rows: int
    pairs: int
    digest: "hashlib._Hash"


class TokenStore:
    """Documents of tokens in a temporary file, until it is decided which of them share a row.

    A token that is not a target is stored as its bitwise complement, which is negative.

    Args:
        path: the file. It is deleted when the store is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._ends = array.array("q")  # the index in the file after each document

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Add a document.

        Args:
            ids: int32 [n], the tokens.
            loss_mask: bool [n], whether each token is a target.
        """
        self._file.write(np.where(loss_mask, ids, ~ids).astype(np.int32).tobytes())
        begin = self._ends[-1] if self._ends else 0
        self._ends.append(begin + len(ids))

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each document, int64 [documents]."""
        return np.diff(np.array(self._ends, np.int64), prepend=0)

    def read(self, document: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a document, int32 [n], and its loss mask, bool [n]."""
        self._file.flush()
        begin = self._ends[document - 1] if document else 0
        count = self._ends[document] - begin
        tokens = np.fromfile(self._path, np.int32, count, offset=begin * 4)
        return np.maximum(tokens, ~tokens), tokens >= 0

    def write_rows(self, path: Path, examples: Examples, width: int, packing: bool) -> WrittenRows:
        """Write examples as rows.

        Args:
            path: the file to write.
            examples: the tokens to write.
            width: the number of tokens in a row.
            packing: pack several examples into a row. Otherwise each conversation gets a row of its
                own, and each answer of a pair half a row.
        """
        self._file.flush()
        writer = _RowWriter(self._path, self._ends, examples, width, packing)
        return writer.write(path)


class _RowWriter:
    """Writes examples as rows; see :meth:`TokenStore.write_rows`."""

    def __init__(
        self,
        store: Path,
        ends: Sequence[int],
        examples: Examples,
        width: int,
        packing: bool,
    ) -> None:
        # An empty file cannot be mapped.
        self.stored = np.memmap(store, np.int32, "r") if len(ends) else np.empty(0, np.int32)
        self.ends = ends
        self.examples = examples
        self.width = width
        self.packing = packing

    def write(self, path: Path) -> WrittenRows:
        """Write all rows."""
        if self.packing:
            rows = best_fit(self.examples.lengths, self.width)
        else:
            rows = [[number] for number in range(len(self.examples))]

        columns = PREFERENCE_COLUMNS if self.examples.are_pairs else TOKEN_COLUMNS
        widths = dict.fromkeys(columns, self.width)
        if not self.packing:
            widths.pop("position_ids")  # a row with one document needs none
            widths[LENGTHS] = 2 if self.examples.are_pairs else 1

        with create_row_file(path, widths) as write:
            count = max(TOKENS_PER_BATCH // self.width, 1)
            for start in range(0, len(rows), count):
                write(self._columns(rows[start : start + count]))

        pairs = max(map(len, rows), default=0) if self.examples.are_pairs else 0
        return WrittenRows(rows=len(rows), pairs=pairs, digest=self._digest())

    def _digest(self) -> "hashlib._Hash":
        """Hash the tokens of all examples, in their order, and how they become rows."""
        digest = hashlib.sha256()
        for number in range(len(self.examples)):
            parts = self._parts(number, number_in_row=0)
            tokens = np.concatenate([part.tokens for part in parts])
            digest.update(np.maximum(tokens, ~tokens).astype("<i4").tobytes())
            digest.update(np.packbits(tokens >= 0).tobytes())
            if self.examples.is_first_desirable is not None:
                first, second = parts
                is_desirable = bool(self.examples.is_first_desirable[number])
                digest.update(
                    f"{len(first.tokens)} {second.first_position} {is_desirable}".encode()
                )
        digest.update(f"{self.width} {self.packing}".encode())
        return digest

    def _columns(self, rows: list[list[int]]) -> dict[str, np.ndarray]:
        """Return the columns of some rows, each int32 [rows, width].

        The column ``lengths`` is int32 [rows, 1 or 2]. It is only right if rows are not packed.

        Args:
            rows: the numbers of each row's examples.
        """
        shape = (len(rows), self.width)
        columns = {
            "input_ids": np.full(shape, 0, np.int32),
            "labels": np.full(shape, IGNORED, np.int32),
            "position_ids": np.full(shape, 0, np.int32),
            "answers": np.full(shape, PADDING, np.int32),
            LENGTHS: np.zeros((len(rows), 2 if self.examples.are_pairs else 1), np.int32),
        }
        for i, row in enumerate(rows):
            self._fill_row(row, {name: column[i] for name, column in columns.items()})
        return columns

    def _fill_row(self, row: list[int], columns: dict[str, np.ndarray]) -> None:
        """Lay out the examples of a row, and number the positions of its padding.

        Args:
            row: the numbers of its examples.
            columns: the values of the row in each column, as they are if it is all padding.
        """
        half = self.width // 2
        end = 0  # of the tokens in the row so far
        for number_in_row, example in enumerate(row):
            for part_number, part in enumerate(self._parts(example, number_in_row)):
                is_second_half = part_number == 1 and not self.packing
                start = half if is_second_half else end
                end = start + len(part.tokens)
                columns[LENGTHS][part_number] = len(part.tokens)
                _fill_part(part, {name: column[start:end] for name, column in columns.items()})

        # Padding is a document of its own, or several if it is longer than any document may be.
        longest = half if self.examples.are_pairs else self.width
        columns["position_ids"][end:] = np.arange(self.width - end) % longest

    def _parts(self, example: int, number_in_row: int) -> list[_Part]:
        """Return the parts of an example: the two answers of a pair, or one conversation."""
        parts = []
        documents = self.examples.documents[example].tolist()
        starts = self.examples.starts[example].tolist()
        stops = self.examples.stops[example].tolist()
        for i, document in enumerate(documents):
            begin = self.ends[document - 1] if document else 0
            tokens = self.stored[begin + starts[i] : begin + stops[i]]
            code = 0
            if self.examples.is_first_desirable is not None:
                code = answer_code(
                    pair=number_in_row,
                    is_second=i == 1,
                    is_undesirable=not self.examples.is_first_desirable[example],
                )
            parts.append(_Part(tokens, first_position=starts[i], answer=code))
        return parts


def _fill_part(part: _Part, columns: dict[str, np.ndarray]) -> None:
    """Write the tokens of a part to its stretch of a row, by column."""
    columns["input_ids"][:] = np.maximum(part.tokens, ~part.tokens)
    columns["labels"][:] = np.where(part.tokens < 0, IGNORED, part.tokens)
    columns["labels"][:1] = IGNORED  # nothing in the part predicts its first token
    columns["position_ids"][:] = part.first_position + np.arange(len(part.tokens))
    columns["answers"][:] = part.answer
