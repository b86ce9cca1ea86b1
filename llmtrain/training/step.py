"""One training step: the gradient of the mean loss over the global batch, however it is split."""

import math
from collections.abc import Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.device_numbers import DeviceScalars
from llmtrain.errors import UserError, first_line, is_out_of_memory
from llmtrain.files import shipped_config
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import StepResult, StopVote
from llmtrain.parallel.engine import Engine
from llmtrain.training.device_skip import can_skip_on_device, skipped_on_device


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
            _step_optimizer(optimizer.optimizer, is_sharded=engine.ranks.is_sharded)
        optimizer.optimizer.zero_grad()
        return result

    # Reading the norm waits for the device.
    is_finite = math.isfinite(result.grad_norm)
    engine.phases.begin("optimizer")
    # The loss scaler of fp16 skips the step itself and lowers its scale.
    if is_finite or engine.accelerator.scaler is not None:
        _step_optimizer(optimizer, is_sharded=engine.ranks.is_sharded)
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


def _step_optimizer(
    optimizer: torch.optim.Optimizer | AcceleratedOptimizer, is_sharded: bool
) -> None:
    """Let the optimizer make a step.

    Raises:
        UserError: if it fails and the weights are sharded, which many optimizers do not support.
    """
    try:
        optimizer.step()
    except Exception as error:
        if not is_sharded or isinstance(error, UserError) or is_out_of_memory(error):
            raise
        unwrapped = getattr(optimizer, "optimizer", optimizer)
        name = type(unwrapped).__name__
        raise UserError(
            f"the optimizer {name} fails on sharded weights ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); use {shipped_config('multi_gpu')}, which does not "
            "shard, or another optimizer."
        ) from error
