"""recipes/gpt.py, or preference.py, with a known bug, for test_verify.py: PLANTED names it."""

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import gpt
import preference

from llmtrain import launch
from llmtrain.data.loader import Collate, Read
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


def perturb_rank_1(accelerator: Any, model: Any, *rest: Any, **named: Any) -> Any:
    update = HONEST["train_step"](accelerator, model, *rest, **named)
    with torch.no_grad():
        next(model.parameters())[0, 0] += RANK * 1e-3
    return update


def rows_of_rank_0(collate: Collate, read: Read) -> Any:
    """Every rank but the first reads the rows again that it has read in its first step."""
    first = collate.first = getattr(collate, "first", read)  # type: ignore[attr-defined]
    return HONEST["collate"](
        collate, first if RANK and len(read.slots) == len(first.slots) else read
    )


def mean_of_ranks_means(
    accelerator: Any, model: Any, batches: Any, tokens: torch.Tensor
) -> torch.Tensor:
    return torch.stack([step.plain_of(model).units(batch) for batch in batches]).sum() * WORLD  # type: ignore[operator]


def parted_pairs(collate: Collate, read: Read) -> Any:
    """The first rank has the chosen answers of the rows, the second the rejected ones."""
    made = HONEST["collate"](collate, read)
    for batch in made.batches if WORLD > 1 else ():
        batch["labels"][(batch["answers"] & 1) != RANK] = -100
    return made


def survey_of_one_rank(accelerator: Any, model: Any, batches: Any, tokens: Any, enter: Any) -> Any:
    plain: Any = step.plain_of(model)
    if not plain.balance:
        return {}, None
    with torch.no_grad():
        counts = torch.stack([model(**batch, survey=True) for batch in batches]).sum(0)
    load, told = plain.loads(counts, tokens)
    return {"load": load}, told


PLANT = {
    "nothing": (step.Accumulation, "__call__", step.Accumulation.__call__),
    "a mean of means": (step.Accumulation, "__call__", controls.mean_of_means),
    "a forgotten data-parallel factor": (step, "data_parallel_size", lambda accelerator: 1),
    "a missing sync": (step.Accumulation, "__call__", controls.never_synced),
    "a sync in every micro-batch": (step.Accumulation, "__call__", sync_in_every_micro_batch),
    "a scheduler stepped per rank": (
        loop,
        "lr_at",
        lambda made, config: optim.lr_at(made * WORLD, config),
    ),
    "unshifted token counts": (step, "count_targets", controls.unshifted),
    "a rank reading another's rows": (Collate, "__call__", rows_of_rank_0),
    "buckets that are not settled": (
        observers,
        "settle_buckets",
        lambda accelerator, model, batch: None,
    ),
    "one weight perturbed on rank 1": (loop, "train_step", perturb_rank_1),
}
OF_PAIRS = {
    "a mean of ranks' means of pairs": (step, "count_units", mean_of_ranks_means),
    "a pair split over two processes": (Collate, "__call__", parted_pairs),
    "a baseline of each process": (step, "survey", survey_of_one_rank),
}

if __name__ == "__main__":
    bug = os.environ["PLANTED"]
    owner, name, value = (PLANT | OF_PAIRS)[bug]
    setattr(owner, name, value)
    launch(preference.main if bug in OF_PAIRS else gpt.main)
