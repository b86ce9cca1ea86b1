"""The short convolutions of LFM2, which stay inside the documents of packed rows.

transformers' own convolution takes a packed row for one text: the first positions of a document
would see the end of the document before.
"""

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from llmtrain.models.documents import Documents
from llmtrain.models.trainable import put_in_front

# Classes of transformers with the modules `in_proj`, `conv` and `out_proj`, which compute the same.
_CLASS_NAMES = ("Lfm2ShortConv", "Lfm2MoeShortConv")


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
        if is_of_transformers and own_class.__name__ in _CLASS_NAMES:
            put_in_front(ShortConvolution, module)
            has_short_convolutions = True
    return has_short_convolutions


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
