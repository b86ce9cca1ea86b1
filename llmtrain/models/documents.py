"""Which documents share a packed row, in the forms that attention and convolutions take."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.interfaces.batches import padded_size, pair_of
from llmtrain.models import attention_cpu
from llmtrain.models.trainable import put_in_front


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of packed rows [B, T], which do not see each other.

    Training makes them on the host with :meth:`of`, before the rows are sent to a device.

    Attributes:
        starts: int64 [B, T], the index in the row at which the document of each position begins.
            ``None`` if each row is one document.
        other_answers: int64 [2, B, T], if two answers share a prompt: begin and end, as indices in
            the row, of an earlier answer that the position does not see. They are equal if there is
            none.
        positions: int64 [B, T], the position of each token in its document, if two answers share a
            prompt. ``None`` if positions count up along the row.
        borders: int32 [N], where each document begins when rows are laid end to end, and the end.
            The end may be repeated.
        blocks: the blocks of queries that attention on a CPU computes.
    """

    starts: Tensor | None = None
    other_answers: Tensor | None = None
    positions: Tensor | None = None
    borders: Tensor | None = None
    blocks: list[attention_cpu.Block] | None = None

    @classmethod
    def of(
        cls,
        position_ids: Tensor,
        on_gpu: bool = False,
        answers: Tensor | None = None,
    ) -> "Documents":
        """Find the documents in packed rows.

        Args:
            position_ids: [B, T]. A document begins if they do not count up by one. The result is
                on their device.
            on_gpu: prepare what a GPU takes, in shapes that recur.
            answers: [B, T], the code of the answer that each token of preference data belongs to;
                see :mod:`llmtrain.interfaces.batches`. The second answer of a pair continues
                the prompt of the first, at its own positions.
        """
        # numpy stays on the calling thread. torch would start threads, which compete with training.
        device = position_ids.device
        on_gpu = on_gpu or device.type == "cuda"
        position_ids = position_ids.cpu()
        positions = position_ids.numpy()
        is_begin = np.diff(positions, prepend=positions[:, :1] - 2) != 1
        if answers is not None:
            codes = answers.numpy()
            is_begin |= np.diff(codes, prepend=codes[:, :1] - 1) != 0
            documents = cls._of_pairs(position_ids, is_begin, pairs=pair_of(codes), on_gpu=on_gpu)
            return documents.to(device)

        starts = _latest(is_begin)
        borders = np.append(np.flatnonzero(is_begin), is_begin.size).astype(np.int32)
        if on_gpu:
            padding = padded_size(len(borders)) - len(borders)
            borders = np.pad(borders, (0, padding), mode="edge")
        documents = cls(
            starts=torch.from_numpy(starts),
            borders=torch.from_numpy(borders),
            blocks=None if on_gpu else attention_cpu.packed_blocks(starts),
        )
        return documents.to(device)

    @classmethod
    def _of_pairs(
        cls, position_ids: Tensor, is_begin: np.ndarray, pairs: np.ndarray, on_gpu: bool
    ) -> "Documents":
        starts = _latest(np.diff(pairs, prepend=pairs[:, :1] - 1) != 0)

        # The second answer begins with a copy of the prompt's last token, p2:
        #
        #     token          p0 p1 p2 a3 a4 p2 b3 b4
        #     position_ids    0  1  2  3  4  2  3  4
        #     answer_starts   0  0  0  0  0  5  5  5
        #
        # It continues from position 2, so it does not see the indices from 2 to 4. The first answer
        # continues from position 0, so all tokens before it are visible.
        answer_starts = _latest(is_begin)
        continued_from = np.take_along_axis(position_ids.numpy(), answer_starts, axis=1)
        other_answers = np.stack([starts + continued_from, answer_starts])

        return cls(
            starts=torch.from_numpy(starts),
            other_answers=torch.from_numpy(other_answers),
            positions=position_ids,
            blocks=None if on_gpu else attention_cpu.packed_blocks(starts, other_answers),
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> "Documents":
        """Return the documents on a device."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Documents":
        """Return the documents in pinned memory, from which copies to a GPU are asynchronous."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Documents":
        tensors: dict[str, Any] = {}
        for name in ("starts", "other_answers", "positions", "borders"):
            tensor = getattr(self, name)
            if tensor is not None:
                tensors[name] = function(tensor)
        return replace(self, **tensors)

    def mask(self, window: int | None = None) -> Tensor | None:
        """Return which keys each query sees, bool [B, 1, T, T]; ``None`` without ``starts``.

        Args:
            window: the number of positions, including its own, that a query sees at most.
        """
        if self.starts is None:
            return None

        keys = torch.arange(self.starts.shape[1], device=self.starts.device)
        queries = keys[:, None]
        visible = (keys >= self.starts[..., None]) & (keys <= queries)

        if self.other_answers is not None:
            begins, ends = self.other_answers[..., None]
            visible &= (keys < begins) | (keys >= ends)

        if window:
            positions = keys[None] if self.positions is None else self.positions
            visible &= positions[:, :, None] - positions[:, None] < window

        return visible[:, None]

    def preceding(self, x: Tensor, distance: int) -> Tensor:
        """Return the vector of an earlier token for each position; zeros if there is none.

        Args:
            x: vectors [B, T, C].
            distance: how many tokens earlier, in the same document. The tokens before a second
                answer are those of its prompt.
        """
        length = x.shape[1]
        indices = torch.arange(length, device=x.device) - distance

        if self.other_answers is None:
            # A gather would compute the same, but its gradient takes longer.
            shifted = F.pad(x, (0, 0, distance, 0))[:, :length]
        else:
            begins, ends = self.other_answers
            indices = torch.where(indices < ends, indices - (ends - begins), indices)
            first_of_row = length * torch.arange(len(x), device=x.device)[:, None]
            flat_indices = (indices.clamp(min=0) + first_of_row).flatten()
            shifted = x.flatten(0, 1).index_select(0, flat_indices).view_as(x)

        if self.starts is None:
            return shifted
        exists = indices >= self.starts
        return torch.where(exists[..., None], shifted, 0)


def _latest(is_begin: np.ndarray) -> np.ndarray:
    """Return for each position of rows [B, T] the last index up to it at which something begins."""
    indices = np.arange(is_begin.shape[1])
    latest: np.ndarray = np.maximum.accumulate(np.where(is_begin, indices, 0), axis=1)
    return latest


def convolve(
    x: Tensor, *, weight: Tensor, documents: Documents, bias: Tensor | None = None
) -> Tensor:
    """Return the causal convolution of each channel, inside each document.

    Args:
        x: [B, T, C].
        weight: [C, K]. The last column belongs to the position itself.
        documents: the documents of the rows.
        bias: [C].
    """
    # Like a convolution, round to half precision only once.
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    total = x * weight[:, -1]
    for distance in range(1, weight.shape[1]):
        total = torch.addcmul(total, documents.preceding(x, distance), weight[:, -1 - distance])
    if bias is not None:
        total = total + bias
    return total.to(x.dtype)


# --- the short convolutions of LFM2 in transformers. They take a packed row for one text: the first
# positions of a document would see the end of the document before.

# Classes of transformers with the modules `in_proj`, `conv` and `out_proj`, which compute the same.
_SHORT_CONVOLUTIONS = ("Lfm2ShortConv", "Lfm2MoeShortConv")


class ShortConvolution(nn.Module):
    """The ``forward`` of a gated short convolution, for rows of several documents.

    :func:`keep_documents_apart` changes the class of a convolution to a subclass of this class and
    of the convolution's own. If each row is one document, the own class computes the result.
    """

    own_class: ClassVar[type]

    if TYPE_CHECKING:  # the modules of the own class
        in_proj: nn.Module
        conv: nn.Conv1d
        out_proj: nn.Module

    def forward(
        self,
        hidden_states: Tensor,
        documents: Documents | None = None,
        **options: Any,
    ) -> Tensor:
        """Return the output [B, T, C].

        Args:
            hidden_states: [B, T, C].
            documents: the documents of the rows.
            options: further arguments of the model's layers, which are for rows that are not
                packed: the padding, and the cache of generation.
        """
        if documents is None or documents.starts is None:
            output: Tensor = super().forward(hidden_states, **options)
            return output

        # transformers 5.24 renamed past_key_values.
        caches = (options.get("past_key_values"), options.get("cache"))
        assert caches == (None, None), "packed rows are computed without a cache"
        gate_before, gate_after, values = self.in_proj(hidden_states).chunk(3, dim=-1)
        convolved = convolve(
            gate_before * values,
            weight=self.conv.weight.squeeze(1),
            bias=self.conv.bias,
            documents=documents,
        )
        result: Tensor = self.out_proj(gate_after * convolved)
        return result


def keep_documents_apart(model: nn.Module) -> bool:
    """Change the short convolutions of a model, in place, and return whether it has any.

    Each gets the ``forward`` of :class:`ShortConvolution`.
    """
    has_short_convolutions = False
    for module in model.modules():
        own_class = type(module)
        is_of_transformers = own_class.__module__.startswith("transformers.")
        if is_of_transformers and own_class.__name__ in _SHORT_CONVOLUTIONS:
            put_in_front(ShortConvolution, module)
            has_short_convolutions = True
    return has_short_convolutions
