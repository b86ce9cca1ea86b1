"""Rows of tokens on the disk, as memory-mapped Arrow files, which ``datasets`` reads too."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    import datasets
    import pyarrow

    from llmtrain.data.conversations import Audit

Rows: TypeAlias = "TokenRows | datasets.Dataset"
TOKENS_PER_BATCH = 1 << 22  # written at a time: 16 MiB a column. Readers hold some kilobytes for each batch


class Written(NamedTuple):
    """One side of a source: the rows to train on, or those held out."""

    documents: int
    rows: int
    targets: int  # tokens that are trained on, or counted in an evaluation
    bytes: int  # of the targets' text in UTF-8
    sha256: str  # of the tokens
    audit: "Audit | None" = None  # of conversations


@contextlib.contextmanager
def row_table(path: Path, columns: Sequence[str], width: int) -> Iterator[Callable[..., None]]:
    """Open a new file, and yield a function that appends rows to it: of each column an int32 [rows, width]."""
    import datasets
    import pyarrow

    column = datasets.Sequence(datasets.Value("int32"), length=width)
    schema = datasets.Features(dict.fromkeys(columns, column)).arrow_schema

    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write(*values: np.ndarray) -> None:
            flat = [np.ascontiguousarray(value, np.int32).ravel() for value in values]
            arrays = [pyarrow.FixedSizeListArray.from_arrays(value, type=schema.types[0]) for value in flat]
            writer.write_batch(pyarrow.RecordBatch.from_arrays(arrays, schema=schema))

        yield write


class TokenRows:
    """Rows of tokens: columns of integer lists of one length. A run reads them without ``datasets``, whose import would
    cost every start half a second."""

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
        """The rows as a ``datasets.Dataset``."""
        import datasets
        from datasets.fingerprint import generate_random_fingerprint

        return datasets.Dataset(datasets.table.InMemoryTable(self.data), fingerprint=generate_random_fingerprint())


def as_matrices(column: "pyarrow.ChunkedArray") -> list[np.ndarray]:
    """Return the chunks of a column of lists of one length, each as [rows, length], without a copy."""
    # not by to_numpy(), which imports pandas
    return [np.from_dlpack(chunk.flatten()).reshape(len(chunk), -1) for chunk in column.chunks if len(chunk)]


def hash_place(text: str) -> float:
    """Return the place of a text in [0, 1), which its content alone decides."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
