"""Log-probabilities of answers under the reference model.

The reference model is the model before training, with its initial weights. Its numbers are computed
before the first step, so that training needs no second model in memory. They are kept in the user's
cache, under a key of everything that they depend on.

A forward pass computes a few rows, and the same rows share a pass in every parallel layout. So all
layouts get the same numbers.
"""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from llmtrain.console import can_show_bars, say
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.data.shards import TokenRows
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.files import cache_folder, digest, read_sealed, write_sealed
from llmtrain.interfaces.model import ModelBundle
from llmtrain.interfaces.part import is_own, settings_of
from llmtrain.observe.replicas import checksum
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import local_shard, reshard
from llmtrain.record.run_record import code_sha256
from llmtrain.seeds import RANDOM_VERSION

_ROWS_PER_PASS = 4
_PASSES_PER_FILE = 16  # whose numbers a file of the cache has


def with_reference(ranks: Ranks, seed: int, rows: Tokenized, bundle: ModelBundle) -> Tokenized:
    """Add a column ``reference`` to rows, if the objective uses one.

    The column is float32 [``reference_size``]. The model must still have its initial weights. All
    ranks call this.

    Raises:
        UserError: if a log-probability is not finite.
    """
    objective = bundle.objective
    if not objective.reference_size:
        return rows

    # The fields of the package's own objectives do not change the numbers. Those of a user's may.
    objective_key: list[Any] = [type(objective).__name__, objective.reference_source]
    if not is_own(type(objective)):
        objective_key.extend([settings_of(objective), code_sha256()])
    # Everything that the numbers depend on.
    key = digest(
        {
            "weights": weights_key(ranks, bundle),
            "config": bundle.files.config,
            "seed": seed,
            "random": RANDOM_VERSION,
            "rows": rows.metadata.data_sha256,
            "objective": objective_key,
            "how": [
                ranks.accelerator.mixed_precision,
                ranks.device.type,
                torch.get_num_threads() if ranks.device.type == "cpu" else None,
                rows.metadata.shared,
                sorted({str(parameter.dtype) for parameter in bundle.model.parameters()}),
            ],
        }
    )
    folder = cache_folder() / "references" / key
    train = _with_column(ranks, folder / "train", rows.train, bundle)
    eval_rows = None
    if rows.eval is not None:
        eval_rows = _with_column(ranks, folder / "eval", rows.eval, bundle)
    return replace(rows, train=train, eval=eval_rows)


def weights_key(ranks: Ranks, bundle: ModelBundle) -> Any:
    """Return what identifies the initial weights of a model: where they are from, or checksums.

    All ranks call this.
    """
    weights = (bundle.start or {}).get("weights")
    if weights is None:  # a module that a recipe has made
        checksums = [int(checksum(local_shard(p.detach()))) for p in bundle.model.parameters()]
        # Each rank of a sharded model has seen its own shards only.
        weights = ranks.on_all(lambda: checksums) if ranks.is_sharded else checksums
    return weights


@torch.no_grad()
def _with_column(ranks: Ranks, folder: Path, rows: TokenRows, bundle: ModelBundle) -> TokenRows:
    """Add the column to rows: read from the cache as far as possible, and computed otherwise.

    Each file of the cache has the numbers of some rows, with their digest. A file that is damaged
    counts as absent.
    """
    size = _ROWS_PER_PASS * _PASSES_PER_FILE
    chunks = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    paths = {chunk: folder / f"{chunk.start}-{chunk.stop}.json" for chunk in chunks}
    values = ranks.on_main(lambda: {chunk: _read(paths[chunk]) for chunk in chunks})
    missing = [chunk for chunk in chunks if values[chunk] is None]
    missing_rows = sum(map(len, missing))
    say(
        "reference",
        f"log-probabilities under the initial weights, {folder.name}: "
        f"{len(rows) - missing_rows:,} rows from the cache, {missing_rows:,} to compute",
    )

    model = bundle.model
    batches = LocalBatches(rows, _ROWS_PER_PASS, prepare=bundle.prepare_batch)
    was_training = model.training
    model.eval()
    show_bar = ranks.is_main and can_show_bars()
    for chunk in tqdm(missing, desc="reference", leave=False, disable=not show_bar):
        computed = _compute(ranks, batches, chunk, bundle)
        if not np.isfinite(computed).all():
            raise UserError(
                "log-probabilities under the initial weights are not finite, so they cannot serve "
                "as the reference; check the model, or use another precision."
            )
        values[chunk] = computed
        ranks.on_main(functools.partial(_write, paths[chunk], computed))
    reshard(model)
    model.train(was_training)

    return rows.with_column("reference", np.concatenate([values[chunk] for chunk in chunks]))


def _compute(ranks: Ranks, batches: LocalBatches, chunk: range, bundle: ModelBundle) -> np.ndarray:
    """Compute the log-probabilities of some rows; all ranks call this.

    Consecutive passes belong to consecutive ranks. All ranks make the same number of passes,
    because they communicate in each.

    Returns:
        float32 [rows, ``reference_size``].
    """
    gathered: list[torch.Tensor] = []
    for first_row in range(chunk.start, chunk.stop, _ROWS_PER_PASS * ranks.world_size):
        own_row = first_row + ranks.rank * _ROWS_PER_PASS
        slots = [
            Slot(row, row if row < chunk.stop else None)  # the rest of the last pass is padding
            for row in range(own_row, own_row + _ROWS_PER_PASS)
        ]
        (batch,) = batches.__getitems__(slots).to(ranks.device).batches
        with ranks.accelerator.autocast():
            values = bundle.model(**batch, compute=bundle.objective.reference)
        gathered.append(ranks.gather_rows(values.float()))
    return torch.cat(gathered)[: len(chunk)].cpu().numpy()


def _read(path: Path) -> np.ndarray | None:
    """Return the stored log-probabilities of a file; ``None`` if it is absent or damaged."""
    values = read_sealed(path).get("values")
    return None if values is None else np.array(values, np.float32)


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_sealed(path, {"values": values.tolist()})
