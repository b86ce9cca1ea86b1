"""Rows of tokens on the disk, as memory-mapped Arrow files, which ``datasets`` reads too."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import datasets

TOKENS_PER_BATCH = 1 << 22  # written at a time: 16 MiB a column. Readers hold some kilobytes for each batch


class Written(NamedTuple):
    """What one file of rows holds."""

    targets: int  # tokens that are trained on, or counted in an evaluation
    rows: int
    sha256: str  # of the tokens


@contextlib.contextmanager
def row_table(path: Path, columns: Sequence[str], width: int) -> Iterator[Callable[..., None]]:
    """A function that appends rows: of each column an int32 [rows, width]."""
    import datasets
    import pyarrow

    column = datasets.Sequence(datasets.Value("int32"), length=width)
    schema = datasets.Features(dict.fromkeys(columns, column)).arrow_schema

    with path.open("wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write(*values: np.ndarray) -> None:
            arrays = [
                pyarrow.FixedSizeListArray.from_arrays(
                    pyarrow.array(np.ascontiguousarray(value, np.int32).ravel(), pyarrow.int32()), type=field.type
                )
                for value, field in zip(values, schema, strict=True)
            ]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))

        yield write


class TokenRows:
    """Rows of tokens, columns of int32 lists of one length, that stay on the disk. A ``datasets.Dataset`` of them is a
    property: a run does without, whose every start would spend half a second on importing it."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """The files' rows one after the other; raises ``OSError`` or ``ValueError`` where one is damaged."""
        import pyarrow

        self.paths = paths
        streams = [pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))) for path in paths]
        self.data = pyarrow.concat_tables(stream.read_all() for stream in streams)

    def __len__(self) -> int:
        return self.data.num_rows

    def __getitem__(self, row: int) -> dict[str, list[int]]:
        return self.data.slice(row, 1).to_pylist()[0]

    @property
    def column_names(self) -> list[str]:
        return self.data.column_names

    @property
    def dataset(self) -> "datasets.Dataset":
        import datasets

        return datasets.concatenate_datasets([datasets.Dataset.from_file(str(path)) for path in self.paths])


def hash_place(text: str) -> float:
    """Where a text falls in [0, 1), by its content alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
