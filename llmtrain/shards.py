"""Tensors of which every process holds a part (torch's DTensor): the local part, the whole, and back; and the blocks of
a model, by which it is cut.

Of a plain tensor, which every process holds whole, the local part is the tensor itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part that this process holds; it shares the memory of ``tensor``, and has no gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(tensor: torch.Tensor | None) -> Any:
    """The same to compute with: its gradient becomes that of ``tensor``."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def assembled(tensor: torch.Tensor) -> torch.Tensor:
    """The whole, on every process; all call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    part = local(tensor)
    for one in reversed(_cuts(tensor)):
        group, each = tensor.device_mesh.get_group(one.over), -(-one.size // one.pieces // one.processes)
        wholes = []
        for piece in part.chunk(one.pieces, one.dimension):
            padding = [0, 0] * (part.ndim - 1 - one.dimension) + [0, each - piece.shape[one.dimension]]
            padded = F.pad(piece, padding).contiguous()
            everyone = [torch.empty_like(padded) for _ in range(one.processes)]
            dist.all_gather(everyone, padded, group)
            wholes.append(torch.cat(everyone, one.dimension).narrow(one.dimension, 0, one.size // one.pieces))
        part = torch.cat(wholes, one.dimension)
    return part


def cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This process's part of a whole tensor, which every process has, cut as ``like`` is; nothing is sent."""
    if not isinstance(like, DTensor):
        return whole
    for one in _cuts(like):
        rank, each = like.device_mesh.get_local_rank(one.over), -(-one.size // one.pieces // one.processes)
        pieces = whole.chunk(one.pieces, one.dimension)
        first = min(rank * each, one.size // one.pieces)
        count = min(each, one.size // one.pieces - first)
        whole = torch.cat([piece.narrow(one.dimension, first, count) for piece in pieces], one.dimension)
    return whole


class Cut(NamedTuple):
    over: int  # a dimension of the mesh
    processes: int
    dimension: int  # of the tensor
    size: int  # of that, before
    pieces: int  # one beside the other, each of which is cut


def _cuts(tensor: DTensor) -> list[Cut]:
    """How this process came by its part. What is cut over neighbours is cut first, and of their part then the others
    have parts. (torch's own way back, for parts of parts, takes it that they are equally long: 2.13.)"""
    mesh, shape, found = tensor.device_mesh, list(tensor.shape), []
    for over in reversed(range(mesh.ndim)):
        placement: Any = tensor.placements[over]
        if placement.is_replicate():
            continue
        packed = isinstance(placement, _StridedShard) and over == mesh.ndim - 1
        pieces, dimension, processes = placement.split_factor if packed else 1, placement.dim, mesh.size(over)
        found.append(Cut(over, processes, dimension, shape[dimension], pieces))
        each = -(-shape[dimension] // pieces // processes)
        first = min(mesh.get_local_rank(over) * each, shape[dimension] // pieces)
        shape[dimension] = pieces * min(each, shape[dimension] // pieces - first)
    return found


def sharding_of(accelerator: Any) -> Any:
    """The :class:`llmtrain.parallel.fsdp.Sharding` of models; ``None`` where every process holds the whole."""
    return getattr(getattr(getattr(accelerator, "state", None), "fsdp_plugin", None), "sharding", None)


def same_rows(accelerator: Any) -> int:
    """How many processes, neighbours, compute together on the same rows."""
    sharding = sharding_of(accelerator)
    return 1 if sharding is None else sharding.together


def gathered_rows(accelerator: Any, tensor: torch.Tensor) -> torch.Tensor:
    """What all processes have of their rows, one after the other: of those that have the same, once. All call this."""
    everyone = accelerator.gather(tensor[None])
    return everyone[:: same_rows(accelerator)].flatten(0, 1)


class Held(NamedTuple):
    """Which of some stages holds a tensor; neighbours ``stride`` apart are of stages that follow each other."""

    stage: int
    stages: int
    stride: int

    def neighbour(self, rank: int) -> int:
        """The process that holds it, of those that have the rows of this one."""
        return rank + (self.stage - rank // self.stride % self.stages) * self.stride


def of_all_stages(accelerator: Any, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors named by parameters, or by parameters and a key: of those that other stages of a pipeline hold, the
    outlines, which :func:`gathered` knows. All processes call this."""
    sharding = sharding_of(accelerator)
    if sharding is None or sharding.stages == 1:
        return tensors
    mesh = sharding.mesh["pp"]
    stage, owners = mesh.get_local_rank(), {name: p.stages[0] for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    owner = {name: owners[name if name in owners else name.rpartition(".")[0]] for name in tensors}
    mine = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items() if owner[name] == stage}
    everyone: list[Any] = [None] * sharding.stages
    dist.all_gather_object(everyone, mine, mesh.get_group())
    found: dict[str, Any] = {}
    for holder, theirs in enumerate(everyone):
        for name, (shape, dtype) in theirs.items():
            found[name] = tensors[name] if holder == stage else torch.empty(shape, dtype=dtype, device="meta")
            found[name].held_by = Held(holder, sharding.stages, sharding.tensor)
    return found


def cuts(tensor: torch.Tensor) -> dict[str, int]:
    """Over which dimensions of its mesh a tensor is cut, and into how many parts."""
    if not isinstance(tensor, DTensor):
        return {}
    names, placements = tensor.device_mesh.mesh_dim_names or (), tensor.placements
    sizes = zip(names, tensor.device_mesh.shape, placements, strict=True)
    return {name: size for name, size, placement in sizes if not placement.is_replicate()}


def outline(tensor: torch.Tensor) -> torch.Tensor:
    """Shape and type of the whole, without memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def gathered(tensor: torch.Tensor, to: int) -> torch.Tensor | None:
    """The whole of a tensor on the process ``to``, ``None`` on the others, which only send; all processes call this."""
    held_by = getattr(tensor, "held_by", None)
    if held_by is None:
        return _gathered(tensor.detach(), to)
    holder, here = held_by.neighbour(to), dist.get_rank()
    if not tensor.is_meta:
        whole = _gathered(tensor.detach(), holder)
        if whole is None or here == to:
            return whole
        dist.send(whole.contiguous(), to)
    elif here == to:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype)
        dist.recv(whole, holder)
        return whole
    return None


def _gathered(tensor: torch.Tensor, to: int) -> torch.Tensor | None:
    here = not dist.is_initialized() or dist.get_rank() == to
    if not isinstance(tensor, DTensor):
        return tensor if here else None
    if to not in tensor.device_mesh.mesh:  # whose neighbours hold the same
        return None
    *outer, inner = tensor.placements
    if inner != Shard(0) or not all(placement.is_replicate() for placement in outer):
        whole = assembled(tensor)
        return whole if here else None
    mesh, part = tensor.device_mesh, tensor.to_local().contiguous()
    ranks = mesh.mesh.flatten(0, -2) if mesh.ndim > 1 else mesh.mesh[None]  # a row holds the model once
    [row] = [row.tolist() for row in ranks if to in row]
    if not here:
        if dist.get_rank() in row and part.numel():
            _exchange([dist.P2POp(dist.isend, part, to)])
        return None
    whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=part.device)
    parts = dict(zip(row, whole.chunk(len(row)), strict=False))  # the last ones may have nothing
    _exchange([dist.P2POp(dist.irecv, parts[rank], rank) for rank in parts if rank != to])
    if to in parts:
        parts[to].copy_(part)
    return whole


def _exchange(operations: list[dist.P2POp]) -> None:
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


def block_classes(model: nn.Module) -> set[str]:
    """Names of the classes of a model's blocks: what it says must not be split, else what its longest list holds, which
    is not inside of another."""
    present = {type(module).__name__ for module in model.modules()}
    named = set(getattr(model, "_no_split_modules", None) or ()) & present
    if named:
        return named
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    outer = [lists[name] for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {type(block).__name__ for block in max(outer, key=len, default=[])}


def reshard(model: nn.Module) -> None:
    """Free what forward passes without a backward have gathered; the parameters are this process's parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def fill(targets: Mapping[str, torch.Tensor], wholes: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy into each target, in place, this process's part of the whole tensor of its name. One whole tensor at a time
    is held. Every target is named once; names and shapes must agree."""
    left = set(targets)
    for name, whole in wholes:
        target = targets[name]
        left.remove(name)
        if target.is_meta:  # another stage of a pipeline holds it
            continue
        assert target.shape == whole.shape, f"{name}: {tuple(whole.shape)} for {tuple(target.shape)}"
        local(target).copy_(cut(whole, target))
    assert not left, f"nothing for {sorted(left)}"
