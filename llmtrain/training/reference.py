"""The reference of a loss, which are the weights that a run starts from: a number for each answer, kept.

No second model is held. The numbers lie in the user's cache, under a key of all that they depend on, and are computed a
few rows at a time, always the same ones together, so that every layout finds the same.
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
from llmtrain.contract import Built, PreparesBatches, TakesReference
from llmtrain.data.cache import cache_folder
from llmtrain.data.loader import Collate, Slot, SlotRows
from llmtrain.data.rows import Tokenized
from llmtrain.data.table import TokenRows
from llmtrain.errors import require
from llmtrain.parallel.mesh import data_parallel_rank, data_parallel_size, gather_rows, reshard
from llmtrain.record.provenance import digest
from llmtrain.record.team import Team

_TOGETHER = 4  # rows of a forward pass
_CHUNK = 64  # rows that are kept, and verified, together
_DIGEST = hashlib.sha256().digest_size


def with_reference(accelerator: Accelerator, seed: int, rows: Tokenized, built: Built) -> Tokenized:
    """Return rows with a column ``reference``, float32 [slots], where the model's loss takes one.

    The model has its first weights. All ranks call this. Raises :class:`UserError` where a number is not finite.
    """
    model = built.model
    if not isinstance(model, TakesReference) or not model.takes_reference:
        return rows
    weights = (built.start or {}).get("weights")
    first = {
        "weights": weights,
        "config": built.files.config,
        "seed": seed,
        "rows": rows.facts.data_sha256,
    }
    how = [
        accelerator.mixed_precision,
        accelerator.device.type,
        torch.get_num_threads(),
        rows.facts.shared,
    ]
    key = digest({**first, "how": how})
    train = _with_column(accelerator, key, "train", rows.train, built)
    held_out = (
        None if rows.eval is None else _with_column(accelerator, key, "eval", rows.eval, built)
    )
    return replace(rows, train=train, eval=held_out)


def _with_column(
    accelerator: Accelerator, key: str, name: str, rows: TokenRows, built: Built
) -> TokenRows:
    import pyarrow

    assert isinstance(built.model, TakesReference)
    slots, team = built.model.slots, Team.everyone()
    path = cache_folder() / "references" / f"{key}-{name}"
    values, damaged = team.main(lambda: _read(path, len(rows), slots))
    found = f"{len(values):,} of {len(rows):,} rows found in the cache"
    again = "; what was damaged there is computed again" if damaged else ""
    say("reference", f"log-probabilities under the first weights, {name}: {found}{again}")
    for chunk in _computed(accelerator, rows, len(values), slots, built):
        finite = np.isfinite(chunk).all()
        require(
            finite,
            "the first weights give log-probabilities that are not finite: they cannot be compared with.",
        )
        team.main(functools.partial(_append, path, len(values), chunk))
        values = np.concatenate([values, chunk])
    kind = pyarrow.list_(pyarrow.float32(), slots)
    ends = np.cumsum([len(part) for part in rows.data.column(0).chunks])
    parts = [
        pyarrow.FixedSizeListArray.from_arrays(part.ravel(), type=kind)
        for part in np.split(values, ends[:-1])
    ]
    return TokenRows(rows.data.append_column("reference", pyarrow.chunked_array(parts, kind)))


@torch.no_grad()
def _computed(
    accelerator: Accelerator, rows: TokenRows, start: int, slots: int, built: Built
) -> Iterator[np.ndarray]:
    """Yield the numbers [rows, slots] of chunks of rows, from the row ``start`` on."""
    model, ranks, me = built.model, data_parallel_size(accelerator), data_parallel_rank(accelerator)
    collate = Collate(
        _TOGETHER, prepare=model.prepare if isinstance(model, PreparesBatches) else None
    )
    table, training = SlotRows(rows), model.training
    model.eval()
    starts = range(start, len(rows), _CHUNK)
    for first in tqdm(
        starts, desc="reference", leave=False, disable=not accelerator.is_main_process
    ):
        mine = []
        for group in range(
            me, -(-_CHUNK // _TOGETHER // ranks) * ranks, ranks
        ):  # as many on each rank
            places = range(first + group * _TOGETHER, first + (group + 1) * _TOGETHER)
            inside = group * _TOGETHER < _CHUNK
            slots_of = [
                Slot(place, place if inside and place < len(rows) else None) for place in places
            ]
            (batch,) = collate(table.__getitems__(slots_of)).to(accelerator.device).batches
            with accelerator.autocast():
                mine.append(model(**batch, logps=True).float())
        everyone = gather_rows(
            accelerator, torch.stack(mine)
        )  # [ranks * groups of each, together, slots]
        in_order = everyone.view(ranks, -1, _TOGETHER, slots).transpose(0, 1).reshape(-1, slots)
        yield in_order[: min(_CHUNK, len(rows) - first)].cpu().numpy()
    reshard(model)
    model.train(training)


def _read(path: Path, rows: int, slots: int) -> tuple[np.ndarray, bool]:
    """Return the numbers [rows, slots] that are kept, up to the first chunk that is damaged, and whether one is."""
    found, damaged = [np.zeros((0, slots), np.float32)], False
    stored = path.read_bytes() if path.exists() else b""
    while stored and not damaged:
        size = 4 * slots * min(_CHUNK, rows - sum(map(len, found)))
        known, data, stored = (
            stored[:_DIGEST],
            stored[_DIGEST : _DIGEST + size],
            stored[_DIGEST + size :],
        )
        damaged = (
            not size or len(data) < size or known != _digest(path.name, sum(map(len, found)), data)
        )
        found += [] if damaged else [np.frombuffer(data, np.float32).reshape(-1, slots)]
    whole = np.concatenate(found)
    if damaged:
        path.unlink()
        for first in range(0, len(whole), _CHUNK):
            _append(path, first, whole[first : first + _CHUNK])
    return whole, damaged


def _append(path: Path, first: int, chunk: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = chunk.astype(np.float32).tobytes()
    with path.open(
        "ab"
    ) as file:  # torn, or written by two runs at once, it is found out by its digest
        file.write(_digest(path.name, first, data) + data)


def _digest(key: str, first: int, data: bytes) -> bytes:
    return hashlib.sha256(f"{key} {first} ".encode() + data).digest()
