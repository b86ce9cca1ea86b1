"""Two ways to compute the loss of a linear head with a bounded number of logits in memory.

**In place.** If all logits fit, they are turned into their own gradient in place, a few rows at a
time. On a CPU that halves the time in bf16, most of which is memory traffic.

**Blockwise.** Otherwise the head is applied one block of the vocabulary at a time, twice: forward
keeps log-sum-exps, and backward computes the logits of a block again. This is the idea of Wijmans
et al. 2024, arXiv:2411.09009, in plain matrix products.

The alternative is to go over blocks of tokens, and to compute the gradients already in forward
(Hsu et al. 2024, arXiv:2410.10989). That computes logits once, but every block then reads and
writes the whole gradient of the head. With as little memory it took as long on a CPU in float32,
and 1.7 times as long in bf16; with twice as much memory, 0.8 and 1.1 times. It also could not keep
fp16 in its range, because forward does not know the loss scale.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.interfaces.batches import IGNORED


class LogitLimits(NamedTuple):
    """How many logits a device computes at a time.

    They are constants, because bits must not depend on the machine.

    Attributes:
        in_place: the most that :func:`in_place_nll` may hold.
        tile: how many of these it works on at a time.
        block: how many :func:`blockwise_nll` computes at a time, about.
    """

    in_place: int
    tile: int
    block: int


# On a CPU, 32 MiB in float32, and tiles of 2 MiB, which stay in a processor's cache. A GPU wants
# few large products: 2 GiB in bfloat16.
LOGIT_LIMITS = {
    "cpu": LogitLimits(in_place=1 << 23, tile=1 << 19, block=1 << 23),
    "cuda": LogitLimits(in_place=1 << 30, tile=1 << 26, block=1 << 28),
}

# A block of the vocabulary has a multiple of so many tokens, for even matrix products.
_BLOCK_MULTIPLE = 1024

# Fast kernels of GPUs need rows of logits that begin at multiples of so many bytes. Otherwise the
# vocabulary is padded to a multiple of so many tokens.
_ALIGNMENT_BYTES = 16
_PADDED_MULTIPLE = 128


def _limits(hidden: Tensor) -> LogitLimits:
    return LOGIT_LIMITS.get(hidden.device.type, LOGIT_LIMITS["cpu"])


def _cast(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if bias is None else bias.to(dtype)


def target_weights(targets: Tensor, vocabulary: int) -> Tensor:
    """Return the weight of each target: 1, or 0 if it is ignored, or NaN if it is not a token."""
    is_counted = targets != IGNORED
    is_outside = (targets < 0) | (targets >= vocabulary)
    return is_counted.float().masked_fill(is_counted & is_outside, float("nan"))


def fits_in_place(hidden: Tensor, vocabulary: int) -> bool:
    """Return whether the logits of ``hidden`` [N, C] are few enough for :func:`in_place_nll`."""
    return len(hidden) * vocabulary <= _limits(hidden).in_place


def in_place_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    softcap: float | None,
    per_target: bool,
) -> Tensor:
    """Return the nll of targets in nats, computed from all logits at once.

    Args:
        hidden: [N, C].
        weight: [V, C].
        targets: [N].
        bias: [V].
        softcap: of the logits.
        per_target: return the nll of each target, [N], instead of the sum.
    """
    nll: Tensor = _InPlaceNLL.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        targets,
        softcap,
        per_target,
        torch.is_grad_enabled(),  # it is off inside an autograd function
    )
    return nll


class _InPlaceNLL(torch.autograd.Function):
    """See :func:`in_place_nll`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        softcap: float | None,
        per_target: bool,
        is_grad_enabled: bool,
    ) -> Tensor:
        dtype = hidden.dtype
        vocabulary = len(weight)
        rows = _rows_of_products(hidden, vocabulary)
        cast_weight = _cast_and_padded(weight, dtype, rows)
        cast_bias = None if bias is None else _cast_and_padded(bias, dtype, rows)
        padded_logits = F.linear(hidden, cast_weight, cast_bias)
        logits = padded_logits[:, :vocabulary]

        needs_grad = is_grad_enabled and any(ctx.needs_input_grad)
        compiled_kernel = _compiled_kernel() if hidden.is_cuda else None
        if compiled_kernel is None:
            kernel = _nll_and_gradient
            tile_rows = max(_limits(hidden).tile // max(vocabulary, 1), 1)
        else:
            kernel = compiled_kernel
            tile_rows = max(len(logits), 1)

        logit_tiles = torch.split(logits, tile_rows)
        target_tiles = torch.split(targets[:, None], tile_rows)
        nlls = []
        for logit_tile, target_tile in zip(logit_tiles, target_tiles, strict=True):
            nll = kernel(logit_tile, target_tile, softcap, needs_grad)
            nlls.append(nll if per_target else nll.sum())

        if needs_grad:
            # By now, the logits are their gradient. Those of padding are 0 from the beginning.
            ctx.save_for_backward(hidden, cast_weight, padded_logits)
        ctx.vocabulary = vocabulary
        ctx.weight_dtype = weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.cat(nlls) if per_target else torch.stack(nlls).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, grad = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]

        if incoming.ndim:  # one for each target
            # The saved gradient is overwritten, because a copy would take as much memory again.
            # Autograd notices: a second backward pass raises an error.
            grad = grad.mul_(incoming[:, None].to(grad.dtype))
            incoming = incoming.new_ones(())

        grad_hidden = None
        if needs_hidden:
            grad_hidden = (grad @ weight).mul_(incoming)

        grad_weight = None
        if needs_weight:
            grad_weight = (grad.T @ hidden)[: ctx.vocabulary].to(ctx.weight_dtype).mul_(incoming)

        grad_bias = None
        if needs_bias:
            grad_bias = grad.sum(0, dtype=incoming.dtype)[: ctx.vocabulary].mul_(incoming)
            grad_bias = grad_bias.to(ctx.bias_dtype)

        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _rows_of_products(hidden: Tensor, vocabulary: int) -> int:
    """Return for how many tokens logits are computed, which is at least the vocabulary.

    GPT-2 has 50,257 tokens. A row of as many 16-bit logits is not aligned to 16 bytes, so the fast
    kernels of a GPU cannot be used for any of the three products. The weight is then padded with
    rows of zeros, whose logits the loss ignores.
    """
    is_aligned = vocabulary * hidden.element_size() % _ALIGNMENT_BYTES == 0
    if is_aligned or not hidden.is_cuda:
        return vocabulary
    return -(-vocabulary // _PADDED_MULTIPLE) * _PADDED_MULTIPLE


def _cast_and_padded(values: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """Return values in another dtype, and zeros after them up to a number of rows."""
    if len(values) == rows:
        return values.to(dtype)
    padded = values.new_zeros(rows, *values.shape[1:], dtype=dtype)
    padded[: len(values)] = values
    return padded


def _nll_and_gradient(
    logits: Tensor, targets: Tensor, softcap: float | None, needs_grad: bool
) -> Tensor:
    """Return the nll of each target, [N], and overwrite logits with the gradient of the sum.

    Args:
        logits: [N, V]. They stay as they are if no gradient is needed.
        targets: [N, 1].
        softcap: of the logits.
        needs_grad: overwrite the logits.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    vocabulary = logits.shape[1]

    capped = logits
    if softcap is not None:
        capped = (logits.to(dtype) / softcap).tanh_().mul_(softcap)
    log_p = torch.log_softmax(capped, 1, dtype=dtype)

    columns = targets.clamp(0, vocabulary - 1)
    weights = target_weights(targets, vocabulary).to(dtype)
    nll = -(log_p.gather(1, columns) * weights)[:, 0]
    if not needs_grad:
        return nll

    minus_one = torch.full_like(targets, -1, dtype=dtype)
    grad = log_p.exp_().scatter_add_(1, columns, minus_one)
    if softcap is not None:
        slope = capped.div_(softcap).square_().neg_().add_(1)  # tanh' is 1 - tanh^2
        grad.mul_(slope)
    logits.copy_(grad.mul_(weights))
    return nll


class _FusedKernel:
    """The same as :func:`_nll_and_gradient`, in two passes over the logits that can be compiled.

    Everything that a row needs only once is computed between the two passes. A compiler would
    otherwise repeat it for each of the row's logits.

    Args:
        compile: compiles a function. The default leaves the functions as they are.
    """

    def __init__(self, compile: Callable[[Callable[..., Any]], Any] = lambda function: function):
        self._log_total = compile(_log_total)
        self._write_gradient = compile(_write_gradient)

    def __call__(
        self, logits: Tensor, targets: Tensor, softcap: float | None, needs_grad: bool
    ) -> Tensor:
        vocabulary = logits.shape[1]
        columns = targets.clamp(0, vocabulary - 1)
        log_total: Tensor = self._log_total(logits, softcap)
        weights = target_weights(targets, vocabulary).to(log_total.dtype)

        target_logits = _capped(logits.gather(1, columns), softcap)
        nll = ((log_total - target_logits) * weights)[:, 0]
        if needs_grad:
            # Comparing 64-bit columns would take longer than reading the logits.
            self._write_gradient(logits, log_total, columns.int(), weights, softcap)
        return nll


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logits in float32 (or wider), with the softcap."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is None:
        return logits
    return softcap * torch.tanh(logits / softcap)


def _log_total(logits: Tensor, softcap: float | None) -> Tensor:
    """Return the logarithm of the sum of exponentials of each row: [N, V] -> [N, 1]."""
    return _capped(logits, softcap).logsumexp(1, keepdim=True)


def _write_gradient(
    logits: Tensor, log_total: Tensor, columns: Tensor, weights: Tensor, softcap: float | None
) -> None:
    """Overwrite logits [N, V] with the gradient of the weighted sum of nlls.

    Args:
        logits: [N, V].
        log_total: of :func:`_log_total`, [N, 1].
        columns: int32, the column of each target, [N, 1].
        weights: of :func:`target_weights`, [N, 1].
        softcap: of the logits.
    """
    capped = _capped(logits, softcap)
    tokens = torch.arange(logits.shape[1], device=logits.device, dtype=columns.dtype)
    is_target = tokens == columns
    grad = torch.exp(capped - log_total) - is_target.to(capped.dtype)
    if softcap is not None:
        grad = grad * (1 - (capped / softcap).square())  # tanh' is 1 - tanh^2
    logits.copy_(grad * weights)


def _compiled_kernel() -> Callable[..., Tensor] | None:
    """Return a compiled :class:`_FusedKernel`, or ``None`` if it must not be compiled.

    It must not if algorithms have to be deterministic: the bits of compiled code depend on which
    shapes came first. Runs of one process may differ in that, so it is asked for in every call.
    """
    if torch.are_deterministic_algorithms_enabled():
        return None
    return _compile_for_gpu()


@functools.cache
def _compile_for_gpu() -> Callable[..., Tensor] | None:
    """Compile :class:`_FusedKernel`; return ``None`` if nothing can compile it."""
    try:
        torch.compile(lambda x: x.exp())(torch.zeros(8, device="cuda"))
    except Exception:  # each compiler raises its own errors
        return None

    return _FusedKernel(torch.compile)


def blockwise_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """Return the nll of each target in nats, [N], one block of the vocabulary at a time.

    Args:
        hidden: [N, C].
        weight: [V, C].
        targets: [N].
        bias: [V].
        softcap: of the logits.
    """
    nll: Tensor = _BlockwiseNLL.apply(  # type: ignore[no-untyped-call]
        hidden,
        weight,
        bias,
        targets,
        target_weights(targets, len(weight)),
        softcap,
    )
    return nll


class _BlockwiseNLL(torch.autograd.Function):
    """See :func:`blockwise_nll`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        target_weights: Tensor,
        softcap: float | None,
    ) -> Tensor:
        block_totals = []
        target_logits = torch.zeros(len(targets), 1, device=hidden.device)
        for block in _blocks(len(weight), hidden):
            logits, columns, is_inside = _block_logits(
                hidden,
                weight,
                bias,
                targets,
                softcap=softcap,
                block=block,
            )
            block_totals.append(logits.logsumexp(1))
            target_logits = torch.where(is_inside, logits.gather(1, columns), target_logits)

        # All blocks at once: a running sum would be rounded in every block.
        log_total = torch.stack(block_totals).logsumexp(0)
        ctx.save_for_backward(hidden, weight, bias, targets, target_weights, log_total)
        ctx.softcap = softcap
        return (log_total - target_logits[:, 0]) * target_weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, target_weights, log_total = ctx.saved_tensors
        softcap = ctx.softcap
        incoming = (target_weights.to(incoming.dtype) * incoming)[:, None]

        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_total.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None

        for block in _blocks(len(weight), hidden):
            logits, columns, is_inside = _block_logits(
                hidden,
                weight,
                bias,
                targets,
                softcap=softcap,
                block=block,
            )
            scale = incoming
            if softcap is not None:
                scale = incoming * (1 - (logits / softcap).square())

            # The probabilities, less one at the target.
            grad = logits.sub_(log_total[:, None]).exp_()
            grad.scatter_(1, columns, grad.gather(1, columns) - is_inside.to(grad.dtype))
            grad.mul_(scale)

            if grad_bias is not None:
                grad_bias[block] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ weight[block].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[block] = grad.T @ hidden

        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _blocks(vocabulary: int, hidden: Tensor) -> list[slice]:
    """Return blocks of the vocabulary, each with about as many logits as may be computed at a time.

    Args:
        vocabulary: its size.
        hidden: [N, C], the hidden states that meet the head.
    """
    tokens = _limits(hidden).block // max(len(hidden), 1)
    size = max(tokens // _BLOCK_MULTIPLE, 1) * _BLOCK_MULTIPLE
    return [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _block_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    softcap: float | None,
    block: slice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the logits of a block of the vocabulary, and find the targets in it.

    Returns:
        The logits [N, block], in float32 or wider, which may be overwritten. The column of each
        target, or of another token if the target is outside: int64 [N, 1]. And whether the target
        is in the block, bool [N, 1].
    """
    dtype = hidden.dtype
    block_bias = None if bias is None else bias[block]
    product = F.linear(hidden, weight[block].to(dtype), _cast(block_bias, dtype))
    logits = _capped(product, softcap)

    size = block.stop - block.start
    columns = targets[:, None] - block.start
    is_inside = (columns >= 0) & (columns < size)
    return logits, columns.clamp(0, size - 1), is_inside
