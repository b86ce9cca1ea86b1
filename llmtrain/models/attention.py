"""Causal attention: PyTorch's own, and on a CPU, for rows of moderate length, one in plain matrix products."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_LONGEST = 512  # positions; beyond, what is kept for backward would outgrow all other activations
_BLOCK = 64  # queries at a time, of those tried the fastest for 64 to 512 positions


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k' / sqrt(D)) v, where each position sees itself and those before it; all [B, H, T, D]."""
    if q.device.type == "cpu" and q.shape[2] <= _LONGEST:
        return _in_blocks(q, k, v, q.shape[-1] ** -0.5, None)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def hasten_transformers() -> None:
    """From here on, models of transformers that use its ``sdpa`` attention compute it in blocks, where they can: on a
    CPU, whole rows that are not too long, without dropout."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if getattr(theirs, "in_blocks", False):
        return

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v, mask = query, key, value, attention_mask
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        special = dropout or any(others.get(name) is not None for name in ("softcap", "position_bias", "cache"))
        if special or not _fits(q, k, v) or not (causal if mask is None else _is_causal(mask)):
            return theirs(module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = _in_blocks(q, k, v, q.shape[-1] ** -0.5 if scaling is None else scaling, mask)
        return out.transpose(1, 2).contiguous(), None

    attend.in_blocks = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    whole = q.shape[2] == k.shape[2] <= _LONGEST and q.shape[2] > 1  # else a cache holds earlier keys
    return q.device.type == "cpu" and whole and q.shape[-1] == v.shape[-1]


def _is_causal(mask: torch.Tensor) -> bool:
    """Whether a mask [B, 1, T, T], true where a position sees another, lets each see itself and none a later one."""
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return False
    return bool(mask.diagonal(0, -2, -1).all()) and not bool(mask.triu(1).any())


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):  # with which PyTorch's own attention does the same
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (part if part.dtype == torch.float64 else part.to(dtype) for part in (q, k, v))
    with torch.autocast("cpu", enabled=False):  # or it would round the scores
        return _Blockwise.apply(q, k, v, scale, mask)


class _Blockwise(torch.autograd.Function):
    """A block of queries at a time meets the keys up to its last; what lies behind is never computed.

    The probabilities are kept for backward, as in the attention of Vaswani et al. (2017). On a CPU, PyTorch's fused
    operation computes them twice and its products reach a fraction of the speed of a batched one: forward and backward
    took 1.3 to 1.6 times as long in float32, and 2.3 to 4 times in bfloat16 (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:
        rows, heads, length, size = q.shape
        q, k, v = (part.reshape(-1, length, size) for part in (q, k, v))
        ctx.scale = scale
        out = torch.empty_like(q)
        probabilities: list[torch.Tensor] = []
        later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).triu(1)
        exact_q, exact_k = (q * ctx.scale, k) if q.dtype == torch.float64 else (q.float() * ctx.scale, k.float())
        for block, seen in _blocks(length):
            scores = torch.bmm(exact_q[:, block], exact_k[:, seen].transpose(1, 2))  # bfloat16 would round them
            if mask is None:
                span = block.stop - block.start
                scores[:, :, block].masked_fill_(later[:span, :span], float("-inf"))
            else:
                scores.unflatten(0, (rows, heads)).masked_fill_(~mask[:, :, block, seen], float("-inf"))
            probabilities.append(scores.softmax(-1).to(q.dtype))
            out[:, block] = torch.bmm(probabilities[-1], v[:, seen])
        ctx.save_for_backward(q, k, v, *probabilities)
        return out.view(rows, heads, length, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(q.shape)
        grad_q, grad_k, grad_v = torch.empty_like(q), None, None
        for (block, seen), p in reversed(list(zip(_blocks(q.shape[1]), probabilities, strict=True))):
            for_p = torch.bmm(grad[:, block], v[:, seen].transpose(1, 2))
            for_scores = torch._softmax_backward_data(for_p, p, -1, p.dtype).mul_(ctx.scale)
            grad_q[:, block] = torch.bmm(for_scores, k[:, seen])
            for_k = torch.bmm(for_scores.transpose(1, 2), q[:, block])
            for_v = torch.bmm(p.transpose(1, 2), grad[:, block])
            if grad_k is None or grad_v is None:  # the last block, which sees all
                grad_k, grad_v = for_k, for_v
            else:
                grad_k[:, seen] += for_k
                grad_v[:, seen] += for_v
        assert grad_k is not None
        assert grad_v is not None
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), None, None


def _blocks(length: int) -> list[tuple[slice, slice]]:
    """Blocks of queries, each with the keys that it may see."""
    ends = [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]
    return [(slice(start, end), slice(0, end)) for start, end in ends]
