"""Attention over packed rows on a GPU: PyTorch's varlen kernel, which needs no mask in memory.

It takes sequences of many lengths, laid end to end. It knows only 16 bits and documents that are
contiguous. PyTorch's own attention with a mask computes the rest.
"""

import functools
import inspect
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from llmtrain.models.loss import matmul_dtype

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
    """Try the varlen kernel on a row of several documents.

    Versions of PyTorch differ in its arguments, and in the results for the same arguments.
    """
    length = 96
    borders = [0, 20, 40, 48, length]
    padding = [length] * 59  # in training, too, the last border is repeated
    padded_borders = torch.tensor([*borders, *padding], dtype=torch.int32, device=device)
    values = torch.arange(8.0 * length * 64, device=device).mul(7).sin().to(dtype)
    q, k, v = torch.split(values.view(1, 8, length, 64), [4, 2, 2], dim=1)
    try:
        out = attend_with_varlen(q, k, v, scale=0.125, borders=padded_borders)
    except (RuntimeError, TypeError, ValueError):
        return False

    for begin, end in itertools.pairwise(borders):
        expected = F.scaled_dot_product_attention(
            q[:, :, begin:end],
            k[:, :, begin:end],
            v[:, :, begin:end],
            is_causal=True,
            enable_gqa=True,
        )
        if not torch.allclose(out[:, :, begin:end], expected, rtol=0.02, atol=0.02):
            return False
    return True


def attend_with_varlen(q: Tensor, k: Tensor, v: Tensor, *, scale: float, borders: Tensor) -> Tensor:
    """Return causal attention [B, H, T, D] inside each document.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        scale: factor of the scores.
        borders: int32 [N], where each document begins when rows are laid end to end, and the end.
    """
    # Under autocast, rotary positions make float32 of q and k.
    dtype = matmul_dtype(v.device, v.dtype)
    rows, heads, length, _ = q.shape
    groups = heads // k.shape[1]

    options: dict[str, Any] = {}
    if _VARLEN_TAKES_GROUPS:
        options["enable_gqa"] = groups > 1
    elif groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)

    out: Tensor = varlen_attn(  # type: ignore[assignment]
        _end_to_end(q.to(dtype)),
        _end_to_end(k.to(dtype)),
        _end_to_end(v.to(dtype)),
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
