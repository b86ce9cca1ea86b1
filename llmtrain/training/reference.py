"""Log-probabilities of answers under the reference model, which are the first weights of a run.

No second model is held. The numbers are kept in the user's cache, under a key of everything that
they depend on. They are computed a few rows at a time, always the same rows together, so that every
layout has the same numbers.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from tqdm import tqdm

from llmtrain.console import say
from llmtrain.data.cache import cache_folder
from llmtrain.data.loader import Collate, Slot, SlotRows
from llmtrain.data.packing import TokenRows
from llmtrain.data.prepare import Tokenized
from llmtrain.errors import UserError
from llmtrain.parallel.blocks import reshard
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.team import Team
from llmtrain.record.provenance import digest
from llmtrain.types import ModelBundle

_TOGETHER = 4  # rows of a forward pass
_CHUNK = 64  # rows that are stored, and verified, together
_DIGEST_BYTES = hashlib.sha256().digest_size


def with_reference(
    accelerator: Accelerator, seed: int, rows: Tokenized, bundle: ModelBundle
) -> Tokenized:
    """Return rows with a column ``reference``, float32 [slots], if the loss of the model takes one.

    The model must still have its first weights. All ranks call this.

    Raises:
        UserError: a log-probability is not finite.
    """
    if not bundle.objective.reference_size:
        return rows

    key = digest(
        {
            "weights": (bundle.start or {}).get("weights"),
            "config": bundle.files.config,
            "seed": seed,
            "rows": rows.facts.data_sha256,
            "objective": [type(bundle.objective).__name__, bundle.objective.reference_source],
            "how": [
                accelerator.mixed_precision,
                accelerator.device.type,
                torch.get_num_threads(),
                rows.facts.shared,
            ],
        }
    )
    train = _with_column(accelerator, key, "train", rows.train, bundle)
    held_out = None
    if rows.eval is not None:
        held_out = _with_column(accelerator, key, "eval", rows.eval, bundle)
    return replace(rows, train=train, eval=held_out)


def _with_column(
    accelerator: Accelerator, key: str, name: str, rows: TokenRows, bundle: ModelBundle
) -> TokenRows:
    """Return rows with their reference, read from the cache as far as it is there."""
    slots = bundle.objective.reference_size
    team = Team.everyone()
    path = cache_folder() / "references" / f"{key}-{name}"

    values, is_damaged = team.main(lambda: _read(path, len(rows), slots))
    damage = "; what was damaged there is computed again" if is_damaged else ""
    say(
        "reference",
        f"log-probabilities under the first weights, {name}: {len(values):,} of {len(rows):,} rows "
        f"found in the cache{damage}",
    )

    for chunk in _computed(accelerator, rows, len(values), slots, bundle):
        if not np.isfinite(chunk).all():
            raise UserError(
                "the first weights give log-probabilities that are not finite: "
                "they cannot be compared with."
            )
        team.main(functools.partial(_append, path, len(values), chunk))
        values = np.concatenate([values, chunk])
    return _append_column(rows, values, slots)


def _append_column(rows: TokenRows, values: np.ndarray, slots: int) -> TokenRows:
    """Return rows with a column of ``values`` [rows, slots], in chunks like those of the others."""
    import pyarrow

    kind = pyarrow.list_(pyarrow.float32(), slots)
    ends = np.cumsum([len(part) for part in rows.data.column(0).chunks])
    parts = [
        pyarrow.FixedSizeListArray.from_arrays(part.ravel(), type=kind)
        for part in np.split(values, ends[:-1])
    ]
    column = pyarrow.chunked_array(parts, kind)
    return TokenRows(rows.data.append_column("reference", column))


@torch.no_grad()
def _computed(
    accelerator: Accelerator, rows: TokenRows, start: int, slots: int, bundle: ModelBundle
) -> Iterator[np.ndarray]:
    """Yield the log-probabilities [rows, slots] of chunks of rows, from the row ``start`` on."""
    model = bundle.model
    collate = Collate(_TOGETHER, prepare=bundle.prepare_batch)
    table = SlotRows(rows)

    ranks = Ranks(accelerator)
    shares = ranks.data_parallel_size
    passes = -(-_CHUNK // _TOGETHER)
    passes_of_rank = -(-passes // shares)  # the same on each rank, because they communicate in each

    was_training = model.training
    model.eval()
    for first_row in tqdm(
        range(start, len(rows), _CHUNK),
        desc="reference",
        leave=False,
        disable=not ranks.is_main,
    ):
        own_values = []
        for i in range(passes_of_rank):
            number = ranks.data_parallel_rank + i * shares
            read = table.__getitems__(_slots_of_pass(first_row, number, len(rows)))
            (batch,) = collate(read).to(accelerator.device).batches
            with accelerator.autocast():
                values = model(**batch, compute=bundle.objective.reference)
                own_values.append(values.float())

        # [ranks * passes_of_rank, _TOGETHER, slots]; consecutive passes are of consecutive ranks
        of_ranks = ranks.gather_rows(torch.stack(own_values))
        of_ranks = of_ranks.view(shares, passes_of_rank, _TOGETHER, slots)
        in_order = of_ranks.transpose(0, 1).reshape(-1, slots)
        yield in_order[: min(_CHUNK, len(rows) - first_row)].cpu().numpy()
    reshard(model)
    model.train(was_training)


def _slots_of_pass(first_row: int, number: int, rows: int) -> list[Slot]:
    """Return the rows of one forward pass of a chunk; past its end, and the last row, are none."""
    is_inside = number * _TOGETHER < _CHUNK
    start = first_row + number * _TOGETHER
    return [
        Slot(row, row if is_inside and row < rows else None)
        for row in range(start, start + _TOGETHER)
    ]


def _read(path: Path, rows: int, slots: int) -> tuple[np.ndarray, bool]:
    """Return the stored numbers [rows, slots] before any damage, and whether there is damage.

    A damaged file is replaced by one with the chunks that are whole.
    """
    chunks = [np.zeros((0, slots), np.float32)]
    rows_read = 0
    is_damaged = False
    stored = path.read_bytes() if path.exists() else b""
    position = 0
    while position < len(stored):
        size = 4 * slots * min(_CHUNK, rows - rows_read)
        expected = stored[position : position + _DIGEST_BYTES]
        position += _DIGEST_BYTES
        data = stored[position : position + size]
        position += size
        if not size or len(data) < size or expected != _digest(path.name, rows_read, data):
            is_damaged = True
            break
        chunks.append(np.frombuffer(data, np.float32).reshape(-1, slots))
        rows_read += len(chunks[-1])

    values = np.concatenate(chunks)
    if is_damaged:
        path.unlink()
        for first_row in range(0, len(values), _CHUNK):
            _append(path, first_row, values[first_row : first_row + _CHUNK])
    return values, is_damaged


def _append(path: Path, first_row: int, chunk: np.ndarray) -> None:
    """Append a chunk and its digest, by which a torn write, or those of two runs, are noticed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = chunk.astype(np.float32).tobytes()
    with path.open("ab") as file:
        file.write(_digest(path.name, first_row, data) + data)


def _digest(key: str, first_row: int, data: bytes) -> bytes:
    return hashlib.sha256(f"{key} {first_row} ".encode() + data).digest()
