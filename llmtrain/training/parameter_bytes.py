"""Bytes of parameters, of their gradients and of their optimizer state, when they are sharded.

They follow from the shapes of the parameters.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

FLOAT32_BYTES = 4
BF16_BYTES = 2


class LocalParameter(NamedTuple):
    """A parameter as one process has it, before FSDP2 shards it.

    Attributes:
        name: its name in the model.
        rows: the size of its first dimension.
        row_numel: elements of each row.
        element_bytes: bytes of an element, and of its gradient.
        is_trained: whether it is trained.
        is_muon: whether Muon trains it.
        state: its optimizer state, on the meta device.
    """

    name: str
    rows: int
    row_numel: int
    element_bytes: int
    is_trained: bool
    is_muon: bool = False
    state: Mapping[str, torch.Tensor] = MappingProxyType({})

    def numel(self, shards: int = 1) -> int:
        """Return the number of elements in the largest of ``shards`` shards."""
        return -(-self.rows // shards) * self.row_numel

    def state_bytes(self, shards: int = 1) -> int:
        """Return the bytes of optimizer state for the largest of ``shards`` shards.

        A tensor with as many rows as the parameter is sharded by rows, and any other is not.
        """
        total = 0
        for tensor in self.state.values():
            is_sharded = tensor.dim() > 0 and len(tensor) == self.rows
            shard = tensor[: -(-self.rows // shards)] if is_sharded else tensor
            total += shard.nbytes
        return total


class UnitBytes(NamedTuple):
    """The parameters of a unit of FSDP2, which are gathered together, and their bytes.

    Attributes:
        parameters: the parameters.
        is_bf16: whether they are gathered in bfloat16.
        stays_gathered: whether they stay gathered between the forward and the backward pass.
    """

    parameters: list[LocalParameter]
    is_bf16: bool
    stays_gathered: bool

    @property
    def weights(self) -> int:
        """Bytes of the full weights, as FSDP2 gathers them."""
        return sum(
            p.numel() * (BF16_BYTES if self.is_bf16 else p.element_bytes) for p in self.parameters
        )

    @property
    def gradients(self) -> int:
        """Bytes of the full gradients, which FSDP2 adds up and reduces in float32."""
        return sum(p.numel() * FLOAT32_BYTES for p in self.parameters if p.is_trained)


def weight_bytes(parameters: list[LocalParameter], shards: int) -> float:
    """Return the bytes of the largest of ``shards`` shards of the weights."""
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters))
