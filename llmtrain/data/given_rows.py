"""Rows that were tokenised elsewhere, which a recipe passes to ``Tokenized.of``."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from llmtrain.console import note
from llmtrain.data.audit import Audit
from llmtrain.data.formats import parse_extra_columns
from llmtrain.data.packing import LENGTHS, TOKEN_COLUMNS, column_values
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.interfaces.batches import IGNORED

if TYPE_CHECKING:
    import datasets

    from llmtrain.data.tokenizer import FastTokenizer

GivenRows: TypeAlias = "TokenRows | datasets.Dataset"

_MEASURED_ROWS = 1024  # that are read at a time
_WRONG_COLUMNS = (
    f"Tokenized.of: {', '.join(TOKEN_COLUMNS)} must be lists of integers, all of one length; pad "
    "or pack them."
)


def as_token_rows(rows: GivenRows, extra_columns: Sequence[str]) -> TokenRows:
    """Return the columns of rows that a run reads.

    Raises:
        UserError: if they are no lists of integers, have gaps, or have several lengths.
    """
    if isinstance(rows, TokenRows):
        return rows

    import pyarrow
    from pyarrow.compute import list_value_length

    extra = parse_extra_columns(extra_columns)
    for name in {"loss_weight", "loss_mask"} & {*rows.column_names}:
        if "loss_weight" not in extra:
            note(f"the column {name} is not used; name it in extra_columns to weigh the tokens")
    all_columns = rows.with_format("arrow")[:]
    table = all_columns.select([name for name in TOKEN_COLUMNS if name in rows.column_names])
    lengths: set[int | None] = set()
    chunks: list[dict[str, np.ndarray]] = [{} for _ in range(table.column(0).num_chunks)]
    try:
        for name in table.column_names:
            column = table.column(name)
            lengths.update(list_value_length(column).unique().to_pylist())
            for chunk, arrays in zip(column.chunks, chunks, strict=True):
                values = np.from_dlpack(chunk.flatten())  # to_numpy() would import pandas
                arrays[name] = values.reshape(len(chunk), -1 if len(chunk) else 1)
    except (pyarrow.ArrowException, ValueError):
        raise UserError(_WRONG_COLUMNS) from None
    is_too_short = bool(lengths & {None, 0, 1})
    kinds = {array.dtype.kind for arrays in chunks for array in arrays.values()}
    if len(lengths) != 1 or is_too_short or kinds != {"i"} or "input_ids" not in table.column_names:
        raise UserError(_WRONG_COLUMNS)
    width = len(rows[0]["input_ids"])
    for name, (column_name, dtype) in extra.items():
        with as_user_error("Tokenized.of", describe=first_line):
            shape = np.shape(rows[0].get(column_name))
            row_dtype = np.dtype((dtype, (width, *shape[1:]) if shape else ()))
            column = all_columns.column(column_name)
            for chunk, arrays in zip(column.chunks, chunks, strict=True):
                values = column_values(name, chunk.to_pylist(), row_dtype, len(chunk))
                arrays[name] = values if shape else np.tile(values[:, None], width)
    # Chunks are no shards: the order of rows does not depend on them.
    return TokenRows([TokenRows([ArrayRows(arrays) for arrays in chunks])])


def measured(rows: TokenRows, tokenizer: "FastTokenizer | None" = None) -> tuple[Audit, int]:
    """Hash the content of rows, and count their targets; with a tokenizer, their bytes, too.

    Returns:
        The counts, and the largest token or label.

    Raises:
        UserError: if a token or a label is negative, but not -100.
    """
    digest = hashlib.sha256()
    largest = 0
    targets = 0
    target_bytes = 0
    names = [name for name in rows.column_names if name != LENGTHS]
    label_column = "labels" if "labels" in names else "input_ids"
    for name in names:
        digest.update(name.encode())
        for start in range(0, len(rows), _MEASURED_ROWS):
            numbers = np.arange(start, min(start + _MEASURED_ROWS, len(rows)))
            matrix = rows.read(numbers)[name]
            if name not in TOKEN_COLUMNS:
                digest.update(matrix.tobytes())
                continue
            digest.update(matrix.astype("<i4").tobytes())
            if ((matrix < 0) & (matrix != IGNORED)).any():
                raise UserError(
                    f"Tokenized.of: {name} holds negative numbers; only {IGNORED} may be negative."
                )
            if name != "position_ids":
                largest = max(largest, int(matrix.max()))
            if name == label_column:
                labels = matrix[:, 1:][matrix[:, 1:] != IGNORED]
                targets += len(labels)
                if tokenizer is not None:
                    text = tokenizer.backend_tokenizer.decode(labels.tolist())
                    target_bytes += len(text.encode())

    stats = Audit(
        records=len(rows),
        rows=len(rows),
        targets=targets,
        bytes=target_bytes,
        sha256=digest.hexdigest(),
    )
    return stats, largest
