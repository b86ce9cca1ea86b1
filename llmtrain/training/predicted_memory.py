"""Bytes that a process holds while it trains.

The bytes of weights, gradients and optimizer state follow from the shapes of the parameters, as
:func:`llmtrain.parallel.fsdp.shard` and DDP keep them. :mod:`llmtrain.training.activations` counts
the activations.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from llmtrain.config.flags import value_of
from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.part import name_of
from llmtrain.parallel.fsdp import units_of
from llmtrain.parallel.ranks import Sharding
from llmtrain.training.activations import ActivationBytes, MicroBatch, count_activations
from llmtrain.training.adamw import CHUNK_BYTES, CHUNK_NUMEL
from llmtrain.training.muon import Muon, iteration_bytes
from llmtrain.training.optim import OPTIMIZERS, OptimizerKind, hidden_matrices
from llmtrain.training.recipe_model import RecipeModel

FLOAT32_BYTES = 4
BF16_BYTES = 2
# Of a weight in NF4 with double quantization (Dettmers et al. 2023, arXiv:2305.14314): half a byte,
# a scale of one byte for 64 weights, and four bytes for 256 scales.
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)


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
    element_bytes: float
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
    def weights(self) -> float:
        """Bytes of the full weights, as FSDP2 gathers them."""
        return sum(
            p.numel() * (BF16_BYTES if self.is_bf16 else p.element_bytes) for p in self.parameters
        )

    @property
    def gradients(self) -> int:
        """Bytes of the full gradients, which FSDP2 adds up and reduces in float32."""
        return sum(p.numel() * FLOAT32_BYTES for p in self.parameters if p.is_trained)


class Bytes(NamedTuple):
    """Bytes on the process that holds most.

    Attributes:
        weights: its weights.
        frozen: weights of frozen models, and copies of them that FSDP2 keeps gathered.
        gradients: their gradients.
        optimizer: optimizer state.
        activations: what the forward pass keeps for the backward pass, without the logits.
        logits: what the head makes, and its gradient.
        buckets: gathered weights, and gradients that are being sent, if they have separate memory.
        total: at the peak of the memory use. Not every kind has to be at its largest then.
    """

    weights: float
    frozen: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buckets: float
    total: float


@dataclass
class Memory:
    """The memory that the training of one model needs.

    :func:`dataclasses.replace` returns that of the same model with other flags.

    Attributes:
        recipe: the model, and how it is trained.
        on_gpu: whether it is trained on GPUs.
        optim: the optimizer, as in ``--optim``.
        has_bf16_weights: whether the trained weights are in bfloat16.
        reduces_once: whether gradients accumulate over the micro-batches of a step, and are reduced
            after the last one. With ``--sync_each_batch`` they are reduced after each one.
        has_4bit_base: whether the frozen matrices next to those of LoRA are in 4 bits.
        counted: the activations of micro-batches that were counted, which takes a second.
    """

    recipe: RecipeModel
    on_gpu: bool
    optim: str
    has_bf16_weights: bool
    reduces_once: bool
    has_4bit_base: bool = False
    counted: dict[MicroBatch, ActivationBytes] = field(default_factory=dict)

    @classmethod
    def of(cls, recipe: RecipeModel, on_gpu: bool) -> "Memory":
        """Return the memory with the flags of the recipe."""
        settings = recipe.settings
        return cls(
            recipe=recipe,
            on_gpu=on_gpu,
            optim=settings.optim.optim,
            has_bf16_weights=settings.optim.trained_dtype == "bfloat16",
            reduces_once=not settings.parallel.sync_each_batch,
            has_4bit_base=value_of(settings, "load_in_4bit", default=False),
        )

    @property
    def bf16(self) -> bool:
        """Whether autocast computes in bfloat16."""
        return self.recipe.precision == "bf16"

    @property
    def optimizer(self) -> OptimizerKind:
        """The kind of the optimizer."""
        return OPTIMIZERS[self.optim]

    @property
    def decides_recomputation(self) -> bool:
        """Whether a run chooses if its blocks recompute their activations.

        It does so on a GPU, for ``--gradient_checkpointing auto``.
        """
        settings = self.recipe.settings
        is_auto = value_of(settings, "gradient_checkpointing", default=False) is None
        return is_auto and self.on_gpu and not settings.parallel.bitwise

    # --- what a process has

    @functools.cached_property
    def parameters(self) -> list[LocalParameter]:
        """Each parameter, before FSDP2 shards it."""
        muon_ids = {id(p) for p in self._muon_matrices}
        parameters = []
        for name, p in self.recipe.model.named_parameters():
            # Placing the model turns its weights into bfloat16.
            dtype = torch.bfloat16 if self.has_bf16_weights and p.requires_grad else p.dtype
            weights = torch.empty(p.shape, dtype=dtype, device="meta")
            is_muon = id(p) in muon_ids
            initial_state = Muon.initial_state if is_muon else self.optimizer.initial_state
            is_in_4bit = self.has_4bit_base and name.endswith(".base_layer.weight")
            rows, *row_shape = p.shape or [1]
            parameters.append(
                LocalParameter(
                    name=name,
                    rows=rows,
                    row_numel=math.prod(row_shape),
                    element_bytes=NF4_BYTES if is_in_4bit else weights.element_size(),
                    is_trained=p.requires_grad,
                    is_muon=is_muon,
                    state=initial_state(weights) if p.requires_grad else {},
                )
            )
        return parameters

    @functools.cached_property
    def units(self) -> list[UnitBytes]:
        """The units that FSDP2 gathers. The last one is the rest of the model.

        Raises:
            UserError: if the model has no blocks.
        """
        model = self.recipe.model
        remaining = dict(zip(model.parameters(), self.parameters, strict=True))
        units = []
        for unit in units_of(model, separate_norms=self.bf16):
            # A parameter belongs to the first unit that has it.
            units.append(
                UnitBytes(
                    parameters=[remaining.pop(p) for p in unit.parameters() if p in remaining],
                    is_bf16=unit.is_autocast and self.bf16,
                    stays_gathered=unit.starts_backward,
                )
            )
        rest = UnitBytes(parameters=[*remaining.values()], is_bf16=False, stays_gathered=True)
        return [*units, rest]

    @functools.cached_property
    def frozen(self) -> "list[Memory]":
        """The memory of each frozen model, which has weights alone."""
        return [
            replace(self, recipe=self.recipe._replace(model=model, frozen={}), has_4bit_base=False)
            for model in self.recipe.frozen.values()
        ]

    @functools.cached_property
    def _muon_matrices(self) -> list[nn.Parameter]:
        return hidden_matrices(self.recipe.model) if self.optimizer.has_muon else []

    def activations(
        self, rows: int, gathers_weights: bool, recomputes: bool | None = None
    ) -> ActivationBytes:
        """Count the activations of a micro-batch.

        Args:
            rows: rows of the micro-batch.
            gathers_weights: whether FSDP2 gathers weights, some of them in bfloat16.
            recomputes: whether blocks recompute their activations; ``None``: as the model was
                built.

        Raises:
            UserError: if the activations depend on the values of tensors.
        """
        in_bf16: set[str] = set()
        if gathers_weights:
            for unit in self.units:
                if unit.is_bf16:
                    in_bf16.update(p.name for p in unit.parameters)
        if self.has_bf16_weights:
            in_bf16.update(p.name for p in self.parameters if p.is_trained)

        batch = MicroBatch(
            rows=rows,
            positions=self.recipe.rows.positions,
            bf16=self.bf16,
            weights_in_bf16=frozenset(in_bf16),
            on_gpu=self.on_gpu,
            recomputes=recomputes,
            extra=self.recipe.extra_columns,
        )
        if batch in self.counted:
            return self.counted[batch]
        try:
            counted = count_activations(
                self.recipe.model,
                self.recipe.objective,
                batch,
                frozen=self.recipe.frozen,
            )
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"the activations cannot be counted, because {self.recipe.class_name} or its loss "
                f"looks at the values of tensors ({first_line(error)}); if the loss selects "
                "positions by a mask, multiply by the mask instead"
            ) from None
        except KeyError as error:
            raise UserError(
                "the activations cannot be counted, because the loss of "
                f"{name_of(self.recipe.objective)} reads {error}, and a plan makes no prepass"
            ) from None
        self.counted[batch] = counted
        return counted

    # --- bytes of a process

    def bytes_of(
        self, sharding: Sharding, rows: int, accumulation: int, recomputes: bool | None = None
    ) -> Bytes:
        """Return the bytes on the process that holds most.

        The total is the largest of five moments: the passes of frozen models, the loss, the
        backward pass, its end, and the optimizer step.

        Args:
            sharding: how processes share the model.
            rows: rows per micro-batch.
            accumulation: micro-batches per step.
            recomputes: whether blocks recompute their activations, as in :meth:`activations`.
        """
        activations = self.activations(rows, sharding.is_sharded, recomputes)
        trained = [p for p in self.parameters if p.is_trained]
        weights = weight_bytes(self.parameters, sharding.shards)
        optimizer = float(sum(p.state_bytes(sharding.shards) for p in trained))
        reduced_gradients = weight_bytes(trained, sharding.shards)

        gradients = reduced_gradients
        buckets = 0.0
        buckets_in_backward = 0.0
        is_ddp = sharding.replicas > 1 and not sharding.is_sharded
        adds_up = accumulation > 1 and self.reduces_once
        if sharding.is_sharded:
            buckets, buckets_in_backward = self._gathered(adds_up)
            if adds_up:
                gradients = float(sum(unit.gradients for unit in self.units))
        elif is_ddp and adds_up:
            # Gradients that add up over micro-batches need memory besides the buckets.
            buckets = buckets_in_backward = gradients

        # One matrix in 4 bits at a time is in bfloat16, when it is used.
        in_4bit = [p.numel() for p in self.parameters if p.element_bytes == NF4_BYTES]
        buckets += BF16_BYTES * max(in_4bit, default=0)
        buckets_in_backward += BF16_BYTES * max(in_4bit, default=0)

        # The gradients of earlier micro-batches are there when the last one begins. DDP keeps its
        # buckets, in which gradients live, from step to step.
        earlier_gradients = gradients if accumulation > 1 or is_ddp else 0.0
        frozen, frozen_block = self._frozen_bytes(sharding)
        in_frozen = earlier_gradients + activations.in_frozen
        in_frozen += frozen_block if sharding.is_sharded else buckets
        at_loss = earlier_gradients + activations.highest.total + buckets
        in_backward = earlier_gradients + activations.in_first_block + buckets_in_backward
        at_end_of_backward = gradients + activations.end_of_backward + buckets_in_backward
        in_step = reduced_gradients + self._step_bytes(sharding.shards)
        peak = max(in_frozen, at_loss, in_backward, at_end_of_backward, in_step)
        return Bytes(
            weights=weights,
            frozen=frozen,
            gradients=gradients,
            optimizer=optimizer,
            activations=activations.highest.activations,
            logits=activations.highest.logits,
            buckets=buckets,
            total=weights + frozen + optimizer + peak,
        )

    def _frozen_bytes(self, sharding: Sharding) -> tuple[float, float]:
        """Return the bytes of frozen models: of what is always there, and of one block more.

        Only a backward pass would free the units that stay gathered, and frozen models have none.
        """
        weights = sum(weight_bytes(memory.parameters, sharding.shards) for memory in self.frozen)
        if not sharding.is_sharded:
            return weights, 0.0
        units = [unit for memory in self.frozen for unit in memory.units]
        staying = sum(unit.weights for unit in units if unit.stays_gathered)
        freed = [unit.weights for unit in units if not unit.stays_gathered]
        return weights + staying, max(freed, default=0.0)

    def _gathered(self, adds_up: bool) -> tuple[float, float]:
        """Return the bytes that FSDP2 gathers and reduces, at the loss and in the backward pass.

        At the loss, a process holds the units that stay gathered, and one more.

        In the backward pass it also holds the weights of the next block, the gradient of the block
        that it has just computed, and a buffer to reduce that gradient. If gradients accumulate
        over micro-batches, the gradient is counted elsewhere.

        Args:
            adds_up: whether gradients accumulate.
        """
        staying = sum(unit.weights for unit in self.units if unit.stays_gathered)
        freed = [unit for unit in self.units if not unit.stays_gathered]
        largest_weights = max((unit.weights for unit in freed), default=0)
        largest_gradients = max((unit.gradients for unit in freed), default=0)

        gradient_copies = 1 if adds_up else 2
        in_backward = staying + 2 * largest_weights + gradient_copies * largest_gradients
        return float(staying + largest_weights), float(in_backward)

    def _step_bytes(self, shards: int) -> float:
        """Return the bytes that the optimizer step allocates. A fused kernel allocates none."""
        chunk_bytes = 0
        if self.optimizer.has_chunks or self.has_bf16_weights:
            trained = [p for p in self.parameters if p.is_trained and not p.is_muon]
            largest_numel = max((p.numel(shards) for p in trained), default=0)
            chunk_numel = CHUNK_NUMEL["cuda" if self.on_gpu else "cpu"]
            chunk_bytes = CHUNK_BYTES * min(largest_numel, chunk_numel)
        return float(max(chunk_bytes, iteration_bytes(self._muon_matrices, self.bf16)))


def weight_bytes(parameters: list[LocalParameter], shards: int) -> float:
    """Return the bytes of the largest of ``shards`` shards of the weights."""
    return float(sum(p.numel(shards) * p.element_bytes for p in parameters))
