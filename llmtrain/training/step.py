"""One training step: the gradient of the mean loss over the global batch, however it is split."""

import math
from collections.abc import Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.errors import UserError, first_line, is_out_of_memory
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import StepResult
from llmtrain.parallel.engine import Engine
from llmtrain.shipped import shipped_config


def train_step(
    engine: Engine,
    optimizer: AcceleratedOptimizer,
    batches: Sequence[Batch],
    max_grad_norm: float,
    stop_requested: bool = False,
) -> StepResult:
    """Make one optimizer step with the gradient of the mean loss over the global batch.

    Every backward pass adds the gradient of a micro-batch's *sum*, divided by the denominator of
    the global batch. If the norm of the gradient is not finite, no rank changes its weights.
    The host waits for the device once, to read the norm.

    Args:
        engine: how this process computes.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: this rank's micro-batches of the global batch.
        max_grad_norm: the gradient is scaled down to this norm if it is larger.
        stop_requested: whether this rank was asked to stop. The count carries the vote to all
            ranks.
    """
    engine.phases.begin("count")
    totals = engine.count(batches, stop_requested)

    extra = engine.objective.prepass(engine, batches, totals)
    sums = engine.forward_backward(batches, totals.denominator, extra)

    engine.phases.begin("norm")
    norm = engine.clip_grad_norm(max_grad_norm)
    # One read from the device for all four numbers. Float64 holds any count; MPS lacks it.
    wide = torch.float32 if norm.device.type == "mps" else torch.float64
    numbers = torch.stack([number.to(engine.device, wide) for number in (norm, *totals)])
    grad_norm, target_tokens, denominator, stop_votes = numbers.tolist()

    engine.phases.begin("optimizer")
    # The loss scaler of fp16 skips the step itself and lowers its scale.
    if math.isfinite(grad_norm) or engine.accelerator.scaler is not None:
        _step_optimizer(optimizer, is_sharded=engine.ranks.is_sharded)
    optimizer.zero_grad()

    return StepResult(
        sums=sums,
        extra=extra,
        target_tokens=int(target_tokens),
        denominator=int(denominator),
        grad_norm=grad_norm,
        should_stop=stop_votes > 0,
    )


def _step_optimizer(optimizer: AcceleratedOptimizer, is_sharded: bool) -> None:
    """Let the optimizer make a step.

    Raises:
        UserError: if it fails and the weights are sharded, which many optimizers do not support.
    """
    try:
        optimizer.step()
    except Exception as error:
        if not is_sharded or isinstance(error, UserError) or is_out_of_memory(error):
            raise
        name = type(optimizer.optimizer).__name__
        raise UserError(
            f"the optimizer {name} fails on sharded weights ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); use {shipped_config('multi_gpu')}, which does not "
            "shard, or another optimizer."
        ) from error
