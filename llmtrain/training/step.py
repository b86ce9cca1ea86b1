"""One update: the gradient of the mean loss over the global batch, however it is split."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, cast

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
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
    enter: Callable[[str], None] = lambda phase: None,
) -> Update:
    """Make one update with the gradient of the mean loss over the global batch: over all its trained tokens.

    Of a model that counts something else, it is the mean over that. Where that gradient is not finite, no rank makes
    an update. Each backward pass adds the gradient of a micro-batch's *sum*, divided by the count of the whole batch.
    The host waits for the device once, to read the norm.

    Args:
        forward_backward: of a parallel method that owns the passes; else gradients are accumulated, reduced once.
        stop: whether this rank was asked to stop; the ranks tell each other with the token count.
        agree: where each rank has a gradient of its own: turns its norm into one that is finite only if all are.
        enter: is called with the name of each phase that begins.
    """
    enter("count")
    tokens, stops = count_tokens(accelerator, batches, stop)
    units = count_units(accelerator, model, batches, tokens)
    load, found = survey(accelerator, model, batches, tokens, enter)
    plain = plain_of(model)
    if isinstance(plain, MeasuresItself):
        plain.measured()  # passes that were tried before
    nll = (forward_backward or Accumulation(accelerator, model))(
        [batch | load for batch in batches], units
    )
    enter("norm")
    norm = clip_grad_norm(accelerator, model, max_grad_norm)
    norm = agree(norm) if agree is not None else norm
    wide = torch.float32 if norm.device.type == "mps" else torch.float64  # which holds any count
    numbers = [one.to(tokens.device, wide) for one in (norm, tokens, stops, units)]
    grad_norm, counted, stopped, of = torch.stack(numbers).tolist()
    enter("optimizer")
    if (
        math.isfinite(grad_norm) or accelerator.scaler is not None
    ):  # fp16's scaler skips, and lowers its scale
        optimizer.step()
    optimizer.zero_grad()
    measured = plain.measured() if isinstance(plain, MeasuresItself) else None
    return Update(nll, int(counted), grad_norm, stopped > 0, found, int(of), measured)


def count_tokens(
    accelerator: Accelerator, batches: Sequence[Batch], stop: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Count the trained tokens of the global batch, after the shift; and, in the same all-reduce, the votes to stop.

    Both are int64 scalars on the device.
    """
    mine = torch.stack([count_targets(batch["labels"]) for batch in batches]).sum()
    tokens, stops = accelerator.reduce(
        torch.stack([mine, torch.full_like(mine, stop)]), reduction="sum"
    )
    return tokens // model_parallel_size(accelerator), stops


def plain_of(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of DDP and of a compiler."""
    model = getattr(model, "_orig_mod", model)
    return model.module if isinstance(model, DistributedDataParallel) else model


def count_units(
    accelerator: Accelerator, model: nn.Module, batches: Sequence[Batch], tokens: torch.Tensor
) -> torch.Tensor:
    """Return what the loss of the global batch is divided by, an int64 scalar: its tokens, or what the model counts."""
    plain = plain_of(model)
    if not isinstance(plain, MeasuresItself):
        return tokens
    mine = torch.stack([plain.units(batch) for batch in batches]).sum()
    return cast(
        torch.Tensor, accelerator.reduce(mine, reduction="sum") // model_parallel_size(accelerator)
    )


@torch.no_grad()
def survey(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Iterable[Batch],
    tokens: torch.Tensor,
    enter: Callable[[str], None] = lambda phase: None,
) -> tuple[Batch, torch.Tensor | None]:
    """Return what ``forward`` takes for a part of the loss that depends on all these micro-batches, of all ranks.

    And what is told of it. To count it takes a pass without gradients, which draws no random numbers that the update
    would have drawn; of a model that has no such part, nothing is done.
    """
    if not isinstance(plain := plain_of(model), SurveysBatches) or not plain.balance:
        return {}, None
    enter("forward")
    with torch.random.fork_rng([accelerator.device] if accelerator.device.type == "cuda" else []):
        counts = torch.stack([model(**batch, survey=True) for batch in batches]).sum(0)
    enter("exchange")
    counts = accelerator.reduce(counts, reduction="sum") / model_parallel_size(accelerator)
    load, told = plain.loads(counts, tokens)
    return {"load": load}, told


class Accumulation:
    """A ``forward_backward`` that adds up the gradient over the micro-batches.

    It is reduced ``once``, in the last of them; or in ``each``, so that a rank of a sharded model never holds more of
    the gradient than its shard and that of one unit; or ``never``: each rank has the gradient of its own rows.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        reduce: Literal["once", "each", "never"] = "once",
    ) -> None:
        self.accelerator, self.model, self.reduce = accelerator, model, reduce
        self.replicas = data_parallel_size(accelerator)  # DDP and FSDP average over them: undo it

    def __call__(self, batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor:
        """Leave the gradient of sum(nll) / tokens (or units); returns this rank's summed nll, in nats."""
        total = torch.zeros((), device=self.accelerator.device)
        for i, batch in enumerate(batches):
            sync = self.reduce == "each" or (self.reduce == "once" and i == len(batches) - 1)
            with contextlib.nullcontext() if sync else self.accelerator.no_sync(self.model):
                nll = self.model(**batch)  # a sum, not a mean
                self.accelerator.backward(nll * self.replicas / tokens.clamp(min=1))
            total += nll.detach()
        return total
