"""Causal attention inside each document, in the fastest way for the device and the rows at hand.

On a CPU, rows up to some length are computed in blocks (:mod:`llmtrain.models.attention_cpu`). For
packed rows in 16 bits, a GPU has the varlen kernel, which takes sequences of many lengths, laid end
to end, and needs no mask in memory. It knows only documents that are contiguous. PyTorch's
attention with a mask computes the rest.
"""

import functools
import inspect
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from llmtrain.models import attention_cpu
from llmtrain.models.documents import Documents
from llmtrain.models.loss import matmul_dtype

ATTENTION_NAME = "llmtrain"  # of the attention that :func:`register` adds to transformers

# Options that some models pass to their attention, and that only transformers' own implements.
_SPECIAL_OPTIONS = ("softcap", "position_bias", "cache")

_MAX_HEAD_SIZE = 256  # of the varlen kernel
_VARLEN_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.13


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

            length = query.shape[2]
            window = options.get("sliding_window")
            if documents.starts is None and window is not None and window < length:
                # Without starts there is no mask, and the window would be ignored.
                starts = torch.zeros(1, length, dtype=torch.int64, device=query.device)
                documents = replace(documents, starts=starts)
            attention_mask = documents.mask(window)

        result: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, **options)
        return result

    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attend_without_mask(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents,
    options: Mapping[str, Any],
) -> Tensor | None:
    """Return attention [B, H, T, D], or ``None`` if PyTorch's attention has to compute it.

    Args:
        q: queries [B, H, T, D].
        k: keys [B, G, T, D], with a head for each group of query heads.
        v: values [B, G, T, D].
        documents: the documents of the rows.
        options: what the model passes to its attention.
    """
    length, head_size = q.shape[2:]
    window: int | None = options.get("sliding_window")
    has_window = window is not None and window < length
    if options.get("dropout") or has_window or head_size != v.shape[-1]:
        return None
    if any(options.get(name) is not None for name in _SPECIAL_OPTIONS):
        return None
    scale = options.get("scaling")
    if scale is None:
        scale = head_size**-0.5

    if q.is_cuda:
        borders = documents.borders
        if borders is None or head_size % 8 or head_size > _MAX_HEAD_SIZE:
            return None
        return attend_with_varlen(q, k, v, scale=scale, borders=borders)

    blocks = documents.blocks
    if documents.starts is None and attention_cpu.is_faster_in_blocks(q, k, v):
        blocks = attention_cpu.causal_blocks(len(q), length)
    elif torch.compiler.is_compiling():
        # They would be compiled again for each position at which a document begins.
        blocks = None
    if blocks is None or q.device.type != "cpu" or length > attention_cpu.MAX_LENGTH:
        return None
    return attention_cpu.attend_in_blocks(q, k, v, scale=scale, blocks=blocks)


# --- the varlen kernel


def ready_documents(documents: Documents, dtype: torch.dtype) -> Documents:
    """Return documents with borders only if the varlen kernel takes them in ``dtype``.

    Call it outside compiled code.
    """
    if documents.borders is None or not documents.borders.is_cuda:
        return documents
    if not can_use_varlen(dtype):
        return replace(documents, borders=None)
    # Their number differs between micro-batches.
    torch._dynamo.maybe_mark_dynamic(documents.borders, 0)
    return documents


@functools.cache
def can_use_varlen(dtype: torch.dtype) -> bool:
    """Return whether this GPU's varlen kernel computes ``dtype``, and computes it correctly."""
    if dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.cuda.get_device_capability() < (8, 0):  # before A100
        return False
    return _varlen_is_correct(torch.device("cuda"), dtype)


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
