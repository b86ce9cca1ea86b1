"""Attention over packed rows on a GPU: PyTorch's kernels that need no mask in memory.

The varlen kernel takes sequences of many lengths, laid end to end. It is the fastest, but knows
only 16 bits and documents that are contiguous. Flex attention computes the rest.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_MAX_HEAD_SIZE = 256  # of the varlen kernel
_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.13


@functools.cache
def can_use_varlen(dtype: torch.dtype) -> bool:
    """Return whether this GPU's varlen kernel computes ``dtype``, and computes it correctly."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability() < (8, 0):  # before A100
        return False
    return _varlen_is_correct(torch.device("cuda"), dtype)


def varlen_takes_head_size(head_size: int) -> bool:
    """Return whether the varlen kernel takes heads of this size."""
    return head_size % 8 == 0 and head_size <= _MAX_HEAD_SIZE


@torch.no_grad()
def _varlen_is_correct(device: torch.device, dtype: torch.dtype) -> bool:
    """Try the varlen kernel on two rows of several documents.

    Versions of PyTorch differ in its arguments, and in the results for the same arguments.
    """
    rows = 2
    length = 48
    lengths = torch.tensor([20, 20, 8, 31, 17])  # three documents in the first row, then two
    ends = lengths.cumsum(0).tolist()
    padding = [rows * length] * 58  # in training, too, the last border is repeated
    borders = torch.tensor([0, *ends, *padding], dtype=torch.int32, device=device)

    document = torch.arange(len(lengths)).repeat_interleave(lengths).view(rows, length)
    is_same_document = document[:, :, None] == document[:, None]
    is_causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = (is_same_document & is_causal)[:, None].to(device)  # [B, 1, T, T]

    count = 2.0 * 8 * 48 * 64
    values = torch.arange(count, device=device).mul(7).sin().to(dtype).view(rows, 8, length, 64)
    q = values[:, :4]
    k = values[:, 4:6]
    v = values[:, 6:]
    scale = 0.125

    try:
        out = attend_with_varlen(q, k, v, scale=scale, borders=borders)
    except (RuntimeError, TypeError, ValueError):
        return False

    expected = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        scale=scale,
        enable_gqa=True,
    )
    return torch.allclose(out, expected, rtol=0.02, atol=0.02)


def attend_with_varlen(q: Tensor, k: Tensor, v: Tensor, *, scale: float, borders: Tensor) -> Tensor:
    """Return causal attention [B, H, T, D] inside each document.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        scale: factor of the scores.
        borders: int32 [N], where each document begins when rows are laid end to end, and the end.
    """
    rows, heads, length, _ = q.shape
    groups = heads // k.shape[1]

    options: dict[str, Any] = {}
    if _VARLEN_TAKES_GROUPS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)

    out: Tensor = varlen_attn(  # type: ignore[assignment]
        _end_to_end(q),
        _end_to_end(k),
        _end_to_end(v),
        cu_seq_q=borders,
        cu_seq_k=borders,
        max_q=length,
        max_k=length,
        scale=scale,
        window_size=(-1, 0),  # all keys before a query, none after: causal
        **options,
    )
    return out.view(rows, length, heads, -1).transpose(1, 2)


def _end_to_end(tensor: Tensor) -> Tensor:
    """Lay rows end to end: [B, H, T, D] -> [B * T, H, D]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def flex_block_mask(starts: Tensor, other_answers: Tensor | None = None) -> Any:
    """Return the block mask for :func:`attend_with_flex`.

    Args:
        starts: int64 [B, T], see :class:`llmtrain.models.documents.Documents`.
        other_answers: int64 [2, B, T], see there.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = (key >= starts[row, query]) & (key <= query)
        if other_answers is None:
            return visible
        is_before = key < other_answers[0, row, query]
        is_after = key >= other_answers[1, row, query]
        return visible & (is_before | is_after)

    rows, length = starts.shape
    return create_block_mask(
        is_visible,
        B=rows,
        H=None,
        Q_LEN=length,
        KV_LEN=length,
        device=starts.device,
        _compile=starts.is_cuda,
    )


def attend_with_flex(q: Tensor, k: Tensor, v: Tensor, *, scale: float, block_mask: Any) -> Tensor:
    """Return attention [B, H, T, D] to the keys that a block mask of :func:`flex_block_mask` shows.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        scale: factor of the scores.
        block_mask: the keys that each query sees.
    """
    flex_attention = _flex_attention(is_compiled=q.is_cuda)
    out: Tensor = flex_attention(
        q,
        k,
        v,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out


@functools.cache
def _flex_attention(is_compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    function = torch.compile(flex_attention) if is_compiled else flex_attention
    return cast("Callable[..., Any]", function)
