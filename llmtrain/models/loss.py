"""The shift of labels, and the summed loss that every model of this package returns."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.interfaces.batches import IGNORED
from llmtrain.models import nll_kernels
from llmtrain.padded_sizes import padded_size


def matmul_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of matrix products: that of autocast, or ``dtype`` if autocast is off.

    Autocast leaves float64 as it is.
    """
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def targets_of(labels: Tensor) -> Tensor:
    """Return the targets of all positions but the last: [B, T] -> [B, T - 1].

    Labels have the positions of their tokens. Every loss shifts them here, and no data do.
    """
    return labels[:, 1:]


def inputs_of(input_ids: Tensor) -> Tensor:
    """Return the tokens that have a next token to predict: [B, T] -> [B, T - 1]."""
    return input_ids[:, :-1]


def target_positions_of(labels: Tensor, padded: bool = False) -> Tensor:
    """Return the indices of the targets that are not ignored, for :func:`linear_nll`.

    The labels must be on the host. On a device, reading the number of targets would mean waiting.

    Args:
        labels: [B, T], not shifted.
        padded: pad with -1 to one of a few sizes, so that what is computed has one of few shapes.

    Returns:
        int64 [N], indices into the flattened targets [B * (T - 1)].
    """
    is_target = targets_of(labels).numpy() != IGNORED
    positions = torch.from_numpy(np.flatnonzero(is_target))
    if not padded:
        return positions

    padding = padded_size(len(positions)) - len(positions)
    return F.pad(positions, (0, padding), value=-1)


def summed_nll(logits: Tensor, targets: Tensor, per_target: bool = False) -> Tensor:
    """Return the negative log-likelihood in nats, summed over the targets that are not ignored.

    It is computed in float32 (or wider). It is a sum, because means do not add up over
    micro-batches and processes.

    Args:
        logits: [B, T, V].
        targets: [B, T], already shifted.
        per_target: return the value of each target, [B * T], instead of the sum.
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    return F.cross_entropy(
        logits.flatten(0, 1),
        targets.flatten(),
        ignore_index=IGNORED,
        reduction="none" if per_target else "sum",
    )


def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    target_positions: Tensor | None = None,
    per_target: bool = False,
) -> Tensor:
    """Return ``summed_nll(F.linear(hidden, weight, bias), targets)`` in bounded memory.

    The products are computed in the dtype of ``hidden``, or in autocast's. Logits, their sums and
    the gradient of ``hidden`` are added up in float32 (or float64). Repeated calls return the same
    bits. There is no second derivative. :mod:`llmtrain.models.nll_kernels` says how the number of
    logits in memory is bounded.

    Args:
        hidden: [B, T, C].
        weight: [V, C].
        targets: [B, T], already shifted.
        bias: [V].
        softcap: replace logits by softcap * tanh(logits / softcap), as in Gemma 2. It is computed
            in float32, in whatever dtype the products are.
        target_positions: indices of :func:`target_positions_of`. Only these positions meet the
            head. The default is all.
        per_target: return the value of each target instead of the sum: [B * T], or [N] for
            ``target_positions``.

    Raises:
        IndexError: if the number of targets is not the number of positions. (A target outside the
            vocabulary makes the result NaN instead: an error would have to wait for the device.)
    """
    if hidden.shape[:-1] != targets.shape:
        raise IndexError(
            f"There must be one target for each position, but targets are {tuple(targets.shape)} "
            f"and positions {tuple(hidden.shape[:-1])}."
        )
    hidden = hidden.flatten(0, -2)
    targets = targets.flatten()

    if target_positions is not None:
        indices = target_positions.clamp(min=0)
        hidden = hidden.index_select(0, indices)
        is_padding = target_positions < 0
        targets = targets[indices].where(~is_padding, IGNORED)

    hidden = hidden.to(matmul_dtype(hidden.device, hidden.dtype))

    vocabulary = len(weight)
    # The gradient in place is rounded before backward applies the loss scale, which fp16 needs.
    needs_loss_scale = hidden.dtype == torch.float16
    if not needs_loss_scale and nll_kernels.fits_in_place(hidden, vocabulary):
        return nll_kernels.in_place_nll(
            hidden,
            weight,
            targets,
            bias=bias,
            softcap=softcap,
            per_target=per_target,
        )

    nll = nll_kernels.blockwise_nll(hidden, weight, targets, bias=bias, softcap=softcap)
    return nll if per_target else nll.sum()
