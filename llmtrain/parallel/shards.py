"""Local shards and full tensors.

A tensor that FSDP2 shards is a ``DTensor`` of torch. Each rank holds its *local shard* of the *full
tensor*: some of its rows. Shards lie along the innermost dimension of the device mesh. An outer
dimension, if there is one, has replicas. A plain tensor is its own local shard and its own full
tensor.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from llmtrain.parallel.collectives import all_gather_rows, range_of, transfer
from llmtrain.types import Weights


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, detached from autograd. It shares the memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the full tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather the full tensor on every rank. All ranks call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    return all_gather_rows(local_shard(tensor), mesh.get_group(mesh.ndim - 1), size=len(tensor))


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor. Nothing is communicated.

    Args:
        full: the full tensor, the same on every rank.
        like: a tensor of the same shape. The result is sharded in the same way.
    """
    if not isinstance(like, DTensor):
        return full
    mesh = like.device_mesh
    rows = range_of(len(full), mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1))
    return full[rows.start : rows.stop]


@torch.no_grad()
def fill(targets: Mapping[str, torch.Tensor], weights: Weights) -> None:
    """Copy full tensors, in place, into tensors that may be sharded.

    Only one full tensor is held at a time.

    Args:
        targets: the tensors to fill, by name.
        weights: pairs of a name and a full tensor of the same shape as the target of this name.
            Each target must occur once.
    """
    missing = set(targets)
    for name, full in weights:
        target = targets[name]
        missing.remove(name)
        assert target.shape == full.shape, f"{name}: {tuple(full.shape)} for {tuple(target.shape)}"
        local_shard(target).copy_(shard_like(full, target))
    assert not missing, f"no weights for {sorted(missing)}"


def gather_to(tensor: torch.Tensor, rank: int) -> torch.Tensor | None:
    """Gather the full tensor on one rank, without sending it to the others. All ranks call this.

    Returns:
        The full tensor on ``rank``, and ``None`` on all other ranks.
    """
    is_receiver = not dist.is_initialized() or dist.get_rank() == rank
    if not isinstance(tensor, DTensor):
        return tensor if is_receiver else None

    assert tensor.placements[-1] == Shard(0), "FSDP2 shards rows"
    mesh = tensor.device_mesh
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
