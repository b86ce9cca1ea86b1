"""The shift of labels, and the losses of a linear head that never hold all logits.

A loss is computed from the logits of a chunk of positions at a time. The logits of a chunk are
overwritten with their gradient, one tile after the other, while a tile is in the cache.

The gradients of a summed loss are computed in the forward pass, as in Liger (Hsu et al. 2024,
arXiv:2410.10989), so that logits are computed once. The backward pass computes them if every
position has an incoming gradient of its own, or if products are in fp16: only the backward pass
knows the loss scale. If there is more than one chunk, it then computes the logits again.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.interfaces.batches import IGNORED, padded_size

# How many logits a device holds at a time: those of a chunk of positions. They are constants,
# because bits must not depend on the machine. 32 MiB in float32; a GPU wants few large products.
CHUNK_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 30}
# How many of them become their gradient at a time. 2 MiB stay in a processor's cache.
TILE_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}

# Fast kernels of GPUs need rows of logits that begin at multiples of so many bytes. Otherwise the
# vocabulary is padded to a multiple of so many tokens.
_ALIGNMENT_BYTES = 16
_PADDED_MULTIPLE = 128


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

    The products are computed in the dtype of ``hidden``, or in autocast's. The loss, its gradient
    and sums over chunks are computed in float32 (or float64). Repeated calls return the same bits.
    There is no second derivative, and one backward pass.

    Args:
        hidden: [B, T, C].
        weight: [V, C].
        targets: [B, T], already shifted.
        bias: [V].
        softcap: replace logits by softcap * tanh(logits / softcap), as in Gemma 2. It is computed
            in float32, in whatever dtype the products are.
        target_positions: indices of :func:`target_positions_of`. Only these positions are
            projected to logits. The default is all.
        per_target: return the value of each target instead of the sum: [B * T], or [N] for
            ``target_positions``.
    """
    hidden = hidden.flatten(0, -2)
    targets = targets.flatten()

    if target_positions is not None:
        indices = target_positions.clamp(min=0)
        hidden = hidden.index_select(0, indices)
        is_padding = target_positions < 0
        targets = targets[indices].where(~is_padding, IGNORED)

    tile_loss = _tile_loss
    # The bits of compiled code depend on which shapes came first.
    if hidden.is_cuda and not torch.are_deterministic_algorithms_enabled():
        tile_loss = _compiled_tile_loss()
    return _linear_loss(
        hidden, weight, targets, bias, functools.partial(tile_loss, softcap), per_target
    )


def linear_values(
    hidden: Tensor,
    weight: Tensor,
    targets: Any,
    function: Callable[[Tensor, Any], Tensor],
    bias: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return ``function(F.linear(hidden, weight, bias), targets).sum(0)`` in bounded memory.

    The products are computed as in :func:`linear_nll`.

    Args:
        hidden: [N, C].
        weight: [V, C].
        targets: what the logits are compared with. ``targets[slice]`` is that of some positions.
        function: takes float32 logits [n, V] and the targets of their positions. It returns values
            [n, M], of which the first is the loss. The others have no gradient.
        bias: [V].
        softcap: of the logits, as in :func:`linear_nll`.
    """
    tile_loss = functools.partial(_tile_values, function, softcap)
    return _linear_loss(hidden, weight, targets, bias, tile_loss, per_target=False)


def _linear_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Any,
    bias: Tensor | None,
    tile_loss: Callable[..., Tensor],
    per_target: bool,
) -> Tensor:
    hidden = hidden.to(matmul_dtype(hidden.device, hidden.dtype))
    result: Tensor = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        targets,
        tile_loss,
        per_target,
        torch.is_grad_enabled(),  # it is off inside an autograd function
    )
    return result


class _LinearLoss(torch.autograd.Function):
    """The sum of a loss, or its values, and its gradients.

    See :func:`linear_nll` and :func:`linear_values`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Any,
        tile_loss: Callable[..., Tensor],
        per_target: bool,
        is_grad_enabled: bool,
    ) -> Tensor:
        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        ctx.is_deferred = per_target or hidden.dtype == torch.float16
        compute = functools.partial(_over_chunks, tile_loss, ctx.needs_input_grad, targets)

        incoming = None
        if needs_grad and not ctx.is_deferred:
            incoming = torch.ones(len(hidden), device=hidden.device)
        values, gradients, logits = compute(incoming, None, hidden, weight, bias)

        if needs_grad and ctx.is_deferred:
            # If there is only one chunk, its logits need not be computed again.
            all_logits = logits if len(logits) == len(hidden) else None
            ctx.save_for_backward(all_logits, hidden, weight, bias)
            ctx.compute = compute  # and with it the targets
        else:
            # Not saved: autograd would keep them to the end of the backward pass, and so copy them.
            ctx.gradients = gradients
        ctx.has_metrics = values[0].dim() == 2
        return torch.cat(values) if per_target else torch.stack([v.sum(0) for v in values]).sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.has_metrics:
            incoming = incoming[0]
        if ctx.is_deferred:
            all_logits, hidden, weight, bias = ctx.saved_tensors
            incoming = incoming.expand(len(hidden))
            _, gradients, _ = ctx.compute(incoming, all_logits, hidden, weight, bias)
        else:
            gradients = ctx.gradients
            if gradients is None:
                raise RuntimeError("this loss allows one backward pass, and this is the second")
            ctx.gradients = None
            for gradient in gradients:
                if gradient is not None:
                    gradient.mul_(incoming)  # a copy would take as much memory again
        return *gradients, None, None, None, None


def _over_chunks(
    tile_loss: Callable[..., Tensor],
    needs: tuple[bool, ...],
    targets: Any,
    incoming: Tensor | None,
    all_logits: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
    """Compute a loss and its gradients, a chunk of positions at a time.

    Args:
        tile_loss: :func:`_tile_loss` or :func:`_tile_values`, with its first arguments.
        needs: whether each input needs a gradient.
        targets: [N], or another object that returns those of a slice of positions.
        incoming: the gradient of each value, [N]. ``None`` computes no gradients.
        all_logits: [N, V], if they are known. They are overwritten.
        hidden: [N, C].
        weight: [V, C].
        bias: [V].

    Returns:
        The values of each tile of positions, the gradients of the last three arguments, and the
        logits of the last chunk.
    """
    vocabulary = len(weight)
    head = _cast_and_padded(weight, hidden)
    head_bias = None if bias is None else _cast_and_padded(bias, hidden)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    gradients: list[Tensor | None] = [None, None, None]
    for index, tensor in enumerate((hidden, head, head_bias)):
        if incoming is not None and tensor is not None and needs[index]:
            gradients[index] = torch.zeros_like(tensor, dtype=wide)
    hidden_gradient, weight_gradient, bias_gradient = gradients

    values = []
    logits = hidden[:0] if all_logits is None else all_logits
    for chunk in _slices(len(hidden), vocabulary, CHUNK_LOGITS, hidden.device):
        if all_logits is None:
            logits = hidden[:0]  # frees those of the chunk before
            logits = F.linear(hidden[chunk], head, head_bias)
        chunk_targets = targets[chunk]
        for tile in _slices(len(logits), vocabulary, TILE_LOGITS, hidden.device):
            tile_incoming = None if incoming is None else incoming[chunk][tile]
            values.append(tile_loss(logits[tile, :vocabulary], tile_incoming, chunk_targets[tile]))

        # By now, the logits are their gradient. That of padding is 0.
        if hidden_gradient is not None:
            hidden_gradient[chunk] = logits @ head
        if weight_gradient is not None:
            _add_product(weight_gradient, logits.T, hidden[chunk])
        if bias_gradient is not None:
            bias_gradient += logits.sum(0, dtype=wide)

    for index, tensor in enumerate((hidden, weight, bias)):
        gradient = gradients[index]
        if gradient is not None and tensor is not None:
            gradients[index] = gradient[: len(tensor)].to(tensor.dtype)
    return values, gradients, logits


def _slices(
    length: int, vocabulary: int, limits: dict[str, int], device: torch.device
) -> list[slice]:
    """Return slices of positions [N] which have about as many logits as may be held at a time."""
    size = max(limits.get(device.type, limits["cpu"]) // vocabulary, 1)
    return [slice(start, start + size) for start in range(0, max(length, 1), size)]


def _cast_and_padded(values: Tensor, hidden: Tensor) -> Tensor:
    """Return the weight or bias of a head as it is multiplied with hidden states.

    GPT-2 has 50,257 tokens. A row of as many 16-bit logits is not aligned to 16 bytes, so the fast
    kernels of a GPU cannot be used for any of the three products. The head is then padded with rows
    of zeros, whose logits the loss ignores.
    """
    vocabulary = len(values)
    is_aligned = vocabulary * hidden.element_size() % _ALIGNMENT_BYTES == 0
    if is_aligned or not hidden.is_cuda:
        return values.to(hidden.dtype)
    padding = values.new_zeros(-vocabulary % _PADDED_MULTIPLE, *values.shape[1:])
    return torch.cat([values, padding]).to(hidden.dtype)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a matrix product to a total in float32 (or wider)."""
    if total.dtype == b.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def _tile_loss(
    softcap: float | None, logits: Tensor, incoming: Tensor | None, targets: Tensor
) -> Tensor:
    """Return the nll of each target in nats, and overwrite the logits with their gradient.

    Args:
        softcap: of the logits.
        logits: [n, V].
        incoming: the gradient of each nll, [n]. ``None`` leaves the logits as they are.
        targets: [n]. The nll of an ignored target is 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        wide = (wide / softcap).tanh() * softcap
    is_target = targets[:, None] != IGNORED
    columns = targets[:, None].where(is_target, 0)
    log_p = wide.log_softmax(1)
    nll = -(log_p.gather(1, columns) * is_target)[:, 0]
    if incoming is None:
        return nll

    # The probabilities, less one at the target.
    if torch.compiler.is_compiling():
        # In one pass. Comparing 64-bit columns would take longer than reading the logits.
        tokens = torch.arange(logits.shape[1], device=logits.device, dtype=torch.int32)
        gradient = log_p.exp() - (tokens == columns.int()).to(log_p.dtype)
    else:
        minus_one = torch.full_like(columns, -1, dtype=log_p.dtype)
        gradient = log_p.exp_().scatter_add_(1, columns, minus_one)
    gradient.mul_(incoming[:, None] * is_target)
    if softcap is not None:
        gradient *= 1 - (wide / softcap).square()  # tanh' is 1 - tanh^2
    logits.copy_(gradient)
    return nll


def _tile_values(
    function: Callable[[Tensor, Any], Tensor],
    softcap: float | None,
    logits: Tensor,
    incoming: Tensor | None,
    targets: Any,
) -> Tensor:
    """Return values [n, M] of a function, and overwrite the logits with the gradient of the first.

    The arguments are those of :func:`linear_values` and :func:`_tile_loss`.
    """
    with torch.set_grad_enabled(incoming is not None):
        wide = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        wide.requires_grad_(incoming is not None)
        values = function(softcapped(wide, softcap), targets)
        losses = values[:, 0]
    if incoming is not None:
        (gradient,) = torch.autograd.grad(losses, wide, incoming.to(losses.dtype))
        logits.copy_(gradient)
    return values.detach()


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return softcap * tanh(logits / softcap), or the logits if there is no softcap."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@functools.cache
def _compiled_tile_loss() -> Callable[..., Tensor]:
    """Compile :func:`_tile_loss` for a GPU, if something can compile it."""
    try:
        torch.compile(lambda x: x.exp())(torch.zeros(8, device="cuda"))
    except Exception:  # each compiler raises its own errors
        return _tile_loss
    return torch.compile(_tile_loss)
