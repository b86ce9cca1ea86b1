"""One training step: the gradient of the mean loss over the global batch, however it is split."""

import math
from collections.abc import Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.device_numbers import DeviceScalars
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import StepResult, StopVote
from llmtrain.parallel.engine import Engine
from llmtrain.training.optim import can_skip_on_device, skipped_on_device


def train_step(
    engine: Engine,
    optimizer: AcceleratedOptimizer,
    batches: Sequence[Batch],
    max_grad_norm: float,
    stop_requested: StopVote = False,
) -> StepResult:
    """Make one optimizer step with the gradient of the mean loss over the global batch.

    Every backward pass adds the gradient of a micro-batch's *sum*, divided by the denominator of
    the global batch. If the norm of the gradient is not finite, no rank changes its weights. If the
    optimizer can decide that on the device, the host does not wait for anything here.

    Args:
        engine: how this process computes.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: this rank's micro-batches of the global batch.
        max_grad_norm: the gradient is scaled down to this norm if it is larger.
        stop_requested: whether this rank was asked to stop, and how. The count carries the vote to
            all ranks.
    """
    engine.phases.begin("count")
    totals = engine.count(batches, stop_requested)

    extra = engine.objective.prepass(engine, batches, totals)
    sums = engine.forward_backward(batches, totals, extra)

    engine.phases.begin("norm")
    norm = engine.clip_grad_norm(max_grad_norm)
    is_skipped = ~torch.isfinite(norm)
    numbers = DeviceScalars(
        {
            "grad_norm": norm,
            "target_tokens": totals.target_tokens,
            "divisor": totals.divisor,
            "stop_votes": totals.stop_votes,
        },
        engine.device,
    )
    result = StepResult(sums, extra, is_skipped, numbers)

    if skips_on_device(engine, optimizer):
        engine.phases.begin("optimizer")
        with skipped_on_device(optimizer.optimizer, found_inf=is_skipped.to(torch.float32)):
            optimizer.optimizer.step()
        optimizer.optimizer.zero_grad()
        return result

    # Reading the norm waits for the device.
    is_finite = math.isfinite(result.grad_norm)
    engine.phases.begin("optimizer")
    # The loss scaler of fp16 skips the step itself and lowers its scale.
    if is_finite or engine.accelerator.scaler is not None:
        optimizer.step()
    optimizer.zero_grad()
    return result


def skips_on_device(engine: Engine, optimizer: AcceleratedOptimizer) -> bool:
    """Return whether the device decides if a step changes the weights.

    The loss scaler of fp16 decides by itself. Offloaded weights are on another device than the norm
    of their gradient. On MPS, torch's optimizers ignore ``found_inf``.
    """
    if engine.accelerator.scaler is not None or engine.ranks.sharding.cpu_offload:
        return False
    if engine.device.type == "mps":
        return False
    return can_skip_on_device(optimizer.optimizer)
