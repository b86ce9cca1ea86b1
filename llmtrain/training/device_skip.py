"""Steps that change nothing if their gradient is not finite, which the device decides.

If the host decided, it would have to wait for the norm, and the device would then wait for the
host. The fused optimizers of torch can decide on the device: :class:`torch.amp.GradScaler` sets
``found_inf`` on them. The optimizers of this package take it, too.
"""

import contextlib
from collections.abc import Iterator

import torch

# Other fused optimizers are not safe: SGD leaves its momentum uninitialised if it skips its first
# step.
_TORCH_OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW)


def can_skip_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer takes ``found_inf``.

    A class of this package has the attribute ``skips_on_device``. A subclass needs its own, because
    its step may do more than the step that it inherits. For the same reason, an optimizer with
    hooks does not qualify: they would run although the step is skipped.
    """
    if _has_step_hooks(optimizer):
        return False
    kind = type(optimizer)
    if kind in _TORCH_OPTIMIZERS:
        return all(group["fused"] for group in optimizer.param_groups)
    if "skips_on_device" not in vars(kind):
        return False
    skips: bool = optimizer.skips_on_device  # type: ignore[attr-defined]
    return skips


def _has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether functions are called before or after each step of an optimizer."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


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


def found_inf_of(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return what decides whether a step of an optimizer changes anything, during that step."""
    found_inf: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf
