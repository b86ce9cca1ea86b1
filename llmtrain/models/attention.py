"""Causal attention: PyTorch's own, and on a CPU, for rows of moderate length, one in plain matrix products."""

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from llmtrain.models.loss import padded_size

NAME = "llmtrain"  # of :func:`register`'s attention, as transformers' configurations have it
SHORTEST, LONGEST = (
    129,
    512,
)  # positions of rows in blocks: PyTorch is faster below (in float32), and needs less beyond
_WIDEST = 256  # head of torch's kernel for sequences of many lengths
_BLOCK = 64  # queries at a time, of those tried the fastest for 64 to 512 positions
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # torch 2.13
_SPECIAL = (
    "softcap",
    "position_bias",
    "cache",
)  # options of a few models, which transformers' own attention knows

# Of rows; of queries; of the keys that they meet; and which of these are hidden, bool [rows, queries, keys], where that
# is more than those that come later.
Blocks = list[tuple[slice, slice, slice, Tensor | None]]


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of packed rows [B, T], which do not see each other. Made on the host, before rows are sent."""

    starts: Tensor | None = (
        None  # int64 [B, T]: where in its row the document of each position begins; None: at 0
    )
    hidden: Tensor | None = (
        None  # int64 [2, B, T]: from where to where in it another answer to its prompt stands
    )
    positions: Tensor | None = (
        None  # int64 [B, T]: of each in its document, where that is not its place
    )
    borders: Tensor | None = (
        None  # int32 [N]: where each begins, rows laid end to end, and the end, maybe repeated
    )
    blocks: Blocks | None = None  # of a CPU
    flex: Any = None  # blocks of flex attention, where that computes it: :meth:`ready_for`

    @classmethod
    def of(
        cls, position_ids: Tensor, on_gpu: bool = False, answers: Tensor | None = None
    ) -> "Documents":
        """Find them by where ``position_ids`` [B, T] do not go on; ``on_gpu`` makes shapes that recur.

        With ``answers`` [B, T], as rows of pairs have them, the second answer of a pair goes on from the first's prompt
        where its positions do.
        """
        positions = (
            position_ids.numpy()
        )  # which keeps to the thread that it is called on; torch starts others
        begins = np.diff(positions, prepend=positions[:, :1] - 2) != 1
        starts = _last_where(begins)
        if answers is not None:
            which = answers.numpy()
            begins |= np.diff(which, prepend=which[:, :1] - 1) != 0
            own = _last_where(begins)  # where the answer of each position begins
            pairs = which >> 2
            starts = _last_where(np.diff(pairs, prepend=pairs[:, :1] - 1) != 0)
            hidden = np.stack([starts + np.take_along_axis(positions, own, axis=1), own])
            blocks = None if on_gpu else _blocks_of(starts, hidden)
            return cls(
                torch.from_numpy(starts), torch.from_numpy(hidden), position_ids, blocks=blocks
            )
        borders = np.flatnonzero(begins)
        count = padded_size(len(borders) + 1) if on_gpu else len(borders) + 1
        borders = np.pad(borders, (0, count - len(borders)), constant_values=begins.size).astype(
            np.int32
        )
        blocks = None if on_gpu else _blocks_of(starts)
        return cls(torch.from_numpy(starts), borders=torch.from_numpy(borders), blocks=blocks)

    def to(self, device: torch.device, non_blocking: bool = False) -> "Documents":
        """Return them on a device."""
        return self._with(lambda one: one.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """Return them in memory from which a device copies by itself."""
        return self._with(lambda one: one.pin_memory())

    def _with(self, moved: Callable[[Tensor], Tensor]) -> "Documents":
        names = ("starts", "hidden", "positions", "borders")
        found: Any = {
            name: moved(one) for name in names if (one := getattr(self, name)) is not None
        }
        return replace(self, **found)

    def mask(self, window: int | None = None) -> Tensor | None:
        """Return which positions see which, bool [B, 1, T, T]; ``None`` where rows are one document.

        With a ``window`` only so many positions are seen, the last ones of the document.
        """
        if self.starts is None:
            return None
        places = torch.arange(self.starts.shape[1], device=self.starts.device)
        seen = (places >= self.starts[..., None]) & (places <= places[:, None])
        if self.hidden is not None:
            first, last = self.hidden[..., None]
            seen &= (places < first) | (places >= last)
        if window:
            positions = places[None] if self.positions is None else self.positions
            seen &= positions[:, :, None] - positions[:, None] < window
        return seen[:, None]

    def ready_for(self, dtype: torch.dtype) -> "Documents":
        """Return them with all that a GPU's attention in ``dtype`` needs. To be called outside of compiled code."""
        if (
            self.borders is not None and self.borders.is_cuda
        ):  # whose number differs from one micro-batch to the next
            torch._dynamo.maybe_mark_dynamic(self.borders, 0)
        if (
            self.starts is None
            or not self.starts.is_cuda
            or (self.hidden is None and _takes_many_lengths(dtype))
        ):
            return self
        return replace(self, flex=_flex_blocks(self.starts, self.hidden))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return softmax(q k' / sqrt(D)) v, where each position sees itself and those before it; all [B, H, T, D]."""
    if _blocks_pay(q, k, v):
        return _in_blocks(q, k, v, q.shape[-1] ** -0.5, None, _blocks(len(q), q.shape[2]))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _blocks_pay(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether causal attention over whole rows [B, H, T, D] is faster in blocks.

    It is on a CPU, for training: PyTorch's backward pass is slow in 16 bits, and of long rows (benchmarks/LOG.md).
    """
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    shortest = 0 if q.dtype.itemsize == 2 or torch.is_autocast_enabled("cpu") else SHORTEST
    return q.device.type == "cpu" and learns and shortest <= q.shape[2] <= LONGEST


@functools.cache  # it is done once in a process
def register() -> None:
    """Make an attention known to transformers that takes ``documents``, for rows of which nothing is masked else.

    A model is given it by ``config._attn_implementation``. Without ``documents`` it is transformers' own ``sdpa``.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    theirs = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        documents: Documents | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        special = options.get("dropout") or any(options.get(name) is not None for name in _SPECIAL)
        window = options.get("sliding_window")
        if documents is not None and window is not None and window < query.shape[2]:
            special = True
            if documents.starts is None:
                documents = replace(
                    documents, starts=torch.zeros(1, query.shape[2], device=query.device)
                )
        if documents is not None and not special and query.shape[-1] == value.shape[-1]:
            scale = options.get("scaling")
            out = _attend(
                query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, documents
            )
            if out is not None:
                return out.transpose(1, 2).contiguous(), None
        mask = attention_mask if documents is None else documents.mask(window)
        result: tuple[Tensor, None] = theirs(module, query, key, value, mask, **options)
        return result

    ALL_ATTENTION_FUNCTIONS.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents) -> Tensor | None:
    """Return attention [B, H, T, D]; ``None`` where there is no better way than with a mask, or none is needed."""
    if (
        q.is_cuda and documents.starts is not None
    ):  # rotary positions make float32 of q and k under autocast
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else v.dtype
        q, k, v = (each.to(dtype) for each in (q, k, v))
        if documents.flex is not None:
            return _flex(q, k, v, scale, documents)
        if documents.borders is None or q.shape[-1] % 8 or q.shape[-1] > _WIDEST:
            return None
        return _varlen(q, k, v, scale, documents.borders)
    if (
        q.device.type != "cpu"
        or q.shape[2] > LONGEST
        or (documents.starts is None and not _blocks_pay(q, k, v))
    ):
        return None
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    blocks = documents.blocks
    if (
        blocks is None or torch.compiler.is_compiling()
    ):  # else each other beginning of a document would be compiled
        if documents.hidden is not None:
            return None
        blocks = _blocks(len(q), q.shape[2])
    return _in_blocks(q, k, v, scale, documents.starts, blocks)


@functools.cache
def _takes_many_lengths(dtype: torch.dtype) -> bool:
    """Return whether torch's kernel for sequences of many lengths computes this: on GPUs since A100, in 16 bits."""
    known = dtype in (torch.float16, torch.bfloat16) and torch.cuda.get_device_capability() >= (
        8,
        0,
    )
    return known and _keeps_documents_apart(torch.device("cuda"), dtype)


@torch.no_grad()
def _keeps_documents_apart(device: torch.device, dtype: torch.dtype) -> bool:
    """Try that kernel on rows of two documents: what it computes differs between versions of torch."""
    places = torch.arange(48)
    documents = Documents.of(torch.stack([places % 20, places % 31]), on_gpu=True).to(device)
    assert documents.borders is not None
    mask, values = (
        documents.mask(),
        torch.arange(2.0 * 8 * 48 * 64, device=device).mul(7).sin().to(dtype),
    )
    values = values.view(2, 8, 48, 64)
    q, k, v = values[:, :4], values[:, 4:6], values[:, 6:]
    try:
        found = _varlen(q, k, v, 0.125, documents.borders)
    except (RuntimeError, TypeError, ValueError):
        return False
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.125, enable_gqa=True)
    return torch.allclose(found, expected, rtol=0.02, atol=0.02)


def _varlen(q: Tensor, k: Tensor, v: Tensor, scale: float, borders: Tensor) -> Tensor:
    rows, heads, length, _ = q.shape
    how: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # causal
    groups = heads // k.shape[1]
    if _TAKES_GROUPS:
        how["enable_gqa"] = groups > 1
    elif groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    flat_q, flat_k, flat_v = (
        each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)
    )  # [B * T, H, D]
    out: Tensor = varlen_attn(flat_q, flat_k, flat_v, borders, borders, length, length, **how)  # type: ignore[assignment]
    return out.view(rows, length, heads, -1).transpose(1, 2)


def _flex_blocks(starts: Tensor, hidden: Tensor | None = None) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key >= starts[row, query]) & (key <= query)
        return (
            seen
            if hidden is None
            else seen & ((key < hidden[0, row, query]) | (key >= hidden[1, row, query]))
        )

    (rows, length), device = starts.shape, starts.device
    return create_block_mask(
        sees, rows, None, length, length, device, _compile=device.type == "cuda"
    )


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, documents: Documents) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    out: Tensor = _flex_kernel(q.is_cuda)(
        q, k, v, block_mask=documents.flex, scale=scale, enable_gqa=grouped
    )
    return out


@functools.cache
def _flex_kernel(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return cast("Callable[..., Any]", torch.compile(flex_attention) if compiled else flex_attention)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, starts: Tensor | None, blocks: Blocks
) -> Tensor:
    if torch.is_autocast_enabled("cpu"):  # with which PyTorch's own attention does the same
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (each if each.dtype == torch.float64 else each.to(dtype) for each in (q, k, v))
    with torch.autocast("cpu", enabled=False):  # or it would round the scores
        out: Tensor = _Blockwise.apply(q, k, v, scale, starts, blocks)  # type: ignore[no-untyped-call]
    return out


class _Blockwise(torch.autograd.Function):
    """Attention in which a block of queries at a time meets the keys up to its last.

    In packed rows they begin with the first that the block may see; what lies outside is never computed.

    The probabilities are kept for backward, as in the attention of Vaswani et al. (2017). On a CPU, PyTorch's fused
    operation computes them twice and its products reach a fraction of the speed of a batched one: forward and backward
    took 1.3 to 1.6 times as long in float32, and 2.3 to 4 times in bfloat16 (benchmarks/LOG.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        starts: Tensor | None,
        blocks: Blocks,
    ) -> Tensor:
        shape = q.shape
        heads, length, size = shape[1:]
        q, k, v = (each.reshape(-1, length, size) for each in (q, k, v))
        ctx.scale, ctx.blocks, ctx.heads = scale, blocks, heads
        out = torch.empty_like(q)
        probabilities: list[Tensor] = []
        later = torch.ones(_BLOCK, _BLOCK, dtype=torch.bool, device=q.device).triu(1)
        places = torch.arange(length, device=q.device)
        exact_q, exact_k = (
            (q * scale, k) if q.dtype == torch.float64 else (q.float() * scale, k.float())
        )
        for rows, block, seen, known in blocks:
            at = slice(rows.start * heads, rows.stop * heads)
            scores = torch.bmm(
                exact_q[at, block], exact_k[at, seen].transpose(1, 2)
            )  # bfloat16 would round them
            span = block.stop - block.start
            hidden = known
            if known is None:
                scores[:, :, -span:].masked_fill_(later[:span, :span], float("-inf"))
                hidden = (
                    None if starts is None else places[seen] < starts[rows, block, None]
                )  # in earlier documents
            if hidden is not None:
                scores.view(-1, heads, *scores.shape[1:]).masked_fill_(
                    hidden[:, None], float("-inf")
                )
            probabilities.append(scores.softmax(-1).to(q.dtype))
            out[at, block] = torch.bmm(probabilities[-1], v[at, seen])
        ctx.save_for_backward(q, k, v, *probabilities)
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        shape, grad = grad.shape, grad.reshape(q.shape)
        grad_q = torch.empty_like(q)
        summed: list[Tensor] = []
        for (rows, block, seen, _), p in reversed(
            list(zip(ctx.blocks, probabilities, strict=True))
        ):
            at = slice(rows.start * ctx.heads, rows.stop * ctx.heads)
            for_p = torch.bmm(grad[at, block], v[at, seen].transpose(1, 2))
            for_scores = torch._softmax_backward_data(for_p, p, -1, p.dtype).mul_(ctx.scale)
            grad_q[at, block] = torch.bmm(for_scores, k[at, seen])
            new = [
                torch.bmm(for_scores.transpose(1, 2), q[at, block]),
                torch.bmm(p.transpose(1, 2), grad[at, block]),
            ]
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
    return [(slice(0, rows), slice(start, end), slice(0, end), None) for start, end in ends]


def _last_where(begins: np.ndarray) -> np.ndarray:
    """Return, of each place in rows [B, T], the last one up to it where something begins."""
    return np.asarray(
        np.maximum.accumulate(np.where(begins, np.arange(begins.shape[1]), 0), axis=1)
    )


def _blocks_of(starts: np.ndarray, other: np.ndarray | None = None) -> Blocks:
    """Return blocks of queries, each with the keys from the first that it may see: in a packed row they are few.

    Neighbouring rows for which it is the same go together. ``other`` [2, B, T] are bounds of what none sees, either.
    """
    found, places = Blocks(), np.arange(starts.shape[1])
    for _, queries, keys, _ in _blocks(*starts.shape):
        # so that sizes recur: a product is made ready once for each
        firsts = starts[:, queries.start] // _BLOCK * _BLOCK
        row = 0
        for first, alike in itertools.groupby(firsts.tolist()):
            end = row + len(list(alike))
            here, seen = places[queries, None], places[first : keys.stop]
            hidden = (seen > here) | (seen < starts[row:end, queries, None])
            if other is not None:
                begin, after = other[:, row:end, queries, None]
                hidden |= (seen >= begin) & (seen < after)
            found.append(
                (slice(row, end), queries, slice(first, keys.stop), torch.from_numpy(hidden))
            )
            row = end
    return found
