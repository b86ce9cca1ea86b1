"""Local shards and full tensors.

A tensor that is sharded over ranks is a ``DTensor`` of torch. Each rank holds its *local shard*
of the *full tensor*. A plain tensor is its own local shard and its own full tensor.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from llmtrain.parallel.collectives import all_gather, range_of, transfer
from llmtrain.types import Weights


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, detached from autograd. It shares the memory."""
    return to_local(tensor.detach())


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor`` as part of autograd.

    The gradient of the shard becomes the gradient of ``tensor``.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    return tensor


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the full tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def shards_over(tensor: torch.Tensor) -> dict[str, int]:
    """Return the mesh dimensions that ``tensor`` is sharded over, with their sizes.

    The result is empty for a plain tensor. Dimensions that only replicate it are left out.
    """
    if not isinstance(tensor, DTensor):
        return {}

    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    sizes = {}
    for name, size, placement in zip(names, mesh.shape, tensor.placements, strict=True):
        if not placement.is_replicate():
            sizes[name] = size
    return sizes


class _Split(NamedTuple):
    """One step of sharding: the ranks of a mesh dimension split a dimension of the tensor.

    The dimension of the tensor may consist of equal pieces, such as the query, key and value of a
    fused projection. Then each piece is split on its own.
    """

    mesh_dim: int
    tensor_dim: int
    pieces: int
    piece_size: int  # along tensor_dim, before the split
    local_range: range  # the indices of each piece that this rank keeps


def _splits(tensor: DTensor) -> list[_Split]:
    """Return the steps that lead from the full tensor to this rank's shard, in their order.

    The innermost mesh dimension, whose ranks are neighbours, splits first. The outer dimensions
    then split what is left. These steps are needed because torch 2.13 gathers shards of shards
    only if they are equally long.
    """
    mesh = tensor.device_mesh
    shape = list(tensor.shape)
    splits = []
    for mesh_dim in reversed(range(mesh.ndim)):
        placement = tensor.placements[mesh_dim]
        if not isinstance(placement, Shard | _StridedShard):
            continue

        # In an outer dimension, _StridedShard does not mean pieces. FSDP2 writes it there to say
        # that the inner dimension has split first.
        pieces = 1
        is_innermost = mesh_dim == mesh.ndim - 1
        if is_innermost and isinstance(placement, _StridedShard):
            pieces = int(placement.split_factor)

        tensor_dim = placement.dim
        piece_size = shape[tensor_dim] // pieces
        split = _Split(
            mesh_dim=mesh_dim,
            tensor_dim=tensor_dim,
            pieces=pieces,
            piece_size=piece_size,
            local_range=range_of(piece_size, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)),
        )
        splits.append(split)
        shape[tensor_dim] = pieces * len(split.local_range)
    return splits


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on every rank. All ranks call this."""
    if not isinstance(tensor, DTensor):
        return tensor

    gathered = local_shard(tensor)
    for split in reversed(_splits(tensor)):
        group = tensor.device_mesh.get_group(split.mesh_dim)
        pieces = [
            all_gather(piece, group, size=split.piece_size, dimension=split.tensor_dim)
            for piece in gathered.chunk(split.pieces, split.tensor_dim)
        ]
        gathered = torch.cat(pieces, split.tensor_dim)
    return gathered


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor. Nothing is communicated.

    Args:
        full: the full tensor, the same on every rank.
        like: a tensor of the same shape. The result is sharded in the same way.
    """
    if not isinstance(like, DTensor):
        return full

    shard = full
    for split in _splits(like):
        start = split.local_range.start
        length = len(split.local_range)
        pieces = [
            piece.narrow(split.tensor_dim, start, length)
            for piece in shard.chunk(split.pieces, split.tensor_dim)
        ]
        shard = torch.cat(pieces, split.tensor_dim)
    return shard


@torch.no_grad()
def fill(targets: Mapping[str, torch.Tensor], weights: Weights) -> None:
    """Copy full tensors, in place, into tensors that may be sharded.

    Only one full tensor is held at a time. Targets on the meta device are skipped, because
    another pipeline stage holds them.

    Args:
        targets: the tensors to fill, by name.
        weights: pairs of a name and a full tensor of the same shape as the target of this name.
            Each target must occur once.
    """
    missing = set(targets)
    for name, full in weights:
        target = targets[name]
        missing.remove(name)
        if target.is_meta:
            continue
        assert target.shape == full.shape, f"{name}: {tuple(full.shape)} for {tuple(target.shape)}"
        local_shard(target).copy_(shard_like(full, target))
    assert not missing, f"no weights for {sorted(missing)}"


def gather_to(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Gather the full tensor on one rank. All ranks that hold the tensor call this.

    Returns:
        The full tensor on ``rank``, and ``None`` on all other ranks.
    """
    is_receiver = not dist.is_initialized() or dist.get_rank() == rank
    if not isinstance(tensor, DTensor):
        return tensor if is_receiver else None

    mesh = tensor.device_mesh
    if rank not in mesh.mesh:  # the receiver gathers another copy of the tensor
        return None

    # Only plain FSDP, which shards rows, is gathered without sending everything to all ranks.
    *outer, inner = tensor.placements
    is_sharded_by_rows = inner == Shard(0) and all(p.is_replicate() for p in outer)
    if not is_sharded_by_rows:
        full = full_tensor(tensor)
        return full if is_receiver else None

    senders = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    shard = tensor.to_local().contiguous()
    if not is_receiver:
        if rank in senders and shard.numel():
            transfer([dist.P2POp(dist.isend, shard, rank)])
        return None

    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=shard.device)
    # If there are fewer chunks than ranks, the shards of the last ranks are empty.
    shards = dict(zip(senders, full.chunk(len(senders)), strict=False))
    transfer([dist.P2POp(dist.irecv, shards[peer], peer) for peer in shards if peer != rank])
    if rank in shards:
        shards[rank].copy_(shard)
    return full
