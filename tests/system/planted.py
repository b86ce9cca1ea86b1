"""recipes/gpt.py or preference.py with a known bug, for test_verify.py and test_preference.py.

The environment variable PLANTED names the bug.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt
import preference

from llmtrain import launch
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.interfaces.batches import Batch, LocalBatch, is_second
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from tests.system import controls

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
READ = LocalBatches.__getitems__


def sync_in_every_micro_batch(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def rows_of_first_step(batches: LocalBatches, slots: list[Slot]) -> LocalBatch:
    """Every rank except the first reads the rows again that it has read in its first step."""
    first = batches.first = getattr(batches, "first", slots)  # type: ignore[attr-defined]
    if RANK and len(slots) == len(first):
        slots = first
    return READ(batches, slots)


def divided_pairs(batches: LocalBatches, slots: list[Slot]) -> LocalBatch:
    """The first rank has the chosen answers of the rows, the second the rejected ones."""
    local_batch = READ(batches, slots)
    if WORLD > 1:
        columns = local_batch.columns
        columns["labels"][is_second(columns["answers"]) != RANK] = -100
    return local_batch


@torch.no_grad()
def sum_over_own_batches(
    engine: Engine, function: Callable[[Any, Batch], Tensor], batches: Iterable[Batch]
) -> Tensor:
    """Forget the sum over the ranks."""
    return torch.stack([engine.call_in_forward(function, batch) for batch in batches]).sum(0)


def rebuild_nothing(engine: ReplicatedEngine, batch: Batch) -> None:
    """Leave DDP's buckets as they are."""


PLANT: dict[str, tuple[Any, str, Any]] = {
    "nothing": (Engine, "forward_backward", Engine.forward_backward),
    "a mean of means": (Engine, "forward_backward", controls.mean_of_means),
    "a missing sync": (Engine, "forward_backward", controls.never_synced),
    "a sync in every micro-batch": (Engine, "no_sync", sync_in_every_micro_batch),
    "unshifted token counts": (Engine, "count", controls.unshifted_count),
    "a rank reading another's rows": (LocalBatches, "__getitems__", rows_of_first_step),
    "buckets that are not settled": (ReplicatedEngine, "rebuild_buckets", rebuild_nothing),
}
OF_PAIRS: dict[str, tuple[Any, str, Any]] = {
    "a pair split over two processes": (LocalBatches, "__getitems__", divided_pairs),
    "a baseline of each process": (Engine, "sum_over_batches", sum_over_own_batches),
}

if __name__ == "__main__":
    bug = os.environ["PLANTED"]
    owner, name, value = (PLANT | OF_PAIRS)[bug]
    setattr(owner, name, value)
    launch(preference.main if bug in OF_PAIRS else gpt.main)
