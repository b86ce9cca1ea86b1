"""Updates of weights in bfloat16 that lose no small updates.

A bfloat16 number has 8 significant bits. An update below a 500th of a weight would be lost by
rounding, and most updates are. So the optimizer keeps what rounding has cut off, the
*compensation*, in a second bfloat16 number, and adds it to the next update (Kahan 1965, DOI
10.1145/363707.363723; for training: Zamirai et al. 2020, arXiv:2010.06192). Together, a weight and
its compensation have about 16 significant bits.
"""

import torch


def needs_compensation(parameter: torch.Tensor) -> bool:
    """Return whether the weights of a parameter are too coarse for small updates."""
    return parameter.dtype == torch.bfloat16


def update_weights(
    weights: torch.Tensor,
    update: torch.Tensor,
    *,
    decay: float | torch.Tensor,
    compensation: torch.Tensor | None,
    skip: torch.Tensor | None = None,
) -> None:
    """Multiply weights by a factor and add an update, in float32.

    Args:
        weights: the weights, which are changed.
        update: float32, of the same shape.
        decay: the factor.
        compensation: what rounding has cut off the weights, for weights in bfloat16. It is changed.
        skip: a boolean scalar. If it is true, nothing is changed.
    """
    total = weights.to(torch.float32, copy=True)
    if compensation is not None:
        total.add_(compensation)
    total.mul_(decay).add_(update)

    rounded = total.to(weights.dtype)
    if compensation is not None:
        assign(compensation, total.sub_(rounded), skip)
    assign(weights, rounded, skip)


def assign(target: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    """Copy a value into a tensor, unless the boolean scalar ``skip`` is true."""
    if skip is not None:
        value = torch.where(skip, target, value.to(target.dtype))
    target.copy_(value)
