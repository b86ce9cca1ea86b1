"""Attention on a CPU, in plain matrix products over blocks of queries.

PyTorch's own attention has a slow backward pass on a CPU, in 16 bits and for rows of moderate
length. benchmarks/LOG.md has the measurements.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from llmtrain.models.loss import matmul_dtype

# Rows between these lengths, in positions, are computed in blocks.
MIN_LENGTH = 129  # for rows of one document in float32, of which PyTorch computes short ones faster
MAX_LENGTH = 512  # PyTorch needs less memory for longer ones

_BLOCK = 64  # queries in a block: the fastest size that was tried, for rows of 64 to 512 positions


class Block(NamedTuple):
    """A block of queries and the keys that it meets.

    Attributes:
        rows: rows of the batch.
        queries: positions of the queries.
        keys: positions of the keys.
        masked: bool [rows, queries, keys], true if a query must not see an earlier key. ``None``
            if it sees all of them.
    """

    rows: slice
    queries: slice
    keys: slice
    masked: Tensor | None = None


def is_faster_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether blocks beat PyTorch for rows of one document.

    They do in training on a CPU, because only PyTorch's backward pass is slow.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
    """
    if q.device.type != "cpu" or not torch.is_grad_enabled():
        return False
    if not (q.requires_grad or k.requires_grad or v.requires_grad):
        return False

    is_half = q.dtype.itemsize == 2 or torch.is_autocast_enabled("cpu")
    min_length = 0 if is_half else MIN_LENGTH
    return min_length <= q.shape[2] <= MAX_LENGTH


def causal_blocks(rows: int, length: int) -> list[Block]:
    """Return the blocks of rows of one document: all rows, and all keys up to the last query."""
    blocks = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        blocks.append(Block(rows=slice(0, rows), queries=slice(start, end), keys=slice(0, end)))
    return blocks


def packed_blocks(starts: np.ndarray, other_answers: np.ndarray | None = None) -> list[Block]:
    """Return the blocks of packed rows, without the keys that no query of a block sees.

    Neighbouring rows share a block if they need the same keys.

    Args:
        starts: int64 [B, T], see :class:`llmtrain.models.documents.Documents`.
        other_answers: int64 [2, B, T], see there.
    """
    blocks = []
    positions = np.arange(starts.shape[1])

    for causal in causal_blocks(*starts.shape):
        queries = causal.queries

        # Rounded down, so that sizes recur: PyTorch prepares a matrix product once for each size.
        first_keys = starts[:, queries.start] // _BLOCK * _BLOCK

        first_row = 0
        for first_key, equal_keys in itertools.groupby(first_keys.tolist()):
            rows = slice(first_row, first_row + len(list(equal_keys)))
            keys = slice(first_key, causal.keys.stop)
            key_positions = positions[keys]

            masked = key_positions < starts[rows, queries, None]
            if other_answers is not None:
                begins, ends = other_answers[:, rows, queries, None]
                masked |= (key_positions >= begins) & (key_positions < ends)

            blocks.append(Block(rows, queries, keys, masked=torch.from_numpy(masked)))
            first_row = rows.stop

    return blocks


def attend_in_blocks(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, blocks: list[Block]
) -> Tensor:
    """Return attention [B, H, T, D], one block of queries at a time.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        scale: factor of the scores.
        blocks: from :func:`causal_blocks` or :func:`packed_blocks`.
    """
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    # PyTorch's own attention casts in the same way.
    q = q.to(matmul_dtype(q.device, q.dtype))
    k = k.to(matmul_dtype(k.device, k.dtype))
    v = v.to(matmul_dtype(v.device, v.dtype))

    with torch.autocast("cpu", enabled=False):  # autocast would round the scores
        out: Tensor = _BlockwiseAttention.apply(q, k, v, scale, blocks)  # type: ignore[no-untyped-call]
    return out


class _BlockwiseAttention(torch.autograd.Function):
    """Attention in which each block of queries meets only the keys that it may see.

    The probabilities are kept for backward, as in the attention of Vaswani et al. (2017). PyTorch's
    fused operation computes them twice on a CPU, and its products reach a fraction of the speed of
    a batched product: forward and backward took 1.4 to 1.6 times as long in float32, and 2.3 to 4.4
    times in bfloat16 (benchmarks/LOG.md).

    Rows and heads are one dimension in here: ``q``, ``k`` and ``v`` become [B * H, T, D].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: list[Block]
    ) -> Tensor:
        shape = q.shape
        heads = shape[1]
        q = q.flatten(0, 1)
        k = k.flatten(0, 1)
        v = v.flatten(0, 1)

        out = torch.empty_like(q)
        probabilities: list[Tensor] = []
        is_later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).triu(1)

        # Scores are computed in float32 (or float64), because bfloat16 would round them.
        wide = torch.promote_types(q.dtype, torch.float32)
        wide_q = q.to(wide) * scale
        wide_k = k.to(wide)

        for block in blocks:
            flat_rows = slice(block.rows.start * heads, block.rows.stop * heads)
            keys_transposed = wide_k[flat_rows, block.keys].transpose(1, 2)
            scores = torch.bmm(wide_q[flat_rows, block.queries], keys_transposed)

            count = block.queries.stop - block.queries.start
            scores[:, :, -count:].masked_fill_(is_later[:count, :count], float("-inf"))
            if block.masked is not None:
                # All heads of a row share its mask.
                scores_by_head = scores.view(-1, heads, *scores.shape[1:])
                scores_by_head.masked_fill_(block.masked[:, None], float("-inf"))

            probabilities.append(scores.softmax(-1).to(q.dtype))
            out[flat_rows, block.queries] = torch.bmm(probabilities[-1], v[flat_rows, block.keys])

        ctx.scale = scale
        ctx.blocks = blocks
        ctx.heads = heads
        ctx.save_for_backward(q, k, v, *probabilities)
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        heads = ctx.heads
        shape = grad.shape
        grad = grad.reshape(q.shape)
        grad_q = torch.empty_like(q)
        grad_k = torch.zeros_like(k)
        grad_v = torch.zeros_like(v)

        for block, p in reversed(list(zip(ctx.blocks, probabilities, strict=True))):
            flat_rows = slice(block.rows.start * heads, block.rows.stop * heads)
            block_q = q[flat_rows, block.queries]
            block_k = k[flat_rows, block.keys]
            block_v = v[flat_rows, block.keys]
            block_grad = grad[flat_rows, block.queries]

            grad_p = torch.bmm(block_grad, block_v.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_p, p, -1, p.dtype).mul_(ctx.scale)
            grad_q[flat_rows, block.queries] = torch.bmm(grad_scores, block_k)
            grad_k[flat_rows, block.keys] += torch.bmm(grad_scores.transpose(1, 2), block_q)
            grad_v[flat_rows, block.keys] += torch.bmm(p.transpose(1, 2), block_grad)

        return grad_q.view(shape), grad_k.view(shape), grad_v.view(shape), None, None
