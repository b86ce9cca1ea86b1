"""One training step: the gradient of the mean loss over the global batch, however it is split."""

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.device_numbers import DeviceScalars
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.callback import StepResult, StopVote
from llmtrain.parallel.engine import Engine

# The optimizers of torch that can skip a step, if they are fused. Others are not safe: SGD leaves
# its momentum uninitialised if it skips its first step.
_SKIPPING_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)


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


# --- steps that change nothing if their gradient is not finite, which the device decides
#
# If the host decided, it would have to wait for the norm, and the device would then wait for the
# host. The fused optimizers of torch can decide on the device: torch.amp.GradScaler sets
# `found_inf` on them. The optimizers of this package take it, too.


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


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes ``found_inf``.

    A class of this package has the attribute ``skips_on_device``. A subclass needs its own, because
    its step may do more than the step that it inherits. For the same reason, an optimizer with
    hooks does not qualify: they would run although the step is skipped.
    """
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return False
    kind = type(optimizer)
    if kind in _SKIPPING_OPTIMIZERS:
        return all(group["fused"] for group in optimizer.param_groups)
    return "skips_on_device" in vars(kind) and bool(getattr(optimizer, "skips_on_device", False))


@contextlib.contextmanager
def skipped_on_device(
    optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None
) -> Iterator[None]:
    """Let the steps in the block change nothing if ``found_inf`` is 1.

    This sets the attributes that ``torch.amp.GradScaler.step`` sets, and removes them as it does.

    Args:
        optimizer: an optimizer that takes ``found_inf``.
        found_inf: float32 scalar; ``None`` if every step is made.
    """
    if found_inf is None:
        yield
        return

    optimizer.found_inf = found_inf  # type: ignore[attr-defined]
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del optimizer.found_inf  # type: ignore[attr-defined]
        del optimizer.grad_scale  # type: ignore[attr-defined]
