"""Engines for tests in one process, and what tests do with them."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.trainable import make_trainable
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.parallel.shards import local_shard
from llmtrain.training.loop import Loop
from llmtrain.training.periodic import Finish
from llmtrain.training.run import Run


class ScaledRows(Objective):
    """The mean nll per row that has targets, times a number that the prepass finds."""

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        nll = model.nll(**batch)
        rows = (batch["labels"][:, 1:] != -100).any(1).sum()
        return LossSums(nll * extra["factor"], metrics={"nll": nll, "rows": rows})

    def denominator(self, batch: Batch) -> torch.Tensor:
        return (batch["labels"][:, 1:] != -100).any(1).sum()

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        rows = engine.sum_over_batches(lambda model, batch: self.denominator(batch), batches)
        assert rows == totals.denominator
        return {"factor": 2.0 * rows}


def engine_of(
    accelerator: Accelerator, model: nn.Module, objective: Objective | None = None
) -> ReplicatedEngine:
    """Return an engine that computes with a model on this process.

    Args:
        accelerator: an Accelerator of one process.
        model: a model, prepared or not. It becomes trainable in place.
        objective: what is minimised; the mean nll per target token if it is left out.
    """
    return ReplicatedEngine(ranks_of(accelerator), make_trainable(model), objective=objective)


def parameter_bytes(model: nn.Module) -> tuple[int, int]:
    """Return the bytes of this rank's shards of the parameters, and of the full parameters."""
    local = 0
    full = 0
    for parameter in model.parameters():
        full += parameter.numel() * parameter.element_size()
        local += local_shard(parameter).numel() * parameter.element_size()
    return local, full


def split(batch: Batch, micro_batch: int) -> list[Batch]:
    """Return the micro-batches of a batch, of ``micro_batch`` rows each."""
    starts = range(0, len(batch["labels"]), micro_batch)
    return [_rows_from(batch, start, micro_batch) for start in starts]


def _rows_from(batch: Batch, start: int, count: int) -> Batch:
    return {name: column[start : start + count] for name, column in batch.items()}


def finish(run: Run, model: nn.Module) -> None:
    """End a run as the loop does after its last step."""
    run.settings.optim.max_steps = run.step
    unused: Any = None
    loop = Loop(run, engine_of(run.accelerator, model), optimizer=unused, batches=unused)
    Finish(loop).on_train_end()
