"""Bytes of parameters, of their gradients and of their optimizer state, when they are sharded.

They follow from the shapes of the parameters, as :func:`llmtrain.parallel.fsdp.shard` and DDP keep
them.
"""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple

from torch import nn

from llmtrain.parallel.fsdp import units_of
from llmtrain.training.optimizer_bytes import StateBytes, compensation_bytes, state_bytes

_FLOAT32_BYTES = 4
_BF16_BYTES = 2


class LocalParameter(NamedTuple):
    """A parameter as one process has it, before FSDP2 shards it.

    Attributes:
        name: its name in the model.
        rows: the size of its first dimension.
        row_numel: elements of each row.
        element_bytes: bytes of an element, and of its gradient.
        is_trained: whether it is trained.
        is_muon: whether Muon trains it.
        state: bytes of its optimizer state.
    """

    name: str
    rows: int
    row_numel: int
    element_bytes: int
    is_trained: bool
    is_muon: bool = False
    state: StateBytes = StateBytes()

    def numel(self, shards: int = 1) -> int:
        """Return the number of elements in the largest of ``shards`` shards."""
        return -(-self.rows // shards) * self.row_numel

    def state_bytes(self, shards: int = 1) -> int:
        """Return the bytes of optimizer state for the largest of ``shards`` shards."""
        return self.state.of_rows(-(-self.rows // shards))


class Unit(NamedTuple):
    """Parameters that FSDP2 gathers together.

    Attributes:
        names: the names of the parameters.
        is_bf16: whether they are gathered in bfloat16.
        stays_gathered: whether they stay gathered between the forward and the backward pass.
    """

    names: frozenset[str]
    is_bf16: bool
    stays_gathered: bool

    def gathered_bytes(self, parameters: Iterable[LocalParameter]) -> int:
        """Return the bytes of the full weights, as FSDP2 gathers them.

        Args:
            parameters: parameters of the model, among which are those of this unit.
        """
        return sum(
            parameter.numel() * (_BF16_BYTES if self.is_bf16 else parameter.element_bytes)
            for parameter in parameters
            if parameter.name in self.names
        )

    def gradient_bytes(self, parameters: Iterable[LocalParameter]) -> int:
        """Return the bytes of the full gradients, which FSDP2 adds up and reduces in float32.

        Args:
            parameters: parameters of the model, among which are those of this unit.
        """
        return sum(
            parameter.numel() * _FLOAT32_BYTES
            for parameter in parameters
            if parameter.name in self.names and parameter.is_trained
        )


def parameters_of(
    model: nn.Module,
    optim: str,
    *,
    has_bf16_weights: bool,
    muon_matrices: Collection[nn.Parameter],
) -> list[LocalParameter]:
    """Return each parameter of a model, before FSDP2 shards it.

    Args:
        model: the model, which may not be placed yet.
        optim: as in ``--optim``.
        has_bf16_weights: whether placing the model turns the trained weights into bfloat16.
        muon_matrices: the parameters that Muon trains.
    """
    muon_ids = {id(p) for p in muon_matrices}
    parameters = []
    for name, p in model.named_parameters():
        rows, *row_shape = p.shape or [1]
        is_muon = id(p) in muon_ids
        element_bytes = p.element_size()
        state = StateBytes()
        if p.requires_grad:
            own_optim = "adamw" if optim == "muon" and not is_muon else optim
            state = state_bytes(own_optim, p.shape, has_bf16_weights)
            if has_bf16_weights:
                element_bytes = _BF16_BYTES

        parameters.append(
            LocalParameter(
                name=name,
                rows=rows,
                row_numel=math.prod(row_shape),
                element_bytes=element_bytes,
                is_trained=p.requires_grad,
                is_muon=is_muon,
                state=state,
            )
        )
    return parameters


def units_of_model(model: nn.Module, bf16: bool) -> list[Unit]:
    """Return the units that FSDP2 gathers. The last one is the rest of the model.

    Args:
        model: the model.
        bf16: whether autocast computes in bfloat16.

    Raises:
        UserError: if the model has no blocks.
    """
    names = {p: name for name, p in model.named_parameters()}
    units = []
    for unit in units_of(model, separate_norms=bf16):
        # A parameter belongs to the first unit that has it.
        unit_names = [names.pop(p) for p in unit.parameters() if p in names]
        units.append(
            Unit(
                names=frozenset(unit_names),
                is_bf16=unit.is_autocast and bf16,
                stays_gathered=unit.starts_backward,
            )
        )
    rest = Unit(names=frozenset(names.values()), is_bf16=False, stays_gathered=True)
    return [*units, rest]


def weight_bytes(parameters: list[LocalParameter], shards: int) -> float:
    """Return the bytes of the largest of ``shards`` shards of the weights."""
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters))


def gradient_bytes(parameters: list[LocalParameter], shards: int) -> float:
    """Return the bytes of the largest of ``shards`` shards of the reduced gradients."""
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters if p.is_trained))


def bytes_per_parameter(
    parameters: list[LocalParameter], optim: str, has_bf16_weights: bool
) -> dict[str, float]:
    """Return the bytes of a trained parameter by kind, in the mean of all of them.

    Args:
        parameters: the parameters of a model.
        optim: as in ``--optim``.
        has_bf16_weights: whether the trained weights are in bfloat16.
    """
    trained = [p for p in parameters if p.is_trained]
    numel = sum(p.numel() for p in trained) or 1
    compensation = compensation_bytes(optim, has_bf16_weights)
    state = sum(p.state_bytes() for p in trained) / numel
    return {
        "weights": weight_bytes(trained, shards=1) / numel,
        "gradients": gradient_bytes(trained, shards=1) / numel,
        "moments": state - compensation,
        "compensation": float(compensation),
    }
