"""Bytes that a process holds while it trains.

The bytes of weights, gradients and optimizer state follow from the shapes of the parameters, as
:func:`llmtrain.parallel.fsdp.shard` and DDP keep them. :mod:`llmtrain.training.activations` counts
the activations.
"""

import copy
import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from llmtrain.errors import UserError, first_line
from llmtrain.parallel.fsdp import units_of
from llmtrain.parallel.sharding import Sharding
from llmtrain.training.activations import (
    ActivationBytes,
    MicroBatch,
    PeakBytes,
    count_activations,
)
from llmtrain.training.muon import batches_of
from llmtrain.training.optim import hidden_matrices
from llmtrain.training.recipe_model import RecipeModel, build_recipe_model

# Trained weights are float32, and so are their gradients and their optimizer state.
_FLOAT32_BYTES = 4
_BF16_BYTES = 2

# Elements of optimizer state for each trained element.
_MUON_STATES = 1
_ADAMW_STATES = 2


class Bytes(NamedTuple):
    """Bytes on the process that holds most.

    Attributes:
        weights: its weights.
        gradients: their gradients.
        optimizer: optimizer state.
        activations: what the forward pass keeps for the backward pass, without the logits.
        logits: what the head makes, and its gradient.
        buckets: gathered weights, and gradients that are being sent, if they have separate memory.
        total: at the peak of the memory use. Not every kind has to be at its largest then.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buckets: float
    total: float


class LocalParameter(NamedTuple):
    """A parameter as one process has it, before FSDP2 shards it.

    Attributes:
        name: its name in the model.
        rows: the size of its first dimension.
        row_numel: elements of each row.
        element_bytes: bytes of an element.
        is_trained: whether it is trained.
        states: elements of optimizer state for each of its own.
    """

    name: str
    rows: int
    row_numel: int
    element_bytes: int
    is_trained: bool
    states: int

    @property
    def is_muon(self) -> bool:
        """Whether Muon trains it."""
        return self.states == _MUON_STATES

    def numel(self, shards: int = 1) -> int:
        """Return the number of elements in the largest of ``shards`` shards."""
        return -(-self.rows // shards) * self.row_numel


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


class _Buckets(NamedTuple):
    """Bytes of gathered weights and of gradients being sent, at two moments."""

    at_loss: float
    in_backward: float


class Memory:
    """The memory that the training of one model needs.

    Args:
        recipe: the model, and how it is trained.
        on_gpu: whether it is trained on GPUs.

    Attributes:
        bf16: whether autocast computes in bfloat16.
        reduces_once: whether gradients accumulate over the micro-batches of a step, and are reduced
            after the last one. With ``--sync_each_batch`` they are reduced after each one.
    """

    def __init__(self, recipe: RecipeModel, on_gpu: bool) -> None:
        self.recipe = recipe
        self.on_gpu = on_gpu
        self.bf16 = recipe.precision == "bf16"
        self.reduces_once = not recipe.settings.parallel.sync_each_batch

        muon_matrices: set[nn.Parameter] = set()
        if recipe.settings.optim.optim == "muon":
            muon_matrices.update(hidden_matrices(recipe.model))
        self._muon_matrices = {
            name: p for name, p in recipe.model.named_parameters() if p in muon_matrices
        }

    @classmethod
    def of_recipe(cls, path: str, flags: list[str], precision: str, on_gpu: bool) -> "Memory":
        """Return the memory that a recipe needs.

        Args:
            path: path of the recipe.
            flags: its flags.
            precision: mixed precision, ``no`` or ``bf16``.
            on_gpu: whether it is trained on GPUs.

        Raises:
            UserError: if the file is not a recipe, or its model cannot be built without weights.
        """
        return cls(build_recipe_model(path, flags, precision), on_gpu)

    # --- what a process has

    @functools.cached_property
    def units(self) -> list[Unit]:
        """The units that FSDP2 gathers. The last one is the rest of the model.

        Raises:
            UserError: if the model has no blocks.
        """
        names = {p: name for name, p in self.recipe.model.named_parameters()}
        units = []
        for unit in units_of(self.recipe.model, separate_norms=self.bf16):
            # A parameter belongs to the first unit that has it.
            unit_names = [names.pop(p) for p in unit.parameters() if p in names]
            units.append(
                Unit(
                    names=frozenset(unit_names),
                    is_bf16=unit.is_autocast and self.bf16,
                    stays_gathered=unit.starts_backward,
                )
            )
        rest = Unit(names=frozenset(names.values()), is_bf16=False, stays_gathered=True)
        return [*units, rest]

    @functools.cached_property
    def parameters(self) -> list[LocalParameter]:
        """Each parameter, before FSDP2 shards it."""
        parameters = []
        for name, p in self.recipe.model.named_parameters():
            rows, *row_shape = p.shape or [1]
            parameters.append(
                LocalParameter(
                    name=name,
                    rows=rows,
                    row_numel=math.prod(row_shape),
                    element_bytes=p.element_size(),
                    is_trained=p.requires_grad,
                    states=self._states(name, p),
                )
            )
        return parameters

    def _states(self, name: str, parameter: nn.Parameter) -> int:
        """Return the elements of optimizer state for each element of a parameter."""
        if not parameter.requires_grad:
            return 0
        return _MUON_STATES if name in self._muon_matrices else _ADAMW_STATES

    @functools.cache  # noqa: B019 - as long as the plan lives
    def activations(self, rows: int, gathers_weights: bool) -> ActivationBytes:
        """Count the activations of a micro-batch.

        Args:
            rows: rows of the micro-batch.
            gathers_weights: whether FSDP2 gathers weights, some of them in bfloat16.

        Raises:
            UserError: if the activations depend on the values of tensors.
        """
        gathered_in_bf16: frozenset[str] = frozenset()
        if gathers_weights:
            names = [unit.names for unit in self.units if unit.is_bf16]
            gathered_in_bf16 = frozenset().union(*names)

        batch = MicroBatch(
            rows=rows,
            positions=self.recipe.positions,
            bf16=self.bf16,
            gathered_in_bf16=gathered_in_bf16,
            has_gpu_attention=self.on_gpu,
        )
        try:
            return count_activations(self.recipe.model, self.recipe.objective, batch)
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"the activations cannot be counted, because {self.recipe.class_name} or its loss "
                f"looks at the values of tensors ({first_line(error)}); if the loss selects "
                "positions by a mask, multiply by the mask instead"
            ) from None

    # --- bytes of a process

    def bytes_of(self, sharding: Sharding, rows: int, accumulation: int) -> Bytes:
        """Return the bytes on the process that holds most.

        Args:
            sharding: how processes share the model.
            rows: rows per micro-batch.
            accumulation: micro-batches per step.
        """
        activations = self.activations(rows, sharding.is_sharded)
        other_blocks = activations.per_block * (activations.blocks - 1)
        return self._bytes(
            sharding,
            accumulation,
            at_loss=activations.peak,
            in_backward=activations.before_blocks + other_blocks,
            end_of_backward=activations.end_of_backward,
        )

    def _bytes(
        self,
        sharding: Sharding,
        accumulation: int,
        *,
        at_loss: PeakBytes,
        in_backward: float,
        end_of_backward: float,
    ) -> Bytes:
        """Return the bytes of the parameters and of the activations.

        The total is the largest of four moments: the loss, the backward pass, its end, and the
        optimizer step.

        Args:
            sharding: how processes share the model.
            accumulation: micro-batches per step.
            at_loss: activations and logits when the loss is computed.
            in_backward: activations when the backward pass of the last block has ended.
            end_of_backward: activations at the end of the backward pass.
        """
        parameters = self.parameters
        weights = _weight_bytes(parameters, sharding.shards)
        optimizer = _optimizer_bytes(parameters, sharding.shards)
        reduced_gradients = _gradient_bytes(parameters, sharding.shards)

        gradients = reduced_gradients
        # The gradients that earlier micro-batches have left when the last micro-batch begins.
        earlier_gradients = 0.0 if accumulation == 1 else gradients
        reduces_each_batch = accumulation == 1 or not self.reduces_once

        buckets = _Buckets(at_loss=0.0, in_backward=0.0)
        if sharding.is_sharded:
            buckets = self._gathered(reduces_each_batch)
            if not reduces_each_batch:
                gradients = _gradient_bytes(parameters)
                earlier_gradients = gradients
        elif sharding.replicas > 1:
            # DDP keeps its buckets from step to step, and gradients live in them. If gradients
            # accumulate over micro-batches, they need memory besides the buckets.
            earlier_gradients = gradients
            if not reduces_each_batch:
                buckets = _Buckets(at_loss=gradients, in_backward=gradients)

        moments = [
            earlier_gradients + at_loss.total + buckets.at_loss,
            earlier_gradients + in_backward + buckets.in_backward,
            gradients + end_of_backward + buckets.in_backward,
            reduced_gradients + self._muon_bytes(),
        ]
        return Bytes(
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            activations=at_loss.activations,
            logits=at_loss.logits,
            buckets=buckets.at_loss,
            total=weights + optimizer + max(moments),
        )

    def _gathered(self, reduces_each_batch: bool) -> _Buckets:
        """Return the bytes that FSDP2 gathers and reduces in a micro-batch.

        At the loss, a process holds the units that stay gathered, and one more.

        In the backward pass it also holds the weights of the next block, the gradient of the block
        that it has just computed, and a buffer to reduce that gradient. If gradients accumulate
        over micro-batches, the gradient is counted elsewhere.

        Args:
            reduces_each_batch: whether this micro-batch's gradient is reduced as it comes.
        """
        by_name = {p.name: p for p in self.parameters}
        staying = 0
        largest_weights = 0
        largest_gradient = 0.0
        for unit in self.units:
            unit_parameters = [by_name[name] for name in unit.names]
            weights = unit.gathered_bytes(unit_parameters)
            if unit.stays_gathered:
                staying += weights
            else:
                largest_weights = max(largest_weights, weights)
                largest_gradient = max(largest_gradient, _gradient_bytes(unit_parameters))

        gradient_copies = 2 if reduces_each_batch else 1
        return _Buckets(
            at_loss=float(staying + largest_weights),
            in_backward=staying + 2 * largest_weights + gradient_copies * largest_gradient,
        )

    def _muon_bytes(self) -> float:
        """Return the bytes of Muon's iterations, which are made on full matrices.

        A process holds the updates in float32. In the precision of the products, it holds two
        approximations and two products for each update, and in bfloat16 a copy of the update.
        """
        element_bytes = _BF16_BYTES if self.bf16 else _FLOAT32_BYTES
        copies = 3 if self.bf16 else 2
        largest = 0
        for matrices in batches_of([*self._muon_matrices.values()]):
            short, long = sorted(matrices[0].shape)
            numel = len(matrices) * short * long
            updates = _FLOAT32_BYTES * numel
            approximations = copies * element_bytes * numel
            products = 2 * element_bytes * len(matrices) * short**2
            largest = max(largest, updates + approximations + products)
        return float(largest)

    # --- sizes of a micro-batch

    def fits_if_synced(self, sharding: Sharding, share: int, device_bytes: float) -> bool:
        """Return whether micro-batches of one row fit with ``--sync_each_batch``.

        Args:
            sharding: how processes share the model.
            share: rows of the global batch that a process has.
            device_bytes: memory of the device.
        """
        synced = copy.copy(self)
        synced.reduces_once = False
        return synced.bytes_of(sharding, rows=1, accumulation=share).total <= device_bytes

    def fitting(self, sharding: Sharding, share: int, device_bytes: float) -> list[int]:
        """Return the sizes of a micro-batch that fit, in ascending order.

        A smaller micro-batch may need more memory. If a step has several micro-batches, gradients
        are kept between them. A single micro-batch with all rows does not need that.

        Args:
            sharding: how processes share the model.
            share: rows of the global batch that a process has. A micro-batch divides them.
            device_bytes: memory of the device.
        """
        sizes = []
        for rows in range(1, share + 1):
            if share % rows != 0:
                continue

            if self.bytes_of(sharding, rows, accumulation=share // rows).total <= device_bytes:
                sizes.append(rows)
            elif self.bytes_of(sharding, rows, accumulation=1).total > device_bytes:
                # One micro-batch of this size is too large by itself, so larger ones are, too.
                break
        return sizes


def _weight_bytes(parameters: list[LocalParameter], shards: int) -> float:
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters))


def _gradient_bytes(parameters: list[LocalParameter], shards: int = 1) -> float:
    return float(sum(p.numel(shards) * _FLOAT32_BYTES for p in parameters if p.is_trained))


def _optimizer_bytes(parameters: list[LocalParameter], shards: int) -> float:
    elements = 0
    for p in parameters:
        elements += p.states * p.numel(shards)
        if p.states == _ADAMW_STATES:
            elements += 1  # AdamW counts its steps for each tensor
    return float(elements * _FLOAT32_BYTES)
