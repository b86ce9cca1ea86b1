"""Which tokenised rows of two runs differ, as far as this machine's cache still has them."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmtrain.console import pluralize
from llmtrain.errors import UserError
from llmtrain.files import cache_folder, damaged_files, json_text, read_sealed
from llmtrain.model_folders import tokenizer_of
from llmtrain.record.history import History

if TYPE_CHECKING:
    import pyarrow

_ROWS_AT_A_TIME = 4096
_COMPARED_COLUMNS = ("input_ids", "labels")
_SHOWN_TOKENS = 20
_SHOWN_CHARACTERS = 60


class _Difference(NamedTuple):
    """How two tables of rows differ.

    Attributes:
        total: the number of rows that differ.
        row: the first of them.
        position: the first token in it that differs.
    """

    total: int
    row: int
    position: int


def describe_row_difference(run_a: History, run_b: History) -> str | None:
    """Say how many rows of two runs differ, and show the first one.

    Returns:
        ``None`` if the cache no longer has the rows of both, or if they have other lengths.
    """
    for split in ("train", "eval"):
        try:
            text = _describe_split(split, run_a, run_b)
        except (
            UserError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
        ):  # pyarrow's errors are ValueErrors
            return None
        if text is not None:
            return text
    return None


def _describe_split(split: str, run_a: History, run_b: History) -> str | None:
    rows_a, rows_b = [_read_rows(_entry(run), split) for run in (run_a, run_b)]

    difference = _difference_of(rows_a, rows_b)
    if difference is None:
        return None

    common = min(len(rows_a), len(rows_b))
    texts = [
        _text_at(run, rows["input_ids"][difference.row].as_py(), difference.position)
        for run, rows in ((run_a, rows_a), (run_b, rows_b))
    ]
    return (
        f"rows: {difference.total:,} of {pluralize(common, f'{split} row')} differ; the first is "
        f"row {difference.row}{_source_of(run_b, split, difference.row)}: {texts[0]} and {texts[1]}"
    )


def _entry(run: History) -> Path:
    """Return the entry of the cache that holds the rows of a run."""
    return cache_folder() / str(run.record["cache_entry"] or "absent")


def _read_rows(entry: Path, split: str) -> "pyarrow.Table":
    """Map the tokenised rows of a split into memory, one file after the other.

    Raises:
        UserError: if a file is damaged.
    """
    import pyarrow

    files = read_sealed(entry / "facts.json")["files"]
    if any(damaged_files(entry, files)):
        raise UserError(f"{entry} is damaged.")
    streams = [
        pyarrow.ipc.open_stream(pyarrow.memory_map(str(entry / f"{split}-{i}.arrow")))
        for i in range(sum(name.startswith(f"{split}-") for name in files))
    ]
    return pyarrow.concat_tables(stream.read_all() for stream in streams)


def _difference_of(rows_a: "pyarrow.Table", rows_b: "pyarrow.Table") -> _Difference | None:
    """Compare the rows that two tables have in common; ``None`` if they are the same."""
    total = 0
    first: tuple[int, int] | None = None
    for start in range(0, min(len(rows_a), len(rows_b)), _ROWS_AT_A_TIME):
        block_a = rows_a.slice(start, min(_ROWS_AT_A_TIME, len(rows_b) - start))
        block_b = rows_b.slice(start, len(block_a))
        differs = np.zeros((len(block_a), 0), dtype=bool)
        for column in _COMPARED_COLUMNS:
            if column in block_a.column_names and column in block_b.column_names:
                # Rows of other lengths cannot be compared: this raises ValueError.
                unequal = np.not_equal(_matrix(block_a[column]), _matrix(block_b[column]))
                differs = np.concatenate([differs, unequal], axis=1)

        different_rows = np.flatnonzero(differs.any(axis=1))
        total += len(different_rows)
        if first is None and len(different_rows):
            row = int(different_rows[0])
            width = len(rows_a["input_ids"][0])
            first = start + row, int(differs[row].argmax()) % width
    return None if first is None else _Difference(total=total, row=first[0], position=first[1])


def _matrix(column: "pyarrow.ChunkedArray") -> np.ndarray:
    """Return a column of lists with the same length as an array [rows, length]."""
    tokens = column.combine_chunks().flatten()
    return np.asarray(tokens).reshape(len(column), -1)


def _text_at(run: History, tokens: list[int], position: int) -> str:
    """Return the text from a position of a row on, in quotes."""
    tokenizer = tokenizer_of(str(_entry(run) / "tokenizer"))
    text = tokenizer.decode(tokens[position : position + _SHOWN_TOKENS])
    return json_text(str(text)[:_SHOWN_CHARACTERS], ensure_ascii=False)


def _source_of(run: History, split: str, row: int) -> str:
    """Return the data set that a row is from, in words; empty if it is not known."""
    names = run.settings.get("dataset") or []
    counts = run.record["source_rows"]
    if split == "eval":
        names = run.settings.get("eval_dataset") or names
        counts = run.record["eval_source_rows"]
    if len(names) != len(counts):
        return ""

    for name, count in zip(names, counts, strict=True):
        if row < count:
            return f" (of {name})"
        row -= count
    return ""
