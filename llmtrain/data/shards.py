"""Shards: files of rows, whose blocks are compared with their hashes when they are first read.

A shard is a safetensors file with a tensor [rows, ...] for each column, so any program can read it.
Its hashes are in the manifest of its set. A token or a position takes 16 bits if all of them fit,
else 32. The label -100 is stored modulo 2**16 or 2**32.
"""

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from llmtrain.errors import DamagedRowsError
from llmtrain.files import ABSENCES, JsonObject, errors_name, json_text, read_hashed, read_patiently
from llmtrain.interfaces.batches import IGNORED

BLOCK_BYTES = 1 << 20
# A shard has so many records, or so much text, whichever comes first.
SHARD_RECORDS = 100_000
SHARD_BYTES = 1 << 28
# The dtypes of columns, as safetensors names them.
_SAFETENSORS_DTYPES = {
    "uint16": "U16",
    "uint32": "U32",
    "int32": "I32",
    "float16": "F16",
    "float32": "F32",
}

RowWriter: TypeAlias = Callable[[Mapping[str, np.ndarray]], None]


def shards_of(text_bytes: np.ndarray, scale: int = 1) -> list[range]:
    """Divide records into shards of 100,000 records or 256 MiB, whichever comes first.

    Args:
        text_bytes: float64 [records], the size of each.
        scale: make shards so many times smaller.
    """
    most_records = max(SHARD_RECORDS // scale, 1)
    shards = []
    start = 0
    before = np.cumsum(text_bytes) - text_bytes  # bytes before each record
    while start < len(before):
        # Bytes of the shard before each record that it may have.
        sizes = before[start : start + most_records] - before[start]
        stop = start + int(np.searchsorted(sizes, SHARD_BYTES / scale))
        shards.append(range(start, stop))
        start = stop
    return shards


class Column(NamedTuple):
    """What a row has in a column.

    Attributes:
        dtype: the dtype in the file.
        shape: of the values of a row: ``[length]``, or ``[length, k]``.
    """

    dtype: str
    shape: Sequence[int]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


def token_dtype(count: int) -> str:
    """Return the smallest dtype that holds ``range(count)`` and -100."""
    return "uint16" if count <= IGNORED % (1 << 16) else "uint32"


class Rows(Protocol):
    """Rows that can be read in any order."""

    def __len__(self) -> int: ...

    @property
    def columns(self) -> Mapping[str, Column]:
        """What a row has, by the name of the column."""

    def read(self, rows: np.ndarray, only: str | None = None) -> dict[str, np.ndarray]:
        """Return rows by column, [n, ...], given their numbers, int64 [n].

        Args:
            rows: the numbers.
            only: the name of a column, to read no others.
        """


class ArrayRows:
    """Rows in memory, or in memory-mapped arrays.

    Args:
        arrays: arrays [rows, ...], by name.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    @property
    def columns(self) -> Mapping[str, Column]:
        """What a row has; see :class:`Rows`."""
        return {name: Column(str(a.dtype), a.shape[1:]) for name, a in self.arrays.items()}

    def read(self, rows: np.ndarray, only: str | None = None) -> dict[str, np.ndarray]:
        """Return rows by column; see :class:`Rows`."""
        return {name: a[rows] for name, a in self.arrays.items() if only in (None, name)}


class TokenRows:
    """The rows of several shards, one after the other.

    Args:
        shards: the shards, which have the same columns.

    Attributes:
        shard_rows: the number of rows of each shard.
    """

    def __init__(self, shards: Sequence[Rows]) -> None:
        self.shards = shards
        self.shard_rows = [len(shard) for shard in shards]
        self._ends = np.cumsum(self.shard_rows)

    def __len__(self) -> int:
        return sum(self.shard_rows)

    def __getitem__(self, row: int) -> dict[str, list[Any]]:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}")  # which ends a loop over the rows
        columns = self.read(np.array([row]))
        return {name: column[0].tolist() for name, column in columns.items()}

    @functools.cached_property
    def columns(self) -> Mapping[str, Column]:
        """What a row has; see :class:`Rows`."""
        return self.shards[0].columns if self.shards else {}

    @functools.cached_property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return [*self.columns]

    def read(self, rows: np.ndarray, only: str | None = None) -> dict[str, np.ndarray]:
        """Return rows by column; see :class:`Rows`.

        Shards are read in the order in which their rows are asked for first: those of a window come
        before those of the next one.
        """
        if len(self.shards) == 1:
            return self.shards[0].read(rows, only)
        numbers = np.searchsorted(self._ends, rows, side="right")
        columns: dict[str, np.ndarray] = {}
        for number in dict.fromkeys(numbers.tolist()):
            shard = self.shards[number]
            is_in = numbers == number
            first_row = self._ends[number] - len(shard)
            for name, values in shard.read(rows[is_in] - first_row, only).items():
                if name not in columns:
                    columns[name] = np.empty((len(rows), *values.shape[1:]), values.dtype)
                columns[name][is_in] = values
        return columns

    def column(self, name: str) -> np.ndarray:
        """Return a column of all rows."""
        columns = [shard.read(np.arange(len(shard)), only=name)[name] for shard in self.shards]
        return np.concatenate(columns)

    def with_column(self, name: str, values: np.ndarray) -> "TokenRows":
        """Return the rows with a further column in memory, [rows, ...]."""
        parts = np.split(values, self._ends[:-1])
        return TokenRows(
            [_WithColumn(shard, name, part) for shard, part in zip(self.shards, parts, strict=True)]
        )


class _WithColumn:
    """Rows with a further column [rows, ...]."""

    def __init__(self, rows: Rows, name: str, values: np.ndarray) -> None:
        self.rows = rows
        self.name = name
        self.values = values

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def columns(self) -> Mapping[str, Column]:
        values = ArrayRows({self.name: self.values})
        return {**self.rows.columns, **values.columns}

    def read(self, rows: np.ndarray, only: str | None = None) -> dict[str, np.ndarray]:
        return {**self.rows.read(rows, only), self.name: self.values[rows]}


class CheckedFile:
    """A file whose blocks of 1 MiB are compared with their hashes when they are first read.

    Args:
        path: the file.
        blocks: the sha256 of each block, in hexadecimal digits.
    """

    def __init__(self, path: Path, blocks: Sequence[str]) -> None:
        self.path = path
        self.blocks = blocks
        self._is_checked = np.zeros(len(blocks), bool)

    @classmethod
    def of(cls, folder: Path, facts: JsonObject) -> "CheckedFile":
        """Return a file of a folder, given what :func:`facts_of` returned for it.

        Raises:
            OSError: if the file is absent, or if its size is another one.
        """
        path = folder / Path(facts["file"]).name
        if path.stat().st_size != facts["bytes"]:
            raise OSError(f"{path.name} has another size than its rows")
        return cls(path, facts["blocks"])

    def pieces(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Return pieces of the file, uint8 [n, size], that begin at ``starts``, int64 [n].

        Raises:
            DamagedRowsError: if a block differs from its hash, or if the file is gone.
            UserError: if the disk fails.
        """
        try:
            return read_patiently(self.path, lambda: self._pieces(starts, size))
        except (*ABSENCES, PermissionError) as error:
            raise DamagedRowsError(f"{self.path}: {error.strerror}; put the file back.") from None

    def check(self) -> None:
        """Compare all blocks with their hashes; see :meth:`pieces`."""
        self.pieces(np.arange(len(self.blocks)) * BLOCK_BYTES, size=0)

    def _pieces(self, starts: np.ndarray, size: int) -> np.ndarray:
        pieces = np.empty((len(starts), size), np.uint8)
        with self.path.open("rb", buffering=0) as file:
            for piece, start in zip(pieces, starts.tolist(), strict=True):
                first_block = start // BLOCK_BYTES
                last_block = max(start + size - 1, start) // BLOCK_BYTES
                for block in range(first_block, last_block + 1):
                    self._check_block(file.fileno(), block)
                content = os.pread(file.fileno(), size, start)
                if len(content) < size:
                    raise DamagedRowsError(f"{self.path} has become shorter; put the file back.")
                piece[:] = np.frombuffer(content, np.uint8)
        return pieces

    def _check_block(self, handle: int, block: int) -> None:
        if self._is_checked[block]:
            return
        content = os.pread(handle, BLOCK_BYTES, block * BLOCK_BYTES)
        if hashlib.sha256(content).hexdigest() != self.blocks[block]:
            raise DamagedRowsError(
                f"{self.path} differs from its hash in the MiB from byte {block * BLOCK_BYTES:,}; "
                "copy or make it again."
            )
        self._is_checked[block] = True


# Opens the file of a shard, given its folder and its facts.
FileOpener: TypeAlias = Callable[[Path, JsonObject], CheckedFile]


class Shard:
    """The rows of a file in a folder.

    Args:
        folder: the folder.
        facts: what :func:`facts_of` returned for the file.
        open_file: opens the file.

    Raises:
        OSError: if the file is absent, or if its size is another one.
    """

    def __init__(
        self, folder: Path, facts: JsonObject, open_file: FileOpener = CheckedFile.of
    ) -> None:
        self.file = open_file(folder, facts)
        self.rows: int = facts["rows"]
        self.columns = {name: Column(*column) for name, column in facts["columns"].items()}
        # The header comes before the columns.
        self._first_byte = len(_header(self.columns, self.rows))
        columns_bytes = self.rows * sum(column.row_bytes for column in self.columns.values())
        blocks = -(-facts["bytes"] // BLOCK_BYTES)
        is_possible = facts["bytes"] == self._first_byte + columns_bytes
        is_possible = is_possible and len(facts["blocks"]) == blocks
        if not is_possible:
            raise OSError(f"{self.file.path.name} has another size than its rows")

    def __len__(self) -> int:
        return self.rows

    def read(self, rows: np.ndarray, only: str | None = None) -> dict[str, np.ndarray]:
        """Return rows by column; see :class:`Rows`."""
        columns = {}
        first_byte = self._first_byte
        for name, column in self.columns.items():
            column_byte = first_byte
            first_byte += self.rows * column.row_bytes
            if only not in (None, name):
                continue
            pieces = self.file.pieces(column_byte + rows * column.row_bytes, column.row_bytes)
            values = pieces.view(np.dtype(column.dtype).newbyteorder("<"))
            values = values.reshape(len(rows), *column.shape)
            if values.dtype.kind == "u":
                is_ignored = values == IGNORED % (1 << 8 * values.itemsize)
                values = values.astype(np.int32)
                values[is_ignored] = IGNORED
            columns[name] = values
        return columns


@contextlib.contextmanager
def create_shard(path: Path, columns: Mapping[str, Column], rows: int) -> Iterator[RowWriter]:
    """Create a file of rows, and yield a function that appends rows to it.

    The function takes the values of each column, [n, ...], by the column's name.

    Args:
        path: the file.
        columns: the columns.
        rows: the number of rows that will be written.
    """
    header = _header(columns, rows)
    next_byte = {}  # of each column
    first_byte = len(header)
    for name, column in columns.items():
        next_byte[name] = first_byte
        first_byte += rows * column.row_bytes

    with errors_name(path), path.open("wb") as file:
        file.write(header)

        def write(values: Mapping[str, np.ndarray]) -> None:
            for name, column in columns.items():
                stored = values[name].astype(np.dtype(column.dtype).newbyteorder("<"), order="C")
                file.seek(next_byte[name])
                next_byte[name] += file.write(stored.tobytes())

        yield write


def _header(columns: Mapping[str, Column], rows: int) -> bytes:
    """Return the beginning of a safetensors file: the length of a JSON object, and the object."""
    header = {}
    first_byte = 0
    for name, column in columns.items():
        stop = first_byte + rows * column.row_bytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[column.dtype],
            "shape": [rows, *column.shape],
            "data_offsets": [first_byte, stop],
        }
        first_byte = stop
    header_text = json_text(header).encode()
    header_text = header_text.ljust(-(-len(header_text) // 8) * 8)
    return len(header_text).to_bytes(8, "little") + header_text


def block_hashes(path: Path) -> list[str]:
    """Read a file, and return the hash of each block of 1 MiB."""
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, BLOCK_BYTES), b"")
        return [hashlib.sha256(block).hexdigest() for block in blocks]


def facts_of(path: Path) -> JsonObject:
    """Return the name, size and hashes of a shard, with the number of its rows and its columns."""
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    dtypes = {name: dtype for dtype, name in _SAFETENSORS_DTYPES.items()}
    columns = {name: [dtypes[entry["dtype"]], entry["shape"][1:]] for name, entry in header.items()}
    return {
        "file": path.name,
        **read_hashed(path),
        "blocks": block_hashes(path),
        "rows": next(iter(header.values()))["shape"][0],
        "columns": columns,
    }
