"""Causal attention, computed in the fastest way for the device and the rows at hand."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models import attention_cpu, attention_gpu
from llmtrain.models.attention_cpu import Block
from llmtrain.models.documents import Documents
from llmtrain.models.loss import matmul_dtype

ATTENTION_NAME = "llmtrain"  # of the attention that :func:`register` adds to transformers

# Options that some models pass to their attention, and that only transformers' own implements.
_SPECIAL_OPTIONS = ("softcap", "position_bias", "cache")


def causal_attention(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v, in which each position sees itself and those before it.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, H, T, D].
        v: values [B, H, T, D].
        documents: the documents of the rows, which do not see each other; by default each row is
            one document.
    """
    if documents is not None and documents.starts is not None:
        out = _attend_without_mask(q, k, v, documents, options={})
        if out is not None:
            return out
        return F.scaled_dot_product_attention(q, k, v, attn_mask=documents.mask())

    if attention_cpu.is_faster_in_blocks(q, k, v):
        rows, _, length, head_size = q.shape
        blocks = attention_cpu.causal_blocks(rows, length)
        return attention_cpu.attend_in_blocks(q, k, v, scale=head_size**-0.5, blocks=blocks)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@functools.cache  # once in a process is enough
def register() -> None:
    """Add an attention to transformers that takes ``documents``, as :data:`ATTENTION_NAME`.

    Set ``config._attn_implementation`` to that name to use it. With ``documents`` it ignores the
    attention mask: only later positions and other documents may be masked. Without ``documents`` it
    is transformers' own ``sdpa``.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        documents: Documents | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        if documents is not None:
            out = _attend_without_mask(query, key, value, documents, options)
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
            attention_mask = _mask(query, documents, options)

        result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return result

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _has_window(length: int, options: Mapping[str, Any]) -> bool:
    """Return whether a sliding window hides positions of rows of this length."""
    window: int | None = options.get("sliding_window")
    return window is not None and window < length


def _mask(query: Tensor, documents: Documents, options: Mapping[str, Any]) -> Tensor | None:
    """Return the mask [B, 1, T, T] that transformers' own attention takes."""
    length = query.shape[2]
    if documents.starts is None and _has_window(length, options):
        # Without starts there is no mask, and the window would be ignored.
        starts = torch.zeros(1, length, dtype=torch.int64, device=query.device)
        documents = replace(documents, starts=starts)
    return documents.mask(options.get("sliding_window"))


def _attend_without_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Return attention [B, H, T, D], or ``None`` if transformers' own attention has to compute it.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        documents: the documents of the rows.
        options: what the model passes to its attention.
    """
    if options.get("dropout") or _has_window(q.shape[2], options):
        return None
    if any(options.get(name) is not None for name in _SPECIAL_OPTIONS):
        return None
    if q.shape[-1] != v.shape[-1]:
        return None

    scale = options.get("scaling")
    if scale is None:
        scale = q.shape[-1] ** -0.5

    if q.is_cuda:
        return _attend_on_gpu(q, k, v, scale=scale, documents=documents)
    if q.device.type == "cpu":
        return _attend_on_cpu(q, k, v, scale=scale, documents=documents)
    return None


def _attend_on_gpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    documents: Documents,
) -> Tensor | None:
    if documents.starts is None:  # transformers' own attention needs no mask, either
        return None

    # Under autocast, rotary positions make float32 of q and k.
    dtype = matmul_dtype(v.device, v.dtype)
    q = q.to(dtype)
    k = k.to(dtype)
    v = v.to(dtype)

    if documents.flex_mask is not None:
        return attention_gpu.attend_with_flex(
            q,
            k,
            v,
            scale=scale,
            block_mask=documents.flex_mask,
        )
    if documents.borders is not None and attention_gpu.varlen_takes_head_size(q.shape[-1]):
        return attention_gpu.attend_with_varlen(
            q,
            k,
            v,
            scale=scale,
            borders=documents.borders,
        )
    return None


def _attend_on_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    documents: Documents,
) -> Tensor | None:
    rows, heads, length, _ = q.shape
    if length > attention_cpu.MAX_LENGTH:
        return None
    if documents.starts is None and not attention_cpu.is_faster_in_blocks(q, k, v):
        return None
    blocks = _blocks(documents, rows, length)
    if blocks is None:
        return None

    groups = heads // k.shape[1]
    if groups > 1:
        k = k.repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
    return attention_cpu.attend_in_blocks(
        q,
        k,
        v,
        scale=scale,
        blocks=blocks,
        starts=documents.starts,
    )


def _blocks(documents: Documents, rows: int, length: int) -> list[Block] | None:
    """Return the blocks to compute, or ``None`` if there are none that hide another answer."""
    if documents.blocks is not None and not torch.compiler.is_compiling():
        return documents.blocks

    # The documents' own blocks would be compiled again for each position at which one begins.
    if documents.other_answers is not None:
        return None
    return attention_cpu.causal_blocks(rows, length)
