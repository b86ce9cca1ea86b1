"""Rows of tokens on the disk, as Arrow files that ``datasets`` memory-maps."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

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


def hash_place(text: str) -> float:
    """Where a text falls in [0, 1), by its content alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48
