"""The ground floor of everything that is sharded: which ranks share a model, and how a tensor is sharded over them.

A tensor that is spread over ranks is a ``DTensor`` of torch: a rank holds its *local shard* of the *full tensor*. A
plain tensor is its own local shard and its own full tensor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llmtrain.contract import Weights
from llmtrain.parallel.collectives import all_gather, range_of, transfer


@dataclass
class Sharding:
    """``replicas`` groups of ``shards`` x ``stages`` x ``tensor`` ranks, each of which holds the model once.

    Neighbouring ranks, ``stages`` x ``tensor`` of them, compute together on the same rows.
    """

    replicas: int
    shards: int
    cpu_offload: bool = False
    tensor: int = 1
    stages: int = 1
    mesh: DeviceMesh | None = field(
        default=None, compare=False, repr=False
    )  # set by :meth:`set_mesh`

    @property
    def method(self) -> str:
        """The name of the method, for a person."""
        matrices = f"tensor parallelism ({self.tensor})" if self.tensor > 1 else ""
        stages = f"{self.stages} stages" if self.stages > 1 else ""
        return " and ".join(
            filter(
                None, ["FSDP2" if self.shards > 1 or self.together == 1 else "", matrices, stages]
            )
        )

    @property
    def layout(self) -> str:
        """Replicas x shards (x tensor), as ``run.json`` has it."""
        stages = f" in {self.stages} stages" if self.stages > 1 else ""
        return (
            f"{self.replicas}x{self.shards}"
            + (f"x{self.tensor}" if self.tensor > 1 else "")
            + stages
        )

    @property
    def processes(self) -> int:
        return self.replicas * self.shards * self.together

    @property
    def together(self) -> int:
        """Neighbouring ranks that compute on the same rows."""
        return self.stages * self.tensor

    def submesh(self, *names: str) -> DeviceMesh:
        """Return the mesh of some dimensions: ``dp_replicate``, ``dp_shard``, ``pp``, ``tp``."""
        assert self.mesh is not None, "set_mesh() comes first"
        return self.mesh[names]

    def set_mesh(self, accelerator: Accelerator) -> None:
        """Make the mesh, and tell Accelerate, which deals out the rows, which ranks have the same rows."""
        if self.together == 1:
            return
        kind, names = accelerator.device.type, ("dp_replicate", "dp_shard", "pp", "tp")
        self.mesh = init_device_mesh(
            kind, (self.replicas, self.shards, self.stages, self.tensor), mesh_dim_names=names
        )
        if self.stages > 1:  # Accelerate knows one dimension of ranks with the same rows
            rows = (self.replicas, self.shards, self.together)
            accelerator.state.device_mesh = init_device_mesh(
                kind, rows, mesh_dim_names=(*names[:2], "tp")
            )
        else:
            accelerator.state.device_mesh = self.submesh("dp_replicate", "dp_shard", "tp")


class ShardingPlugin(FullyShardedDataParallelPlugin):  # type: ignore[misc]  # accelerate has no types
    """Accelerate's plugin for FSDP2, which also says how this package shards."""

    def __init__(self, sharding: Sharding, **settings: object) -> None:
        super().__init__(fsdp_version=2, **settings)
        self.sharding = sharding


def sharding_of(accelerator: Accelerator) -> Sharding:
    """Return how models are sharded; one shard where every rank holds the full model."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    return (
        plugin.sharding
        if isinstance(plugin, ShardingPlugin)
        else Sharding(int(accelerator.num_processes), 1)
    )


def model_parallel_size(accelerator: Accelerator) -> int:
    """Return how many ranks, neighbours, compute together on the same rows."""
    return sharding_of(accelerator).together


def is_whole(accelerator: Accelerator) -> bool:
    """Return whether each rank can run the whole model, if need be with gathered weights."""
    return sharding_of(accelerator).stages == 1


def data_parallel_size(accelerator: Accelerator) -> int:
    """Return over how many replicas gradients are averaged: the factor that turns their mean into the sum."""
    return int(accelerator.num_processes) // model_parallel_size(accelerator)


def data_parallel_rank(accelerator: Accelerator) -> int:
    """Return which share of the rows this rank has."""
    return int(accelerator.process_index) // model_parallel_size(accelerator)


def gather_rows(accelerator: Accelerator, tensor: torch.Tensor) -> torch.Tensor:
    """Gather what all ranks have of their rows, in rank order, the same rows once. All ranks call this."""
    everyone: torch.Tensor = accelerator.gather(tensor[None].to(accelerator.device))
    return everyone[:: model_parallel_size(accelerator)].flatten(0, 1)


# --- local shards and full tensors


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, without a gradient; it shares the memory."""
    return to_local(tensor.detach())


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor`` to compute with: its gradient becomes that of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor's shape and dtype, on the meta device."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def shards_over(tensor: torch.Tensor) -> dict[str, int]:
    """Return the dimensions of the mesh that ``tensor`` is sharded over, and into how many shards."""
    if not isinstance(tensor, DTensor):
        return {}
    mesh = tensor.device_mesh
    sizes = zip(
        mesh.mesh_dim_names or map(str, range(mesh.ndim)),
        mesh.shape,
        tensor.placements,
        strict=True,
    )
    return {name: size for name, size, placement in sizes if not placement.is_replicate()}


class _Split(NamedTuple):
    """One step of sharding: over a dimension of the mesh, along a dimension of the tensor."""

    over: int  # dimension of the mesh
    dimension: int  # of the tensor
    pieces: int  # lie one beside the other along it, and each of them is sharded
    size: int  # of a piece
    mine: range  # what of each piece this rank has


def _splits(tensor: DTensor) -> list[_Split]:
    """Return the steps by which a rank came by its shard, in their order.

    Neighbours shard first, then the others shard what each of them has. (torch 2.13 gathers shards of shards only
    where they are equally long.)
    """
    mesh, shape, found = tensor.device_mesh, list(tensor.shape), []
    for over in reversed(range(mesh.ndim)):
        placement = tensor.placements[over]
        if not isinstance(placement, Shard | _StridedShard):
            continue
        inner = over == mesh.ndim - 1
        pieces = (
            int(placement.split_factor) if inner and isinstance(placement, _StridedShard) else 1
        )
        size = shape[placement.dim] // pieces
        mine = range_of(size, mesh.size(over), mesh.get_local_rank(over))
        found.append(_Split(over, placement.dim, pieces, size, mine))
        shape[placement.dim] = pieces * len(mine)
    return found


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on every rank. All ranks call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    shard = local_shard(tensor)
    for one in reversed(_splits(tensor)):
        group, pieces = (
            tensor.device_mesh.get_group(one.over),
            shard.chunk(one.pieces, one.dimension),
        )
        shard = torch.cat(
            [all_gather(piece, group, one.size, one.dimension) for piece in pieces], one.dimension
        )
    return shard


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a full tensor that every rank has, sharded as ``like`` is. Nothing is sent."""
    for one in _splits(like) if isinstance(like, DTensor) else ():
        pieces = full.chunk(one.pieces, one.dimension)
        mine = [piece.narrow(one.dimension, one.mine.start, len(one.mine)) for piece in pieces]
        full = torch.cat(mine, one.dimension)
    return full


@torch.no_grad()
def fill(targets: Mapping[str, torch.Tensor], weights: Weights) -> None:
    """Copy into each target, in place, this rank's shard of the full tensor of its name.

    One full tensor at a time is held. Every target is named once, and names and shapes must agree.
    """
    left = set(targets)
    for name, full in weights:
        target = targets[name]
        left.remove(name)
        if target.is_meta:  # another stage of a pipeline holds it
            continue
        assert target.shape == full.shape, f"{name}: {tuple(full.shape)} for {tuple(target.shape)}"
        local_shard(target).copy_(shard_like(full, target))
    assert not left, f"nothing for {sorted(left)}"


def reshard(model: nn.Module) -> None:
    """Free what forward passes without a backward pass have gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def block_classes(model: nn.Module) -> set[str]:
    """Return the class names of a model's blocks.

    They are those that the model says must not be split, else those in the longest of its lists of modules that is
    not inside another list.
    """
    said = getattr(model, "_no_split_modules", None) or ()  # transformers' models say it
    if named := {*map(str, said)} & {type(module).__name__ for module in model.modules()}:
        return named
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)
    }
    outer = [
        lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)
    ]
    return {type(block).__name__ for block in max(outer, key=len, default=[])}


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return a model's blocks, outer ones first."""
    names = block_classes(model)
    return [module for module in model.modules() if type(module).__name__ in names]


# --- tensors that one rank gathers, whoever holds them


@runtime_checkable
class HasEmbeddings(Protocol):
    """A model of transformers, which knows its ends."""

    def get_input_embeddings(self) -> nn.Module: ...

    def get_output_embeddings(self) -> nn.Module | None: ...


@runtime_checkable
class Staged(Protocol):
    """A model that can be split into the stages of a pipeline.

    Its forward computes the layers of this stage: from hidden states to hidden states, or on the last to the nll.
    """

    @property
    def width(self) -> int:
        """Size of the hidden states that one stage passes on to the next."""

    def stages_of(self, name: str, stages: int) -> tuple[int, ...]:
        """Return the stages that hold a parameter."""

    def keep(self, stage: int, stages: int) -> None:
        """Compute as one stage from now on."""


def holders_of(model: nn.Module, stages: int) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter, by its name."""
    names = [name for name, _ in model.named_parameters()]
    return {
        name: model.stages_of(name, stages) if isinstance(model, Staged) else (0,) for name in names
    }


class Spread(NamedTuple):
    """Tensors by name; on the meta device what another stage of a pipeline holds. Consecutive ranks are its stages."""

    tensors: dict[str, torch.Tensor]
    homes: Mapping[str, int] = {}  # the stage that holds each, where there are several
    stages: int = 1

    def gather_to(self, name: str, rank: int) -> torch.Tensor | None:
        """Gather a full tensor to one rank; ``None`` on the others, which only send. All ranks call this."""
        tensor = self.tensors[name]
        if self.stages == 1:
            return _gather_to(tensor.detach(), rank)
        holder, here = rank - rank % self.stages + self.homes[name], dist.get_rank()
        full = None if tensor.is_meta else _gather_to(tensor.detach(), holder)
        if here == holder != rank and full is not None:
            dist.send(full.contiguous(), rank)
            return None
        if here == rank != holder:
            device = next((one.device for one in self.tensors.values() if not one.is_meta), None)
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(full, holder)
        return full


def of_all_stages(
    accelerator: Accelerator, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> Spread:
    """Add what other stages of a pipeline hold. All ranks call this.

    Names are those of parameters, or of a parameter and a key (``wte.weight.exp_avg``).
    """
    sharding = sharding_of(accelerator)
    if sharding.stages == 1:
        return Spread(tensors)
    mesh = sharding.submesh("pp")
    stage, owners = (
        mesh.get_local_rank(),
        {name: at[0] for name, at in holders_of(model, sharding.stages).items()},
    )
    owner = {name: owners[name if name in owners else name.rpartition(".")[0]] for name in tensors}
    mine = {name: meta_like(tensor) for name, tensor in tensors.items() if owner[name] == stage}
    everyone: list[dict[str, torch.Tensor]] = [{}] * sharding.stages
    dist.all_gather_object(everyone, mine, mesh.get_group())
    everyone[stage] = {name: tensors[name] for name in mine}
    homes = {name: holder for holder, theirs in enumerate(everyone) for name in theirs}
    return Spread(
        {name: one for theirs in everyone for name, one in theirs.items()}, homes, sharding.stages
    )


def _gather_to(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    here = not dist.is_initialized() or dist.get_rank() == rank
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    mesh = tensor.device_mesh
    if rank not in mesh.mesh:  # another replica, which holds the same
        return None
    *outer, inner = tensor.placements
    if inner != Shard(0) or not all(placement.is_replicate() for placement in outer):
        full = full_tensor(tensor)
        return full if here else None
    row, shard = (
        dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)),
        tensor.to_local().contiguous(),
    )
    if not here:
        transfer([dist.P2POp(dist.isend, shard, rank)] if rank in row and shard.numel() else [])
        return None
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.device)
    shards = dict(zip(row, full.chunk(len(row)), strict=False))  # the last ranks may have nothing
    transfer([dist.P2POp(dist.irecv, shards[other], other) for other in shards if other != rank])
    if rank in shards:
        shards[rank].copy_(shard)
    return full
