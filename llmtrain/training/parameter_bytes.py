"""Bytes of parameters, of their gradients and of their optimizer state, when they are sharded.

They follow from the shapes of the parameters, as :func:`llmtrain.parallel.fsdp.shard` and DDP keep
them.
"""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from llmtrain.parallel.fsdp import units_of
from llmtrain.training.muon import Muon
from llmtrain.training.optim import OptimizerKind

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


def parameters_of(
    model: nn.Module,
    optimizer: OptimizerKind,
    *,
    has_bf16_weights: bool,
    muon_matrices: Collection[nn.Parameter],
) -> list[LocalParameter]:
    """Return each parameter of a model, before FSDP2 shards it.

    Args:
        model: the model, which may not be placed yet.
        optimizer: trains it.
        has_bf16_weights: whether placing the model turns the trained weights into bfloat16.
        muon_matrices: the parameters that Muon trains instead.
    """
    muon_ids = {id(p) for p in muon_matrices}
    parameters = []
    for name, p in model.named_parameters():
        is_cast = has_bf16_weights and p.requires_grad
        weights = torch.empty(p.shape, dtype=torch.bfloat16 if is_cast else p.dtype, device="meta")
        is_muon = id(p) in muon_ids
        initial_state = Muon.initial_state if is_muon else optimizer.initial_state
        rows, *row_shape = p.shape or [1]
        parameters.append(
            LocalParameter(
                name=name,
                rows=rows,
                row_numel=math.prod(row_shape),
                element_bytes=weights.element_size(),
                is_trained=p.requires_grad,
                is_muon=is_muon,
                state=initial_state(weights) if p.requires_grad else {},
            )
        )
    return parameters


def units_of_model(
    model: nn.Module, parameters: list[LocalParameter], bf16: bool
) -> list[UnitBytes]:
    """Return the units that FSDP2 gathers. The last one is the rest of the model.

    Args:
        model: the model.
        parameters: its parameters, in the order of the model.
        bf16: whether autocast computes in bfloat16.

    Raises:
        UserError: if the model has no blocks.
    """
    remaining = dict(zip(model.parameters(), parameters, strict=True))
    units = []
    for unit in units_of(model, separate_norms=bf16):
        # A parameter belongs to the first unit that has it.
        units.append(
            UnitBytes(
                parameters=[remaining.pop(p) for p in unit.parameters() if p in remaining],
                is_bf16=unit.is_autocast and bf16,
                stays_gathered=unit.starts_backward,
            )
        )
    rest = UnitBytes(parameters=[*remaining.values()], is_bf16=False, stays_gathered=True)
    return [*units, rest]


def weight_bytes(parameters: list[LocalParameter], shards: int) -> float:
    """Return the bytes of the largest of ``shards`` shards of the weights."""
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters))


def bytes_per_parameter(parameters: list[LocalParameter]) -> dict[str, float]:
    """Return the bytes of a trained parameter by kind, in the mean of all parameters of a model."""
    trained = [p for p in parameters if p.is_trained]
    numel = sum(p.numel() for p in trained) or 1
    weights = weight_bytes(trained, shards=1) / numel
    compensation = sum(p.state["compensation"].nbytes for p in trained if "compensation" in p.state)
    state = sum(p.state_bytes() for p in trained)
    return {
        "weights": weights,
        "gradients": weights,
        "moments": (state - compensation) / numel,
        "compensation": compensation / numel,
    }
