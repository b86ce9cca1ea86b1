"""Bytes that a process holds while it trains, by kind, however a model is spread over processes.

Weights, gradients and optimizer state follow from the shapes of the parameters, as :func:`llmtrain.parallel.fsdp.shard`
and DDP keep them; activations are counted by :mod:`llmtrain.plan.activations`.
"""

import copy
import functools
import math
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmtrain.errors import UserError, first_line
from llmtrain.parallel.fsdp import units_of
from llmtrain.parallel.mesh import Sharding
from llmtrain.parallel.shards import local_shard
from llmtrain.parallel.stages import holders_of
from llmtrain.parallel.tensor import parallelize
from llmtrain.plan import pipeline
from llmtrain.plan.activations import Kept, MicroBatch, Pair, kept, list_of_blocks
from llmtrain.plan.subject import Subject
from llmtrain.training.muon import batches_of
from llmtrain.training.optim import hidden_matrices

_GRADIENT = 4  # bytes a number: weights that are trained are float32, and so are gradients and optimizer state
_FAKE_WORLD = 1024  # processes


class Bytes(NamedTuple):
    """Bytes of the process that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buckets: float  # weights that are gathered, or gradients that are sent, beside these
    total: float  # at the fullest moment, in which not every kind need be as large


class Part(NamedTuple):
    """A parameter on one of the processes that share its matrices, before it is sharded over replicas."""

    name: str
    rows: int  # of its first dimension
    row: int  # numbers in each
    size: int  # bytes of a number
    is_trained: bool
    states: int  # numbers of optimizer state for each of its own

    def numbers(self, shards: int = 1) -> int:
        """Return how many numbers the largest of so many shards has."""
        return -(-self.rows // shards) * self.row


class Unit(NamedTuple):
    """Parameters that FSDP gathers at once."""

    names: frozenset[str]
    half: bool  # gathered in bfloat16
    stays: bool  # from its forward to its backward pass


class Memory:
    """The memory of training a subject, on GPUs or on CPUs."""

    def __init__(self, subject: Subject, on_gpu: bool) -> None:
        self.subject, self.on_gpu = subject, on_gpu
        self.bf16 = subject.precision == "bf16"
        self.held_whole = (
            not subject.settings.parallel.sync_each_batch
        )  # gradients, between micro-batches
        hidden = (
            {*hidden_matrices(subject.model)} if subject.settings.optim.optim == "muon" else set()
        )
        self._hidden = {name: p for name, p in subject.model.named_parameters() if p in hidden}

    @functools.cached_property
    def units(self) -> list[Unit]:
        """The units of FSDP. Raises :class:`UserError` where the model has no blocks to find."""
        names = {p: name for name, p in self.subject.model.named_parameters()}
        found = []
        for unit in units_of(self.subject.model, separate_norms=self.bf16):
            here = [names.pop(p) for p in unit.parameters() if p in names]
            found.append(
                Unit(frozenset(here), unit.is_autocast and self.bf16, stays=unit.starts_backward)
            )
        return [*found, Unit(frozenset(names.values()), half=False, stays=True)]

    def of(self, sharding: Sharding, rows: int, accumulation: int) -> Bytes:
        """Return the bytes with micro-batches of so many rows, and so many of them in an update."""
        found = self.kept(rows, sharding.tensor, spread(sharding))
        if sharding.stages > 1:
            ends = 0, sharding.stages - 1  # of which one holds most
            stages = (self.of_stage(found, sharding, end, rows, accumulation) for end in ends)
            return max(stages, key=lambda stage: stage.total)
        one_less = found.before + found.block * (found.blocks - 1)
        return self.fullest(
            self.parts(sharding.tensor), sharding, accumulation, found, found.peak, one_less
        )

    def of_stage(
        self, kept: Kept, sharding: Sharding, stage: int, rows: int, accumulation: int
    ) -> Bytes:
        """Return the bytes of one pipeline stage."""
        model = self.subject.model
        held = {
            name for name, stages in holders_of(model, sharding.stages).items() if stage in stages
        }
        first_parameters = {next(block.parameters()) for block in list_of_blocks(model) or ()}
        blocks = sum(
            parameter in first_parameters
            for name, parameter in model.named_parameters()
            if name in held
        )

        # What is not kept for the backward pass, but needed while a micro-batch is computed.
        activations_at_peak, logits = kept.peak
        at_work = activations_at_peak - kept.before - kept.block * kept.blocks

        # A stage has begun as many micro-batches as there are stages from it to the last.
        waiting = min(sharding.stages - stage, accumulation)
        before = pipeline.passed_bytes(self.subject, rows) if stage else kept.before
        activations = waiting * (kept.block * blocks + before) + at_work
        is_last = stage == sharding.stages - 1
        at_loss = (activations, logits if is_last else 0.0)

        if waiting == accumulation:
            # At its fullest, before its first backward pass, there is no gradient yet.
            accumulation = 1
        parts = [part for part in self.parts(1) if part.name in held]
        return self.fullest(parts, sharding, accumulation, kept, at_loss, activations)

    def fullest(
        self,
        parts: list[Part],
        sharding: Sharding,
        accumulation: int,
        kept: Kept,
        at_loss: Pair,
        in_backward: float,
    ) -> Bytes:
        """Return the bytes of parameters, with those of activations at the loss (and of logits) and in the backward.

        The total is that of the fullest moment: one of these, the end of the backward pass, or the optimizer.
        """
        shards = sharding.shards
        weights = float(sum(part.numbers(shards) * part.size for part in parts))
        # AdamW has two numbers for each, and counts its updates in one for each tensor; Muon has one
        states = float(
            sum(part.states * part.numbers(shards) + (part.states == 2) for part in parts)
            * _GRADIENT
        )
        reduced = gradients = _gradients(parts, shards)
        at_once = accumulation == 1 or not self.held_whole  # gradients are reduced as they come
        before = 0.0 if accumulation == 1 else gradients  # left by earlier micro-batches
        if spread(sharding):
            buckets, on_the_way = self._gathered(parts, at_once, all_stay=sharding.stages > 1)
            if not at_once:
                gradients = before = _gradients(parts)
        else:  # DDP's buckets are the gradients, but for those that grow between two exchanges
            is_ddp = sharding.replicas > 1
            buckets = on_the_way = gradients if is_ddp and not at_once else 0.0
            before = gradients if is_ddp else before
        moments = [
            before + sum(at_loss) + buckets,
            before + in_backward + on_the_way,
            gradients + kept.at_end + on_the_way,
            reduced + self._orthogonal(),
        ]
        return Bytes(weights, gradients, states, *at_loss, buckets, weights + states + max(moments))

    @functools.cache  # noqa: B019 - as long as the plan lives
    def parts(self, tensor: int) -> list[Part]:
        """Return each parameter as one process has it, where matrices are sharded over so many."""
        model = self.subject.model
        if tensor > 1:
            model = copy.deepcopy(model)
            parallelize(model, fake_mesh(tensor))
        found = []
        for name, p in model.named_parameters():
            rows, *row = local_shard(p).shape or [1]
            states = 0 if not p.requires_grad else 1 if name in self._hidden else 2
            found.append(
                Part(name, rows, math.prod(row), p.element_size(), p.requires_grad, states)
            )
        return found

    @functools.cache  # noqa: B019
    def kept(self, rows: int, tensor: int, gathered: bool) -> Kept:
        """Count the activations of a micro-batch. Raises :class:`UserError` where they depend on values."""
        names = [unit.names for unit in self.units if unit.half] if gathered else []
        mesh = fake_mesh(tensor) if tensor > 1 else None
        batch = MicroBatch(
            rows, self.subject.positions, self.bf16, frozenset().union(*names), self.on_gpu, mesh
        )
        try:
            return kept(self.subject.model, self.subject.objective, batch)
        except (RuntimeError, NotImplementedError) as error:
            raise UserError(
                f"what {self.subject.kind} keeps for its backward pass cannot be counted on tensors without values: "
                f"{first_line(error)}"
            ) from None

    def _orthogonal(self) -> float:
        """Bytes of Muon's iterations, on full tensors: the updates, two approximations, and two products of them."""
        size, most = 2 if self.bf16 else 4, 0
        for some in batches_of([*self._hidden.values()]):
            short, long = sorted(some[0].shape)
            numbers = len(some) * short * long
            most = max(
                most,
                4 * numbers + (2 + self.bf16) * size * numbers + 2 * size * len(some) * short**2,
            )
        return float(most)

    def _gathered(self, parts: list[Part], at_once: bool, all_stay: bool) -> tuple[float, float]:
        """Return the bytes of gathered weights at two moments of a micro-batch.

        One is the loss, when what stands outside of the units is there, and the last unit. The other is after the
        backward pass of a block, when the one before it has come as well, with the gradient to be reduced (if it does
        not count among those held whole) and what it is reduced in.
        """
        held = {part.name: part for part in parts}
        stays, largest, gradient = 0, 0, 0.0
        for unit in self.units:
            here = [held[name] for name in unit.names & held.keys()]
            size = sum(part.numbers() for part in here) * (2 if unit.half else 4)
            if unit.stays or all_stay:
                stays += size
            else:
                largest, gradient = max(largest, size), max(gradient, _gradients(here))
        return float(stays + largest), stays + 2 * largest + (2 if at_once else 1) * gradient

    def fitting(self, sharding: Sharding, share: int, room: float) -> list[int]:
        """Return the sizes of a micro-batch that fit into ``room`` bytes, in ascending order.

        Memory does not grow with the size of a micro-batch throughout. If a step has several micro-batches, gradients
        are kept between them; the one micro-batch that holds the whole share may need less.

        Args:
            sharding: How the model is spread over processes.
            share: Rows of the global batch that a process has. A micro-batch divides them.
            room: Bytes of the device.
        """
        sizes = []
        for rows in range(1, share + 1):
            if share % rows != 0:
                continue

            if self.of(sharding, rows, accumulation=share // rows).total <= room:
                sizes.append(rows)
            elif self.of(sharding, rows, accumulation=1).total > room:
                # One micro-batch of this size is too large by itself, so larger ones are, too.
                break
        return sizes


def spread(sharding: Sharding) -> bool:
    """Return whether no process holds the full model, as under DDP each does."""
    return sharding.shards * sharding.model_parallel_size > 1


def _gradients(parts: list[Part], shards: int = 1) -> float:
    return float(sum(part.numbers(shards) * _GRADIENT for part in parts if part.is_trained))


@functools.cache
def fake_mesh(count: int) -> DeviceMesh:
    """Return a mesh of so many processes that are not there, of which this one is the first.

    Raises :class:`UserError` where this process already is one of real ones.
    """
    import torch.distributed._tools.fake_collectives  # noqa: F401 - what is sent has a shape, and no memory

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_FAKE_WORLD)
    elif dist.get_backend() != "fake":
        raise UserError("a plan is made by a process of its own: leave out accelerate launch.")
    return DeviceMesh("cpu", list(range(count)), mesh_dim_names=("tp",))
