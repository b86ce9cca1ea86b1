"""recipes/gpt.py with a known bug, for test_verify.py: PLANTED names it."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt

from llmtrain import launch
from llmtrain.data.loader import Collate
from llmtrain.training import loop, observers, optim, step
from tests.system import controls

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
HONEST = {"train_step": loop.train_step, "collate": Collate.__call__}


def sync_in_every_micro_batch(self: Any, batches: Any, tokens: torch.Tensor) -> torch.Tensor:
    accelerator, model = self.accelerator, self.model
    total = torch.zeros(())
    for batch in batches:
        nll = model(**batch)
        accelerator.backward(nll * accelerator.num_processes / tokens)
        total += nll.detach()
    return total


def perturb_rank_1(accelerator: Any, model: Any, *rest: Any) -> Any:
    update = HONEST["train_step"](accelerator, model, *rest)
    with torch.no_grad():
        next(model.parameters())[0, 0] += RANK * 1e-3
    return update


def rows_of_rank_0(collate: Collate, items: list[Any]) -> Any:
    """Every rank but the first reads the rows again that it has read in its first step."""
    collate.first = getattr(collate, "first", items)  # type: ignore[attr-defined]
    return HONEST["collate"](collate, collate.first if RANK and len(items) == len(collate.first) else items)  # type: ignore[attr-defined]


PLANT = {
    "nothing": (step.Accumulation, "__call__", step.Accumulation.__call__),
    "a mean of means": (step.Accumulation, "__call__", controls.mean_of_means),
    "a forgotten data-parallel factor": (step, "data_parallel_size", lambda accelerator: 1),
    "a missing sync": (step.Accumulation, "__call__", controls.never_synced),
    "a sync in every micro-batch": (step.Accumulation, "__call__", sync_in_every_micro_batch),
    "a scheduler stepped per rank": (loop, "lr_at", lambda made, config: optim.lr_at(made * WORLD, config)),
    "unshifted token counts": (step, "count_targets", controls.unshifted),
    "a rank reading another's rows": (Collate, "__call__", rows_of_rank_0),
    "buckets that are not settled": (observers, "settle_buckets", lambda accelerator, model, batch: None),
    "one weight perturbed on rank 1": (loop, "train_step", perturb_rank_1),
}

if __name__ == "__main__":
    owner, name, value = PLANT[os.environ["PLANTED"]]
    setattr(owner, name, value)
    launch(gpt.main)
