"""Causal attention: PyTorch's own, and on a CPU, for rows of moderate length, one in plain matrix products."""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

LONGEST = 512  # positions; beyond, what is kept for backward would outgrow all other activations
_BLOCK = 64  # queries at a time, of those tried the fastest for 64 to 512 positions

Blocks = list[tuple[slice, slice, slice]]  # of rows; of queries; of the keys that they meet


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q k' / sqrt(D)) v, where each position sees itself and those before it; all [B, H, T, D]."""
    if q.device.type == "cpu" and q.shape[2] <= LONGEST:
        return _in_blocks(q, k, v, q.shape[-1] ** -0.5, None, _blocks(len(q), q.shape[2]))
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
        if mask is not None and len(mask) < len(q):
            mask = mask.expand(len(q), -1, -1, -1)
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        special = dropout or any(others.get(name) is not None for name in ("softcap", "position_bias", "cache"))
        blocks = None
        if _fits(q, k, v) and not special:
            blocks = _blocks_of(mask) if mask is not None else _blocks(len(q), q.shape[2]) if causal else None
        if blocks is None:
            return theirs(module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others)
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = _in_blocks(q, k, v, q.shape[-1] ** -0.5 if scaling is None else scaling, mask, blocks)
        return out.transpose(1, 2).contiguous(), None

    attend.in_blocks = True  # type: ignore[attr-defined]
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def _fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    whole = q.shape[2] == k.shape[2] <= LONGEST and q.shape[2] > 1  # else a cache holds earlier keys
    return q.device.type == "cpu" and whole and q.shape[-1] == v.shape[-1]


def _blocks_of(mask: torch.Tensor) -> Blocks | None:
    """Blocks for a mask [B, 1, T, T], true where a position sees another; None where one does not see itself, or sees
    a later one. Found once for a mask, which all layers of a model share."""
    if torch.compiler.is_compiling():  # each other beginning of a span would be compiled again
        return _blocks(len(mask), mask.shape[-1]) if _is_causal(mask) else None
    if not hasattr(mask, "causal_blocks"):
        mask.causal_blocks = _blocks_of_documents(mask) if _is_causal(mask) else None  # type: ignore[attr-defined]
    return mask.causal_blocks  # type: ignore[attr-defined]


def _is_causal(mask: torch.Tensor) -> bool:
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return False
    return bool(mask.diagonal(0, -2, -1).all()) and not bool(mask.triu(1).any())


def _in_blocks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, mask: torch.Tensor | None, blocks: Blocks
) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):  # with which PyTorch's own attention does the same
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (part if part.dtype == torch.float64 else part.to(dtype) for part in (q, k, v))
    with torch.autocast("cpu", enabled=False):  # or it would round the scores
        return _Blockwise.apply(q, k, v, scale, mask, blocks)


class _Blockwise(torch.autograd.Function):
    """A block of queries at a time meets the keys up to its last, in packed rows from the first that it may see; what
    lies outside is never computed.

    The probabilities are kept for backward, as in the attention of Vaswani et al. (2017). On a CPU, PyTorch's fused
    operation computes them twice and its products reach a fraction of the speed of a batched one: forward and backward
    took 1.3 to 1.6 times as long in float32, and 2.3 to 4 times in bfloat16 (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None,
        blocks: Blocks,
    ) -> torch.Tensor:
        shape = q.shape
        heads, length, size = shape[1:]
        q, k, v = (part.reshape(-1, length, size) for part in (q, k, v))
        ctx.scale, ctx.blocks, ctx.heads = scale, blocks, heads
        out = torch.empty_like(q)
        probabilities: list[torch.Tensor] = []
        later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).triu(1)
        exact_q, exact_k = (q * ctx.scale, k) if q.dtype == torch.float64 else (q.float() * ctx.scale, k.float())
        for rows, block, seen in blocks:
            at = slice(rows.start * heads, rows.stop * heads)
            scores = torch.bmm(exact_q[at, block], exact_k[at, seen].transpose(1, 2))  # bfloat16 would round them
            if mask is None:
                span = block.stop - block.start
                scores[:, :, block].masked_fill_(later[:span, :span], float("-inf"))
            else:
                scores.unflatten(0, (-1, heads)).masked_fill_(~mask[rows, :, block, seen], float("-inf"))
            probabilities.append(scores.softmax(-1).to(q.dtype))
            out[at, block] = torch.bmm(probabilities[-1], v[at, seen])
        ctx.save_for_backward(q, k, v, *probabilities)
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(q.shape)
        grad_q: torch.Tensor = torch.empty_like(q)
        grad_k: Any = None
        grad_v: Any = None
        for (rows, block, seen), p in reversed(list(zip(ctx.blocks, probabilities, strict=True))):
            at = slice(rows.start * ctx.heads, rows.stop * ctx.heads)
            for_p = torch.bmm(grad[at, block], v[at, seen].transpose(1, 2))
            for_scores = torch._softmax_backward_data(for_p, p, -1, p.dtype).mul_(ctx.scale)
            grad_q[at, block] = torch.bmm(for_scores, k[at, seen])
            for_k = torch.bmm(for_scores.transpose(1, 2), q[at, block])
            for_v = torch.bmm(p.transpose(1, 2), grad[at, block])
            if grad_k is None and for_k.shape == k.shape:  # the last block of queries, of all rows
                grad_k, grad_v = for_k, for_v
                continue
            if grad_k is None:
                grad_k, grad_v = torch.zeros_like(k), torch.zeros_like(v)
            grad_k[at, seen] += for_k
            grad_v[at, seen] += for_v
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), None, None, None


def _blocks(rows: int, length: int) -> Blocks:
    """Blocks of queries, each with all keys up to its last."""
    ends = [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]
    return [(slice(0, rows), slice(start, end), slice(0, end)) for start, end in ends]


def _blocks_of_documents(mask: torch.Tensor) -> Blocks:
    """Blocks of queries, each with the keys from the first that it may see: in a packed row they are few. Neighbouring
    rows for which it is the same go together."""
    found = []
    for _, queries, keys in _blocks(len(mask), mask.shape[-1]):
        firsts = mask[:, 0, queries].any(1).int().argmax(1)
        firsts = firsts // _BLOCK * _BLOCK  # so that sizes recur: a product is made ready once for each
        row = 0
        for first, alike in itertools.groupby(firsts.tolist()):
            end = row + len(list(alike))
            found.append((slice(row, end), queries, slice(first, keys.stop)))
            row = end
    return found
