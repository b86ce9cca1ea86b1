"""Causal attention, computed in the fastest way for the device and the rows at hand."""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.models import attention_cpu, attention_gpu
from llmtrain.models.documents import Documents

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
    documents = documents or Documents()
    out = _attend_without_mask(q, k, v, documents, options={})
    if out is not None:
        return out
    mask = documents.mask()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


@functools.cache  # once in a process is enough
def register() -> None:
    """Add an attention to transformers that takes ``documents``, as :data:`ATTENTION_NAME`.

    Set ``config._attn_implementation`` to that name to use it. With ``documents`` it ignores the
    attention mask: only later positions, other documents, and positions outside a sliding window
    may be masked. Without ``documents`` it is transformers' own ``sdpa``.
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
    length, head_size = q.shape[2:]
    if options.get("dropout") or _has_window(length, options) or head_size != v.shape[-1]:
        return None
    if any(options.get(name) is not None for name in _SPECIAL_OPTIONS):
        return None
    scale = options.get("scaling")
    if scale is None:
        scale = head_size**-0.5

    if q.is_cuda:
        borders = documents.borders
        if borders is None or not attention_gpu.varlen_takes_head_size(head_size):
            return None
        return attention_gpu.attend_with_varlen(q, k, v, scale=scale, borders=borders)

    blocks = documents.blocks
    if documents.starts is None and attention_cpu.is_faster_in_blocks(q, k, v):
        blocks = attention_cpu.causal_blocks(len(q), length)
    elif torch.compiler.is_compiling():
        # They would be compiled again for each position at which a document begins.
        blocks = None
    if blocks is None or q.device.type != "cpu" or length > attention_cpu.MAX_LENGTH:
        return None
    return attention_cpu.attend_in_blocks(q, k, v, scale=scale, blocks=blocks)
