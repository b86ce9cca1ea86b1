"""One training step: the gradient of the mean loss over the global batch, however it is split."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.contract import Batch, ForwardBackward, MeasuresItself, SurveysBatches, Update
from llmtrain.models.loss import count_targets
from llmtrain.parallel.fsdp import clip_grad_norm
from llmtrain.parallel.mesh import data_parallel_size, model_parallel_size


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: Sequence[Batch],
    max_grad_norm: float,
    forward_backward: ForwardBackward | None = None,
    stop: bool = False,
    enter: Callable[[str], None] = lambda phase: None,
) -> Update:
    """Make one optimizer step with the gradient of the mean loss over the global batch.

    The mean is over all target tokens of the global batch, or over what the model counts instead
    (:class:`MeasuresItself`). Each backward pass adds the gradient of a micro-batch's *sum*,
    divided by the count of the whole global batch. If the norm of the gradient is not finite, no
    rank changes its weights. The host waits for the device once, to read the norm.

    Args:
        accelerator: the Accelerator of this run.
        model: what ``accelerator.prepare`` returned.
        optimizer: what ``accelerator.prepare`` returned.
        batches: this rank's micro-batches of the global batch.
        max_grad_norm: the gradient is scaled down to this norm if it is larger.
        forward_backward: computes the gradients, for parallel methods that own the passes. By
            default gradients are accumulated and reduced once.
        stop: whether this rank was asked to stop. The token count carries the vote to all ranks.
        enter: called with the name of each phase when it begins.
    """
    forward_backward = forward_backward or Accumulation(accelerator, model)
    plain = plain_of(model)

    enter("count")
    tokens, stops = count_tokens(accelerator, batches, stop)
    units = count_units(accelerator, model, batches, tokens)
    load, load_metric = survey(accelerator, model, batches, tokens, enter)

    if isinstance(plain, MeasuresItself):
        plain.measured()  # drop what earlier passes measured, such as trials of a compiler
    nll = forward_backward([batch | load for batch in batches], units)

    enter("norm")
    norm = clip_grad_norm(accelerator, model, max_grad_norm)
    # One read from the device for all four numbers. Float64 holds any count; MPS lacks it.
    wide = torch.float32 if norm.device.type == "mps" else torch.float64
    numbers = [number.to(tokens.device, wide) for number in (norm, tokens, stops, units)]
    grad_norm, token_count, stop_votes, unit_count = torch.stack(numbers).tolist()

    enter("optimizer")
    # The loss scaler of fp16 skips the step itself and lowers its scale.
    if math.isfinite(grad_norm) or accelerator.scaler is not None:
        optimizer.step()
    optimizer.zero_grad()

    return Update(
        nll=nll,
        tokens=int(token_count),
        grad_norm=grad_norm,
        stop=stop_votes > 0,
        survey=load_metric,
        units=int(unit_count),
        measured=plain.measured() if isinstance(plain, MeasuresItself) else None,
    )


def count_tokens(
    accelerator: Accelerator, batches: Sequence[Batch], stop: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the target tokens of the global batch, after the shift, and the votes to stop.

    One all-reduce carries both. Both are int64 scalars on the device.
    """
    mine = torch.stack([count_targets(batch["labels"]) for batch in batches]).sum()
    votes = torch.full_like(mine, stop)
    tokens, stops = accelerator.reduce(torch.stack([mine, votes]), reduction="sum")
    return tokens // model_parallel_size(accelerator), stops


def plain_of(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP and of a compiler."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def count_units(
    accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], tokens: torch.Tensor
) -> torch.Tensor:
    """Return what the loss of the global batch is divided by, an int64 scalar.

    That is the number of its target tokens, unless the model counts something else.
    """
    plain = plain_of(model)
    if not isinstance(plain, MeasuresItself):
        return tokens
    mine = torch.stack([plain.units(batch) for batch in batches]).sum()
    total: torch.Tensor = accelerator.reduce(mine, reduction="sum")
    return total // model_parallel_size(accelerator)


@torch.no_grad()
def survey(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[Batch],
    tokens: torch.Tensor,
    enter: Callable[[str], None] = lambda phase: None,
) -> tuple[Batch, torch.Tensor | None]:
    """Run the counting pass, if the model has a loss term that needs one.

    The pass has no gradients, and leaves the random numbers to the training pass.

    Returns:
        Extra inputs for ``forward``, and a value to log. Without such a term, ``{}`` and ``None``.
    """
    plain = plain_of(model)
    if not isinstance(plain, SurveysBatches) or not plain.balance:
        return {}, None

    enter("forward")
    devices = [accelerator.device] if accelerator.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        counts = torch.stack([model(**batch, survey=True) for batch in batches]).sum(0)

    enter("exchange")
    counts = accelerator.reduce(counts, reduction="sum") / model_parallel_size(accelerator)
    load, metric = plain.loads(counts, tokens)
    return {"load": load}, metric


class Accumulation:
    """A ``forward_backward`` that accumulates the gradient over the micro-batches.

    Args:
        accelerator: the Accelerator of this run.
        model: what ``accelerator.prepare`` returned.
        reduce: ``"once"`` sums the gradient over the ranks after the last micro-batch. ``"each"``
            sums after every micro-batch, so that a rank of a sharded model never holds more of the
            gradient than its own shard and one unwrapped unit.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        reduce: Literal["once", "each"] = "once",
    ) -> None:
        self.accelerator = accelerator
        self.model = model
        self.reduce = reduce
        # DDP and FSDP average over the replicas. Multiplying by their number undoes that.
        self.replicas = data_parallel_size(accelerator)

    def __call__(self, batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor:
        """Leave the gradient of sum(nll) / tokens in ``.grad``.

        ``tokens`` is what the loss of the global batch is divided by.

        Returns:
            This rank's summed nll, in nats.
        """
        total = torch.zeros((), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            is_last = i == len(batches) - 1
            sync = is_last or self.reduce == "each"
            with contextlib.nullcontext() if sync else self.accelerator.no_sync(self.model):
                nll = self.model(**batch)  # a sum, not a mean
                self.accelerator.backward(nll * self.replicas / tokens.clamp(min=1))
            total += nll.detach()
        return total
