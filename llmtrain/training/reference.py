"""Log-probabilities of answers under the reference model.

The reference model is the model before training, with its initial weights. Its numbers are computed
before the first step, so that training needs no second model in memory. They are kept in the user's
cache, under a key of everything that they depend on.

A forward pass computes a few rows, and the same rows share a pass in every parallel layout. So all
layouts get the same numbers.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from llmtrain.console import can_show_bars, say
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.data.packing import TokenRows
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.files import cache_folder, digest
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.interfaces.objective import Objective
from llmtrain.interfaces.part import is_own, settings_of
from llmtrain.parallel.blocks import reshard
from llmtrain.parallel.ranks import Ranks
from llmtrain.seeds import RANDOM_VERSION

_ROWS_PER_PASS = 4
_ROWS_PER_CHUNK = 64  # a chunk is stored and verified as a whole
_DIGEST_BYTES = hashlib.sha256().digest_size


def with_reference(ranks: Ranks, seed: int, rows: Tokenized, bundle: ModelBundle) -> Tokenized:
    """Add a column ``reference`` to rows, if the objective uses one.

    The column is float32 [``reference_size``]. The model must still have its initial weights. All
    ranks call this.

    Raises:
        UserError: if a log-probability is not finite.
    """
    if not bundle.objective.reference_size:
        return rows

    # Everything that the numbers depend on.
    key = digest(
        {
            "weights": (bundle.start or {}).get("weights"),
            "config": bundle.files.config,
            "seed": seed,
            "random": RANDOM_VERSION,
            "rows": rows.metadata.data_sha256,
            "objective": _objective_key(bundle.objective),
            "how": [
                ranks.accelerator.mixed_precision,
                ranks.device.type,
                torch.get_num_threads(),
                rows.metadata.shared,
                sorted({str(parameter.dtype) for parameter in bundle.model.parameters()}),
            ],
        }
    )
    train = _with_column(ranks, key, "train", rows.train, bundle)
    eval_rows = None
    if rows.eval is not None:
        eval_rows = _with_column(ranks, key, "eval", rows.eval, bundle)
    return replace(rows, train=train, eval=eval_rows)


def _objective_key(objective: Objective) -> list[Any]:
    """Return what the numbers of an objective depend on, besides the weights and the rows.

    The fields of the package's own objectives do not change them. Those of a user's may.
    """
    key: list[Any] = [type(objective).__name__, objective.reference_source]
    if not is_own(type(objective)):
        key.append(settings_of(objective))
    return key


def _with_column(
    ranks: Ranks, key: str, name: str, rows: TokenRows, bundle: ModelBundle
) -> TokenRows:
    """Add the column to rows: read from the cache as far as possible, and computed otherwise."""
    size = bundle.objective.reference_size
    path = cache_folder() / "references" / f"{key}-{name}"

    values, is_damaged = ranks.on_main(lambda: _read(path, len(rows), size))
    damage = "; damaged entries are computed again" if is_damaged else ""
    say(
        "reference",
        f"log-probabilities under the initial weights, {name}: {len(values):,} rows from the "
        f"cache, {len(rows) - len(values):,} to compute{damage}",
    )

    for chunk in _compute(ranks, rows, bundle, start=len(values)):
        if not np.isfinite(chunk).all():
            raise UserError(
                "log-probabilities under the initial weights are not finite, so they cannot serve "
                "as the reference; check the model, or use another precision."
            )
        ranks.on_main(functools.partial(_append, path, len(values), chunk))
        values = np.concatenate([values, chunk])
    return _append_column(rows, values)


def _append_column(rows: TokenRows, values: np.ndarray) -> TokenRows:
    """Add a column of ``values`` [rows, size] to rows, in the chunks of the other columns."""
    import pyarrow

    column_type = pyarrow.list_(pyarrow.float32(), values.shape[1])
    ends = np.cumsum([len(part) for part in rows.data.column(0).chunks])
    parts = [
        pyarrow.FixedSizeListArray.from_arrays(part.ravel(), type=column_type)
        for part in np.split(values, ends[:-1])
    ]
    column = pyarrow.chunked_array(parts, column_type)
    return TokenRows(rows.data.append_column("reference", column))


@torch.no_grad()
def _compute(
    ranks: Ranks, rows: TokenRows, bundle: ModelBundle, start: int
) -> Iterator[np.ndarray]:
    """Yield the log-probabilities of one chunk of rows after another; all ranks call this.

    Args:
        ranks: the ranks of the run.
        rows: all rows.
        bundle: the model and its objective.
        start: the first row to compute.

    Yields:
        float32 [rows of the chunk, ``reference_size``].
    """
    model = bundle.model
    batches = LocalBatches(rows, _ROWS_PER_PASS, prepare=bundle.prepare_batch)

    shares = ranks.world_size
    passes = -(-_ROWS_PER_CHUNK // _ROWS_PER_PASS)
    # All ranks make the same number of passes, because they communicate in each.
    passes_of_rank = -(-passes // shares)

    was_training = model.training
    model.eval()
    first_rows = tqdm(
        range(start, len(rows), _ROWS_PER_CHUNK),
        desc="reference",
        leave=False,
        disable=not ranks.is_main or not can_show_bars(),
    )
    for first_row in first_rows:
        # Consecutive passes belong to consecutive ranks.
        own_values = []
        for i in range(passes_of_rank):
            pass_index = ranks.rank + i * shares
            slots = _slots_of_pass(first_row, pass_index, len(rows))
            (batch,) = batches.__getitems__(slots).to(ranks.device).batches
            with ranks.accelerator.autocast():
                values = model(**batch, compute=bundle.objective.reference)
                own_values.append(values.float())

        # [shares * passes_of_rank, rows of a pass, reference_size] -> [rows, reference_size]
        gathered = ranks.gather_rows(torch.stack(own_values))
        by_rank = gathered.view(shares, passes_of_rank, _ROWS_PER_PASS, -1)
        in_order = by_rank.transpose(0, 1).reshape(-1, by_rank.shape[-1])
        yield in_order[: min(_ROWS_PER_CHUNK, len(rows) - first_row)].cpu().numpy()
    reshard(model)
    model.train(was_training)


def _slots_of_pass(first_row: int, pass_index: int, rows: int) -> list[Slot]:
    """Return the rows of a forward pass. Past the end of the chunk or of all rows, slots are empty.

    Args:
        first_row: the first row of the chunk.
        pass_index: the number of the pass in the chunk.
        rows: the number of all rows.
    """
    is_inside = pass_index * _ROWS_PER_PASS < _ROWS_PER_CHUNK
    start = first_row + pass_index * _ROWS_PER_PASS
    return [
        Slot(row, row if is_inside and row < rows else None)
        for row in range(start, start + _ROWS_PER_PASS)
    ]


def _read(path: Path, rows: int, size: int) -> tuple[np.ndarray, bool]:
    """Read stored numbers up to the first damage.

    A damaged file is replaced by one with the undamaged chunks.

    Args:
        path: the file, which may not exist.
        rows: the number of all rows.
        size: numbers of each row.

    Returns:
        The numbers [rows read, size], and whether there is damage.
    """
    chunks = [np.zeros((0, size), np.float32)]
    rows_read = 0
    is_damaged = False
    stored = path.read_bytes() if path.exists() else b""
    position = 0
    while position < len(stored):
        length = 4 * size * min(_ROWS_PER_CHUNK, rows - rows_read)
        expected = stored[position : position + _DIGEST_BYTES]
        position += _DIGEST_BYTES
        data = stored[position : position + length]
        position += length
        if not length or len(data) < length or expected != _digest(path.name, rows_read, data):
            is_damaged = True
            break
        chunks.append(np.frombuffer(data, np.float32).reshape(-1, size))
        rows_read += len(chunks[-1])

    values = np.concatenate(chunks)
    if is_damaged:
        path.unlink()
        for first_row in range(0, len(values), _ROWS_PER_CHUNK):
            _append(path, first_row, values[first_row : first_row + _ROWS_PER_CHUNK])
    return values, is_damaged


def _append(path: Path, first_row: int, chunk: np.ndarray) -> None:
    """Append a chunk and its digest, which reveals torn writes and writes of two runs at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = chunk.astype(np.float32).tobytes()
    with path.open("ab") as file:
        file.write(_digest(path.name, first_row, data) + data)


def _digest(key: str, first_row: int, data: bytes) -> bytes:
    return hashlib.sha256(f"{key} {first_row} ".encode() + data).digest()
