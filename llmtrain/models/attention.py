"""Causal attention: PyTorch's own, and on a CPU, for rows of moderate length, one in plain matrix products."""

import functools
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakTensorKeyDictionary

LONGEST = 512  # positions; beyond, what is kept for backward would outgrow all other activations
_BLOCK = 64  # queries at a time, of those tried the fastest for 64 to 512 positions
_SPECIAL = ("softcap", "position_bias", "cache")  # options of a few models, which transformers' own attention knows

Blocks = list[tuple[slice, slice, slice]]  # of rows; of queries; of the keys that they meet


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v, where each position sees itself and those before it; all [B, H, T, D]."""
    if q.device.type == "cpu" and q.shape[2] <= LONGEST:
        return _in_blocks(q, k, v, q.shape[-1] ** -0.5, None, _blocks(len(q), q.shape[2]))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache  # it is done once in a process
def hasten_transformers() -> None:
    """Have models of transformers compute their ``sdpa`` attention in blocks, from here on.

    They do so on a CPU, for whole rows that are not too long, without dropout.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]
    known = WeakTensorKeyDictionary()  # the blocks of masks, each of which all layers of a model share

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        q, k, v, mask = query, key, value, attention_mask
        if mask is not None and len(mask) < len(q):
            mask = mask.expand(len(q), -1, -1, -1)
        special = options.get("dropout") or any(options.get(name) is not None for name in _SPECIAL)
        whole = q.shape[2] == k.shape[2] and 1 < q.shape[2] <= LONGEST  # else a cache holds earlier keys
        scale, causal = options.get("scaling"), options.get("is_causal")
        blocks = None
        if q.device.type == "cpu" and whole and q.shape[-1] == v.shape[-1] and not special:
            if mask is not None:
                blocks = _blocks_of(mask, known)
            elif getattr(module, "is_causal", True) if causal is None else causal:
                blocks = _blocks(len(q), q.shape[2])
        if blocks is None:
            result: tuple[Tensor, None] = theirs(module, q, k, v, mask, **options)
            return result
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        out = _in_blocks(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale, mask, blocks)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("sdpa", attend)


def _blocks_of(mask: Tensor, known: WeakTensorKeyDictionary) -> Blocks | None:
    """Return the blocks of a mask [B, 1, T, T], true where a position sees another.

    ``None`` where a position does not see itself, or sees a later one. What is found is kept in ``known``.
    """
    if torch.compiler.is_compiling():  # each other beginning of a span would be compiled again
        return _blocks(len(mask), mask.shape[-1]) if _is_causal(mask) else None
    if mask not in known:
        known[mask] = _blocks_of_documents(mask) if _is_causal(mask) else None
    blocks: Blocks | None = known[mask]
    return blocks


def _is_causal(mask: Tensor) -> bool:
    if mask.dtype != torch.bool or mask.shape[1] != 1:
        return False
    return bool(mask.diagonal(0, -2, -1).all()) and not bool(mask.triu(1).any())


def _in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, blocks: Blocks) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # with which PyTorch's own attention does the same
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (each if each.dtype == torch.float64 else each.to(dtype) for each in (q, k, v))
    with torch.autocast("cpu", enabled=False):  # or it would round the scores
        out: Tensor = _Blockwise.apply(q, k, v, scale, mask, blocks)  # type: ignore[no-untyped-call]
    return out


class _Blockwise(torch.autograd.Function):
    """Attention in which a block of queries at a time meets the keys up to its last.

    In packed rows they begin with the first that the block may see; what lies outside is never computed.

    The probabilities are kept for backward, as in the attention of Vaswani et al. (2017). On a CPU, PyTorch's fused
    operation computes them twice and its products reach a fraction of the speed of a batched one: forward and backward
    took 1.3 to 1.6 times as long in float32, and 2.3 to 4 times in bfloat16 (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, blocks: Blocks) -> Tensor:
        shape = q.shape
        heads, length, size = shape[1:]
        q, k, v = (each.reshape(-1, length, size) for each in (q, k, v))
        ctx.scale, ctx.blocks, ctx.heads = scale, blocks, heads
        out = torch.empty_like(q)
        probabilities: list[Tensor] = []
        later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).triu(1)
        exact_q, exact_k = (q * scale, k) if q.dtype == torch.float64 else (q.float() * scale, k.float())
        for rows, block, seen in blocks:
            at = slice(rows.start * heads, rows.stop * heads)
            scores = torch.bmm(exact_q[at, block], exact_k[at, seen].transpose(1, 2))  # bfloat16 would round them
            if mask is None:
                span = block.stop - block.start
                scores[:, :, block].masked_fill_(later[:span, :span], float("-inf"))
            else:
                scores.view(-1, heads, *scores.shape[1:]).masked_fill_(~mask[rows, :, block, seen], float("-inf"))
            probabilities.append(scores.softmax(-1).to(q.dtype))
            out[at, block] = torch.bmm(probabilities[-1], v[at, seen])
        ctx.save_for_backward(q, k, v, *probabilities)
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(q.shape)
        grad_q, summed = torch.empty_like(q), list[Tensor]()
        for (rows, block, seen), p in reversed(list(zip(ctx.blocks, probabilities, strict=True))):
            at = slice(rows.start * ctx.heads, rows.stop * ctx.heads)
            for_p = torch.bmm(grad[at, block], v[at, seen].transpose(1, 2))
            for_scores = torch._softmax_backward_data(for_p, p, -1, p.dtype).mul_(ctx.scale)
            grad_q[at, block] = torch.bmm(for_scores, k[at, seen])
            new = [torch.bmm(for_scores.transpose(1, 2), q[at, block]), torch.bmm(p.transpose(1, 2), grad[at, block])]
            if not summed and new[0].shape == k.shape:  # the last block of queries, of all rows
                summed = new
                continue
            summed = summed or [torch.zeros_like(k), torch.zeros_like(v)]
            for total, each in zip(summed, new, strict=True):
                total[at, seen] += each
        grad_k, grad_v = summed
        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), None, None, None


def _blocks(rows: int, length: int) -> Blocks:
    """Return blocks of queries, each with all keys up to its last."""
    ends = [(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]
    return [(slice(0, rows), slice(start, end), slice(0, end)) for start, end in ends]


def _blocks_of_documents(mask: Tensor) -> Blocks:
    """Return blocks of queries, each with the keys from the first that it may see: in a packed row they are few.

    Neighbouring rows for which it is the same go together.
    """
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
