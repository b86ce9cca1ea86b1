"""How many bytes a process holds while it trains, by part, however a model is spread over processes.

Weights, gradients and optimizer state follow from the shapes of the parameters, as :func:`llmtrain.parallel.fsdp.shard`
and DDP keep them; activations are counted by :mod:`llmtrain.plan.activations`.
"""

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from llmtrain.errors import UserError, first_line
from llmtrain.parallel.fsdp import Sharding, units_of
from llmtrain.parallel.mesh import local_shard
from llmtrain.parallel.tensor import cut_tensors
from llmtrain.plan.activations import Kept, kept
from llmtrain.plan.subject import Subject
from llmtrain.training.muon import batches_of
from llmtrain.training.optim import hidden_matrices

_GRADIENT = 4  # bytes a number: weights that are trained are float32, and so are their gradients
_ON_PAPER = 1024  # processes
_FREE = 0.06  # of a GPU: the context of CUDA and NCCL, and what its allocator cannot fit into


class Bytes(NamedTuple):
    """Of one process: the one that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buckets: float  # weights that are gathered, or gradients that are sent, beside these
    total: float  # at the fullest moment, in which not every part need be as large


class Part(NamedTuple):
    """What one process of those that cut matrices holds of a parameter, before data parallelism."""

    name: str
    rows: int  # of its first dimension
    row: int  # numbers in each
    size: int  # bytes of a number
    is_trained: bool
    states: int  # numbers of optimizer state for each of its own

    def numbers(self, shards: int = 1) -> int:
        return -(-self.rows // shards) * self.row


class Unit(NamedTuple):
    """What FSDP gathers at once."""

    names: frozenset[str]  # of parameters
    multiplied: bool  # in half precision, where that is the run's
    stays: bool  # from its forward to its backward pass


class Memory:
    """Of the training of a subject; on a GPU, or a CPU."""

    def __init__(self, subject: Subject, on_gpu: bool) -> None:
        self.subject, self.on_gpu = subject, on_gpu
        self.bf16 = subject.precision == "bf16"
        settings = subject.settings
        self.held_whole = not getattr(settings, "sync_each_batch", False)
        self.bucket_views = getattr(settings, "ddp_gradient_as_bucket_view", True)
        hidden = hidden_matrices(subject.model) if settings.optim == "muon" else []
        self._hidden = {name for name, p in subject.model.named_parameters() if any(p is matrix for matrix in hidden)}
        self.units = list(_units(subject.model, norms_apart=self.bf16))
        self._multiplied = frozenset(name for unit in self.units for name in unit.names if unit.multiplied)

    def of(self, sharding: Sharding, rows: int, accumulation: int) -> Bytes:
        """With micro-batches of so many rows, and so many of them in an update."""
        if sharding.stages > 1:
            stages = (self._of_stage(sharding, stage, rows, accumulation) for stage in (0, sharding.stages - 1))
            return max(stages, key=lambda found: found.total)
        found = self.kept(rows, sharding)
        one_less = found.before + found.block * (found.blocks - 1)
        return self._moments(
            self.parts(sharding.tensor), sharding, accumulation, found.peak(), one_less, found.most_after
        )

    def _moments(
        self,
        parts: list[Part],
        sharding: Sharding,
        accumulation: int,
        at_loss: tuple[float, float],
        after_block: float,
        at_end: float,
    ) -> Bytes:
        """The total is of the fullest moment: at the loss, in the backward pass, at its end, or in the optimizer."""
        shards = sharding.shards
        weights, states, gradients = _weights(parts, shards), _states(parts, shards), _gradients(parts, shards)
        at_once = accumulation == 1 or not self.held_whole  # gradients are reduced as they come
        before = 0.0 if accumulation == 1 else gradients  # what earlier micro-batches have left
        if spread(sharding):
            buckets, on_the_way = self._gathered(parts, sharding.stages, at_once)
            if not at_once:
                gradients = before = _gradients(parts)
        else:  # DDP's buckets are the gradients, but for those that grow between two exchanges
            is_ddp = sharding.replicas > 1
            buckets = on_the_way = gradients if is_ddp and not (self.bucket_views and at_once) else 0.0
            before = gradients if is_ddp else before
        moments = [
            before + sum(at_loss) + buckets,
            before + after_block + on_the_way,
            gradients + at_end + on_the_way,
            _gradients(parts, shards) + self._orthogonal(),
        ]
        return Bytes(weights, gradients, states, *at_loss, buckets, weights + states + max(moments))

    def _of_stage(self, sharding: Sharding, stage: int, rows: int, accumulation: int) -> Bytes:
        model, stages = self.subject.model, sharding.stages
        parts = [part for part in self.parts(1) if stage in model.stages_of(part.name, stages)]
        layers = [n for n in range(model.config.n_layer) if n * stages // model.config.n_layer == stage]
        found = self.kept(rows, sharding)
        more, logits = found.peak()
        at_work = more - found.before - found.block * found.blocks  # beyond what is kept for backward
        waiting = min(stages - stage, accumulation)
        one = found.block * len(layers) + (found.before if stage == 0 else 0)
        passed = rows * self.subject.positions * model.config.n_embd * _GRADIENT * (1 if stage else 0)
        activations = waiting * (one + passed) + at_work
        at_loss = activations, logits if stage == stages - 1 else 0.0
        first = waiting == accumulation  # at its fullest before its first backward pass: no gradient is there
        return self._moments(parts, sharding, 1 if first else accumulation, at_loss, activations, found.most_after)

    @functools.cache  # noqa: B019 - as long as the plan lives
    def parts(self, tensor: int) -> list[Part]:
        """What each process has of every parameter, where matrices are cut over so many."""
        model = self.subject.model
        if tensor > 1:
            model = copy.deepcopy(model)
            cut_tensors(model, neighbours(tensor))
        found = []
        for name, p in model.named_parameters():
            here = local_shard(p)
            states = 0 if not p.requires_grad else 1 if name in self._hidden else 2
            rows = here.shape[0] if here.ndim else 1
            found.append(Part(name, rows, math.prod(here.shape[1:]), p.element_size(), p.requires_grad, states))
        return found

    @functools.cache  # noqa: B019
    def _kept(self, rows: int, tensor: int, gathered: bool) -> Kept:
        mesh = neighbours(tensor) if tensor > 1 else None
        names = self._multiplied if gathered and self.bf16 else frozenset()
        model, positions = self.subject.model, self.subject.positions
        try:
            return kept(model, rows, positions, self.bf16, names, self.on_gpu, mesh)
        except (RuntimeError, NotImplementedError) as error:  # what depends on values, or has no shape of its own
            kind = getattr(model, "own_class", type(model)).__name__
            raise UserError(
                f"what {kind} keeps for its backward pass cannot be counted on tensors without values: "
                f"{first_line(error)}"
            ) from None

    def kept(self, rows: int, sharding: Sharding) -> Kept:
        return self._kept(rows, sharding.tensor, spread(sharding))

    def _orthogonal(self) -> float:
        """Of Muon's iterations, on whole matrices: the updates, two approximations, and two products of them."""
        matrices = [p for name, p in self.subject.model.named_parameters() if name in self._hidden]
        size = 2 if self.bf16 else 4
        most = 0
        for some in batches_of(matrices):
            short, long = sorted(some[0].shape)
            numbers = len(some) * short * long
            most = max(most, 4 * numbers + (2 + self.bf16) * size * numbers + 2 * size * len(some) * short**2)
        return float(most)

    def _gathered(self, parts: list[Part], stages: int, at_once: bool) -> tuple[float, float]:
        """Bytes of weights at the loss, when what stands outside of the units is there, and the last; and after the
        backward pass of a block, when the one before it has come as well, with the gradient that is to be reduced (if
        it does not count among those held whole) and what it is reduced in. A pipeline has all of its stage until its
        last backward pass."""
        numbers = {part.name: part.numbers() for part in parts}
        trained = {part.name for part in parts if part.is_trained}
        stays = largest = gradient = everything = 0
        for unit in self.units:
            here = [name for name in unit.names if name in numbers]
            size = sum(numbers[name] for name in here) * (2 if unit.multiplied and self.bf16 else 4)
            everything += size
            if unit.stays:
                stays += size
            else:
                largest = max(largest, size)
                gradient = max(gradient, sum(numbers[name] for name in here if name in trained) * _GRADIENT)
        if stages > 1:
            return float(everything), float(everything)
        return float(stays + largest), float(stays + 2 * largest + (2 if at_once else 1) * gradient)

    def largest(self, sharding: Sharding, share: int, room: float) -> int:
        """Rows of the largest micro-batch that fits into ``room`` bytes, of those that divide a process's ``share`` of
        the global batch; 0 where not one row does."""
        fitting = [0, *(rows for rows in range(1, share + 1) if share % rows == 0)]
        low, high = 0, len(fitting) - 1
        while low < high:
            middle = (low + high + 1) // 2
            rows = fitting[middle]
            if self.of(sharding, rows, share // rows).total <= room:
                low = middle
            else:
                high = middle - 1
        return fitting[low]


def room_of(memory: float) -> float:
    """Bytes of a GPU that a plan may use."""
    return memory * (1 - _FREE)


def spread(sharding: Sharding) -> bool:
    """Whether no process holds the whole, as under DDP each does."""
    return sharding.shards * sharding.together > 1


def _weights(parts: list[Part], shards: int = 1) -> float:
    return float(sum(part.numbers(shards) * part.size for part in parts))


def _gradients(parts: list[Part], shards: int = 1) -> float:
    return float(sum(part.numbers(shards) * _GRADIENT for part in parts if part.is_trained))


def _states(parts: list[Part], shards: int = 1) -> float:
    """AdamW has two numbers for each, and counts its updates in one for each tensor; Muon has one."""
    numbers = sum(part.numbers(shards) * part.states for part in parts)
    return float(numbers * _GRADIENT + sum(_GRADIENT for part in parts if part.states == 2))


def _units(model: Any, norms_apart: bool) -> Iterator[Unit]:
    names = {p: name for name, p in model.named_parameters()}
    for unit in units_of(model, norms_apart):
        found = [names.pop(p) for module in unit.modules for p in module.parameters() if p in names]
        yield Unit(frozenset(found), unit.multiplied, stays=unit.backward_begins)
    yield Unit(frozenset(names.values()), multiplied=False, stays=True)


@functools.cache
def neighbours(count: int) -> DeviceMesh:
    """So many processes on paper, of which this one is the first. Raises :class:`UserError` where this process already
    is one of real ones."""
    import torch.distributed._tools.fake_collectives  # noqa: F401 - what is sent has a shape, and no memory

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_ON_PAPER)
    elif dist.get_backend() != "fake":
        raise UserError("a plan is made by a process of its own: leave out accelerate launch.")
    return DeviceMesh("cpu", list(range(count)), mesh_dim_names=("tp",))
