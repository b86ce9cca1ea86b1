"""The one place where labels are shifted, and the sum that every model of this package returns."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from llmtrain.contract import IGNORED
from llmtrain.parallel.collectives import all_reduce, copy_to, gather_from, shard_range
from llmtrain.parallel.mesh import to_local

_ROWS = 1024  # rows of the head at a time: a multiple of this, for even matrix products
_Mesh: TypeAlias = DeviceMesh | None


class _Limits(NamedTuple):
    """Numbers of logits; constants, for bits must not depend on the machine."""

    block: int  # computed at a time
    held: int  # that may be held
    tile: int  # of these, those that are worked on at a time


# 32 MiB in float32, and 2 MiB, which stay in a processor's cache; a GPU wants few large products: 2 GiB in bfloat16
_LIMITS = {"cpu": _Limits(1 << 23, 1 << 23, 1 << 19), "cuda": _Limits(1 << 28, 1 << 30, 1 << 26)}


def targets_of(labels: Tensor) -> Tensor:
    """Return what each position is to predict: [B, T] -> [B, T - 1]."""
    return labels[:, 1:]


def inputs_of(input_ids: Tensor) -> Tensor:
    """Return the positions that predict something: [B, T] -> [B, T - 1]. The last has no next token."""
    return input_ids[:, :-1]


def count_targets(labels: Tensor) -> Tensor:
    """Return the number of trained tokens in ``labels`` [B, T], counted after the shift; an int64 scalar."""
    return (targets_of(labels) != IGNORED).sum()


def summed_nll(logits: Tensor, targets: Tensor, each: bool = False) -> Tensor:
    """Return the negative log-likelihood in nats, summed over the targets that are not ignored.

    It is taken in float32 (or wider). It is no mean, for only a sum adds up over micro-batches and processes.

    Args:
        logits: [B, T, V].
        targets: [B, T], already shifted.
        each: return that of each target, [B * T].
    """
    logits, reduction = (
        logits.float() if logits.dtype != torch.float64 else logits,
        "none" if each else "sum",
    )
    return F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def trained_positions(labels: Tensor, padded: bool = False) -> Tensor:
    """Return which of the flattened targets of ``labels`` [B, T] are trained: int64 [N], for :func:`linear_nll`.

    Computed on the host, where their number is known. ``padded`` with -1 it is one of eight numbers between two powers
    of two, so that what is computed has one of few shapes.
    """
    found = torch.from_numpy(np.flatnonzero(targets_of(labels).numpy() != IGNORED))
    return F.pad(found, (0, padded_size(len(found)) - len(found)), value=-1) if padded else found


def padded_size(count: int) -> int:
    """Return the next of eight numbers between two powers of two; at least 64."""
    step = max(1 << max(count - 1, 0).bit_length() >> 4, 8)
    return max(-(-count // step) * step, 64)


def linear_nll(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    softcap: float | None = None,
    positions: Tensor | None = None,
    each: bool = False,
) -> Tensor:
    """Return ``summed_nll(F.linear(hidden, weight, bias), targets)``, holding no more logits than a block has.

    Where the logits are no more than may be held, they are turned into their own gradient in place, a few rows at a
    time, which on a CPU halves the time in bf16: most of it is memory traffic. Else they meet the head one block of the
    vocabulary at a time, twice: forward keeps log-sum-exps, and backward computes a block's logits again (the idea of
    Wijmans et al. 2024, arXiv:2411.09009, in plain matrix products). To go over blocks of tokens, and take the
    gradients already in forward (Hsu et al. 2024, arXiv:2410.10989), saves the second time, but every block then reads
    and writes the whole gradient of the head: with as little memory it took as long on a CPU in float32, and 1.7 times
    as long in bf16; with twice as much, 0.8 and 1.1 times. And a loss scale, of which forward knows nothing, could not
    keep fp16 in its range there.

    The products are in the dtype of ``hidden``, or autocast's. Logits, their sums and the gradient of ``hidden`` are
    added up in float32, or float64. The bits are the same each time; there is no second derivative.

    Where the vocabulary is sharded over a few ranks (tensor parallelism), each has the logits of its shard, and only
    the sums of their exponentials, and the targets' own, are sent.

    Args:
        hidden: [B, T, C].
        weight: [V, C].
        targets: [B, T], already shifted.
        bias: [V].
        softcap: makes logits softcap * tanh(logits / softcap), as in Gemma 2; in float32, whatever the products are in.
        positions: of :func:`trained_positions`; the others never meet the head. Without, all do.
        each: return the nll of each target, [B * T], or [N] of those at ``positions``.

    Raises:
        IndexError: there is not one target a position. (One that is not in the vocabulary makes the result NaN: to
            raise here would be to wait for the device.)
    """
    mesh = weight.device_mesh if isinstance(weight, DTensor) else None
    if mesh is not None:
        hidden = copy_to(hidden, mesh)
    if hidden.shape[:-1] != targets.shape:
        raise IndexError(
            f"targets {tuple(targets.shape)} are not one a position of {tuple(hidden.shape[:-1])}"
        )
    hidden, targets = hidden.flatten(0, -2), targets.flatten()
    if positions is not None:
        places = positions.clamp(min=0)
        hidden, targets = (
            hidden.index_select(0, places),
            targets[places].where(positions >= 0, IGNORED),
        )
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    few = targets.numel() * len(weight) <= _limits(hidden).held
    if few and mesh is None and hidden.dtype != torch.float16:  # whose range needs the loss scale
        held: Tensor = _HeldNLL.apply(
            hidden, weight, bias, targets, softcap, each, torch.is_grad_enabled()
        )  # type: ignore[no-untyped-call]
        return held
    shares, first = _shares(targets, len(weight)), 0
    if mesh is not None:
        first = shard_range(len(weight), mesh).start
        weight, bias = to_local(weight), None if bias is None else to_local(bias)
    nll: Tensor = _BlockwiseNLL.apply(hidden, weight, bias, targets - first, shares, softcap, mesh)  # type: ignore[no-untyped-call]
    return nll if each else nll.sum()


def _shares(targets: Tensor, vocabulary: int) -> Tensor:
    """Return what each target counts: 1, or 0 of one that is ignored, or NaN of one that is no token."""
    trained = targets != IGNORED
    return trained.float().masked_fill(
        trained & ((targets < 0) | (targets >= vocabulary)), float("nan")
    )


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``F.linear``, also where the vocabulary is sharded over a few ranks."""
    if not isinstance(weight, DTensor):
        return F.linear(hidden, weight, bias)
    mesh, local_bias = weight.device_mesh, None if bias is None else to_local(bias)
    return gather_from(
        F.linear(copy_to(hidden, mesh), to_local(weight), local_bias), mesh, len(weight)
    )


class _HeldNLL(torch.autograd.Function):
    """The nll of targets [N], which are few enough to hold their logits: summed, or that of each.

    Takes hidden [N, C], weight [V, C], and bias [V] or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        cap: float | None,
        each: bool,
        learning: bool,
    ) -> Tensor:
        dtype = hidden.dtype
        weight_used = weight.to(dtype)
        logits = F.linear(hidden, weight_used, None if bias is None else bias.to(dtype))
        wide = torch.promote_types(dtype, torch.float32)
        wanted, nll = learning and any(ctx.needs_input_grad), list[Tensor]()
        into_gradient = _fused() if hidden.is_cuda else None
        size = (
            max(_limits(hidden).tile // max(len(weight), 1), 1)
            if into_gradient is None
            else max(len(logits), 1)
        )
        for tile, target in zip(
            torch.split(logits, size), torch.split(targets[:, None], size), strict=True
        ):
            of_tile = (into_gradient or _into_gradient)(tile, target, cap, wanted)
            nll.append(of_tile if each else of_tile.sum())
        if wanted:
            ctx.save_for_backward(hidden, weight_used, logits)
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        if each:
            return torch.cat(nll) if nll else logits.new_zeros(0, dtype=wide)
        return torch.stack(nll).sum() if nll else logits.new_zeros((), dtype=wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, grad = ctx.saved_tensors
        for_weight, for_bias = ctx.dtypes
        needed = ctx.needs_input_grad
        if incoming.ndim:  # one a target
            grad, incoming = grad.mul_(incoming[:, None].to(grad.dtype)), incoming.new_ones(())
        grad_hidden = (grad @ weight).mul_(incoming) if needed[0] else None
        grad_weight = (grad.T @ hidden).to(for_weight).mul_(incoming) if needed[1] else None
        grad_bias = (
            grad.sum(0, dtype=incoming.dtype).mul_(incoming).to(for_bias) if needed[2] else None
        )
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _into_gradient(
    logits: Tensor, targets: Tensor, cap: float | None, wanted: bool, fused: bool = False
) -> Tensor:
    """Return the nll [N] of targets [N, 1]; where it is wanted, turn logits [N, V] into its gradient, in place.

    ``fused`` subtracts the targets in an operation that a compiler merges with the others.
    """
    wide, last = torch.promote_types(logits.dtype, torch.float32), logits.shape[1] - 1
    capped = logits if cap is None else (logits.to(wide) / cap).tanh_().mul_(cap)
    log_p = torch.log_softmax(capped, 1, dtype=wide)
    columns, shares = targets.clamp(0, last), _shares(targets, last + 1).to(wide)
    nll = -(log_p.gather(1, columns) * shares)[:, 0]
    if wanted:
        if fused:
            grad = log_p.exp() - (torch.arange(last + 1, device=logits.device) == columns).to(wide)
        else:
            grad = log_p.exp_().scatter_add_(1, columns, torch.full_like(targets, -1, dtype=wide))
        if cap is not None:
            grad.mul_(capped.div_(cap).square_().neg_().add_(1))
        logits.copy_(grad.mul_(shares))
    return nll


def _fused() -> Callable[..., Tensor] | None:
    """Return the compiled kernel of :func:`_into_gradient` for a GPU, or ``None`` if there is none.

    There is none if nothing compiles it, or if algorithms must be deterministic: the bits of the
    compiled code depend on which shapes came first.
    """
    return _compiled_kernel(
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    )


@functools.cache
def _compiled_kernel(deterministic: bool, matmul_precision: str) -> Callable[..., Tensor] | None:
    """Compile the kernel once for each setting, as runs of one process may have different ones."""
    if deterministic:
        return None

    try:
        torch.compile(torch.exp)(torch.zeros(8, device="cuda"))
    except Exception:  # each compiler has errors of its own
        return None

    return torch.compile(functools.partial(_into_gradient, fused=True))


class _BlockwiseNLL(torch.autograd.Function):
    """The nll of each of targets [N], one block of the vocabulary at a time.

    Takes hidden [N, C], weight [V, C], and bias [V] or None, and what each target counts. Where a mesh is given they
    are this rank's shard of the vocabulary, and targets are counted from its first.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        shares: Tensor,
        cap: float | None,
        mesh: _Mesh,
    ) -> Tensor:
        sums, chosen = [], torch.zeros(len(targets), 1, device=hidden.device)
        for block in _blocks(len(weight), hidden):
            logits, column, inside = _logits(hidden, weight, bias, targets, cap, block)
            sums.append(logits.logsumexp(1))
            chosen = torch.where(inside, logits.gather(1, column), chosen)
        log_total = torch.stack(sums).logsumexp(
            0
        )  # at once: a running sum would round in every block
        if mesh is not None:
            highest = all_reduce(log_total, mesh, dist.ReduceOp.MAX)
            log_total = highest + all_reduce((log_total - highest).exp(), mesh).log()
            chosen = all_reduce(chosen, mesh)
        ctx.save_for_backward(hidden, weight, bias, targets, shares, log_total)
        ctx.softcap = cap
        return (log_total - chosen[:, 0]) * shares

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, shares, log_total = ctx.saved_tensors
        incoming = (shares.to(incoming.dtype) * incoming)[:, None]
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_total.dtype) if for_hidden else None
        grad_weight = torch.empty_like(weight) if for_weight else None
        grad_bias = torch.empty_like(bias) if for_bias else None
        for block in _blocks(len(weight), hidden):
            logits, column, inside = _logits(hidden, weight, bias, targets, ctx.softcap, block)
            scale = (
                incoming
                if ctx.softcap is None
                else incoming * (1 - (logits / ctx.softcap).square())
            )
            grad = logits.sub_(log_total[:, None]).exp_()  # the probabilities
            grad.scatter_(1, column, grad.gather(1, column) - inside.to(grad.dtype)).mul_(scale)
            if grad_bias is not None:
                grad_bias[block] = grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += grad @ weight[block].to(hidden.dtype)
            if grad_weight is not None:
                grad_weight[block] = grad.T @ hidden
        grad_hidden = grad_hidden if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None


def _limits(hidden: Tensor) -> _Limits:
    return _LIMITS.get(hidden.device.type, _LIMITS["cpu"])


def _blocks(vocabulary: int, hidden: Tensor) -> list[slice]:
    """Return blocks of the vocabulary whose logits for ``hidden`` [N, C] are about as many as may be at a time."""
    rows = max(_limits(hidden).block // max(len(hidden), 1) // _ROWS, 1) * _ROWS
    return [slice(start, min(start + rows, vocabulary)) for start in range(0, vocabulary, rows)]


def _logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    softcap: float | None,
    block: slice,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits of a block of the vocabulary, and where in it the targets are.

    Logits [N, block] are float32 (or wider), and may be overwritten. Columns of the targets are [N, 1], and so is
    which of them are inside.
    """
    dtype = hidden.dtype
    logits = F.linear(
        hidden, weight[block].to(dtype), None if bias is None else bias[block].to(dtype)
    )
    logits = logits.float() if dtype != torch.float64 else logits
    column, size = targets[:, None] - block.start, block.stop - block.start
    inside = (column >= 0) & (column < size)
    return (
        logits if softcap is None else softcap * torch.tanh(logits / softcap),
        column.clamp(0, size - 1),
        inside,
    )
