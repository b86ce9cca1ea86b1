"""Which tokenised rows of two runs differ, as far as this machine's cache still has them."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from llmtrain.console import pluralize
from llmtrain.files import json_text
from llmtrain.record.history import History

if TYPE_CHECKING:
    from llmtrain.data.packing import TokenRows

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
        except (OSError, ValueError, KeyError, TypeError):  # pyarrow's errors are ValueErrors
            return None
        if text is not None:
            return text
    return None


def _describe_split(split: str, run_a: History, run_b: History) -> str | None:
    from llmtrain.data.packing import TokenRows

    key = "source_rows" if split == "train" else "eval_source_rows"
    tables = []
    for run in (run_a, run_b):
        count = len(run.record[key])
        tables.append(TokenRows.open([_entry(run) / f"{split}-{i}.arrow" for i in range(count)]))
    rows_a, rows_b = tables

    difference = _difference_of(rows_a, rows_b)
    if difference is None:
        return None

    common = min(len(rows_a), len(rows_b))
    texts = [
        _text_at(run, rows[difference.row]["input_ids"], difference.position)
        for run, rows in ((run_a, rows_a), (run_b, rows_b))
    ]
    return (
        f"rows: {difference.total:,} of {pluralize(common, f'{split} row')} differ; the first is "
        f"row {difference.row}{_source_of(run_b, split, difference.row)}: {texts[0]} and {texts[1]}"
    )


def _entry(run: History) -> Path:
    """Return the entry of the cache that holds the rows of a run."""
    from llmtrain.data.cache import cache_folder

    return cache_folder() / str(run.record["cache_entry"] or "absent")


def _difference_of(rows_a: "TokenRows", rows_b: "TokenRows") -> _Difference | None:
    """Compare the rows that two tables have in common; ``None`` if they are the same."""
    from llmtrain.data.packing import as_matrices

    total = 0
    first: tuple[int, int] | None = None
    for start in range(0, min(len(rows_a), len(rows_b)), _ROWS_AT_A_TIME):
        length = min(_ROWS_AT_A_TIME, len(rows_a) - start, len(rows_b) - start)
        differs = np.zeros((length, 0), dtype=bool)
        for column in _COMPARED_COLUMNS:
            if column in rows_a.column_names and column in rows_b.column_names:
                blocks = [
                    np.concatenate(as_matrices(rows.data.column(column).slice(start, length)))
                    for rows in (rows_a, rows_b)
                ]
                # Rows of other lengths cannot be compared: this raises ValueError.
                differs = np.concatenate([differs, np.not_equal(*blocks)], axis=1)

        different_rows = np.flatnonzero(differs.any(axis=1))
        total += len(different_rows)
        if first is None and len(different_rows):
            row = int(different_rows[0])
            width = len(rows_a[0]["input_ids"])
            first = start + row, int(differs[row].argmax()) % width
    return None if first is None else _Difference(total=total, row=first[0], position=first[1])


def _text_at(run: History, tokens: list[int], position: int) -> str:
    """Return the text from a position of a row on, in quotes."""
    from llmtrain.data import tokenizer as tok

    trained = tok.is_trained(str(run.record["tokenizer"]))
    tokenizer = tok.load_tokenizer(str(_entry(run) / "tokenizer"), trained=trained)
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
