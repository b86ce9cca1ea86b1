"""Token sequences in a temporary file, and rows of tokens in memory-mapped Arrow files.

``datasets`` can read the files of rows, too.
"""

import array
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import datasets
    import pyarrow

Rows: TypeAlias = "TokenRows | datasets.Dataset"
RowWriter: TypeAlias = Callable[[Mapping[str, np.ndarray]], None]

# Unpacked rows have the column `lengths` instead of the last one.
TOKEN_COLUMNS = ["input_ids", "labels", "position_ids"]
PREFERENCE_COLUMNS = ["input_ids", "labels", "answers", "position_ids"]
LENGTHS = "lengths"
# The tokens that are written at a time: 16 MiB for each column. A reader needs some kilobytes for
# each batch.
TOKENS_PER_BATCH = 1 << 22


class TokenStore:
    """Token sequences in a temporary file, until it is decided which rows they go to.

    A token that is not a target is stored as its bitwise complement, which is negative.

    Args:
        path: the file. It is deleted when the store is closed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("w+b")
        self._stops = array.array("q")  # the index in the file after each sequence
        self._size = 0

    def __len__(self) -> int:
        return len(self._stops)

    def add(self, ids: np.ndarray, loss_mask: np.ndarray) -> None:
        """Add a sequence.

        Args:
            ids: int32 [n], the tokens.
            loss_mask: bool [n], whether each token is a target.
        """
        self.extend(np.where(loss_mask, ids, ~ids))
        self.end_sequence()

    def extend(self, encoded: np.ndarray) -> None:
        """Add tokens, as they are stored, to the sequence that :meth:`end_sequence` will end."""
        self._file.write(encoded.astype(np.int32, copy=False).tobytes())
        self._size += len(encoded)

    def end_sequence(self) -> None:
        """End a sequence: the next token belongs to another one."""
        self._stops.append(self._size)

    def close(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what is left to write may not fit on the disk
            self._file.close()

    @property
    def stops(self) -> np.ndarray:
        """The index after the last token of each sequence, int64 [sequences]."""
        return np.array(self._stops, np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each sequence, int64 [sequences]."""
        return np.diff(self.stops, prepend=0)

    def read_encoded(self, start: int, stop: int) -> np.ndarray:
        """Return tokens as they are stored, given their indices in the file, int32."""
        self._file.flush()
        size = np.dtype(np.int32).itemsize
        content = os.pread(self._file.fileno(), (stop - start) * size, start * size)
        return np.frombuffer(content, np.int32)

    def read(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a sequence, int32 [n], and its loss mask, bool [n]."""
        start = self._stops[number - 1] if number else 0
        encoded = self.read_encoded(start, self._stops[number])
        return decoded_ids(encoded), encoded >= 0


def decoded_ids(encoded: np.ndarray) -> np.ndarray:
    """Return the tokens behind stored ones, whether they are targets or not."""
    ids: np.ndarray = np.maximum(encoded, ~encoded)
    return ids


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
