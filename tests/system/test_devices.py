"""A checksum of a weight needs less memory than the weight, on any device."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from llmtrain.observe.replicas import checksum


class LargestInteger(TorchDispatchMode):
    """Notes the bytes of the largest tensor of 64-bit integers that is made."""

    bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_checksums_of_weights_need_less_memory_than_the_weights() -> None:
    large = nn.Linear(1 << 12, 1 << 12, bias=False)
    with LargestInteger() as largest:
        checksum(large.weight.detach())
    assert 0 < largest.bytes <= large.weight.nbytes
