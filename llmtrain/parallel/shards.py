"""Local shards and full tensors.

A tensor that FSDP2 shards is a ``DTensor`` of torch. Each rank holds its *local shard* of the *full
tensor*: some of its rows. Shards lie along the innermost dimension of the device mesh. An outer
dimension, if there is one, has replicas. A plain tensor is its own local shard and its own full
tensor.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from llmtrain.interfaces.model import Weights


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``tensor``, detached from autograd. It shares the memory."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def sharded_dim(tensor: DTensor) -> int | None:
    """Return the dimension along which a tensor is sharded, or ``None`` if each rank has all of it.

    Raises:
        ValueError: if it is neither sharded along the innermost dimension of its mesh, in one
            piece on each rank, nor replicated.
    """
    *outer, inner = tensor.placements
    if all(isinstance(placement, Replicate) for placement in outer):
        if isinstance(inner, Replicate):
            return None
        if type(inner) is Shard:  # its subclasses are cut into several pieces
            return inner.dim
    raise ValueError(f"its placements are {tensor.placements}")


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the full tensor's shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def shard_like(full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut this rank's shard out of a full tensor. Nothing is communicated.

    Args:
        full: the full tensor, the same on every rank.
        like: a tensor of the same shape. The result is sharded in the same way.
    """
    if not isinstance(like, DTensor):
        return full
    return _shard_of(full, like.device_mesh, sharded_dim(like))


def _shard_of(full: torch.Tensor, mesh: DeviceMesh, dim: int | None) -> torch.Tensor:
    """Return this rank's shard along a dimension of a full tensor; with ``None``, all of it."""
    if dim is None:
        return full
    # All ranks hold as many rows, except the last ones if the rows do not divide evenly.
    size = full.shape[dim]
    rows = -(-size // mesh.size(mesh.ndim - 1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * rows, size)
    return full.narrow(dim, start, min(rows, size - start))


def filled_like(like: torch.Tensor, full: torch.Tensor) -> torch.Tensor:
    """Return a full tensor in the form of another one of its shape, with its own dtype."""
    result = torch.empty_like(like.detach(), dtype=full.dtype)
    local_shard(result).copy_(shard_like(full, like))
    return result


def distribute(full: torch.Tensor, like: DTensor, dim: int | None) -> DTensor:
    """Return a full tensor as a sharded one. Nothing is communicated, and the shard is a copy.

    Args:
        full: the full tensor, the same on every rank.
        like: a tensor whose ranks share the result.
        dim: the dimension that is sharded; with ``None`` each rank has all of it.
    """
    mesh = like.device_mesh
    inner: Placement = Replicate() if dim is None else Shard(dim)
    return DTensor.from_local(
        _shard_of(full, mesh, dim).clone(memory_format=torch.contiguous_format),
        mesh,
        [*[Replicate()] * (mesh.ndim - 1), inner],
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def zeros_by_row(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Return zeros, float32 [rows, columns], for the rows of a tensor: sharded as its rows are."""
    shard = local_shard(like)
    zeros = torch.zeros((len(shard), columns), dtype=torch.float32, device=shard.device)
    if not isinstance(like, DTensor):
        return zeros
    assert sharded_dim(like) in (0, None)
    shape = torch.Size([len(like), columns])
    return DTensor.from_local(
        zeros,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=shape,
        stride=(columns, 1),
    )


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

    shard = tensor.to_local()
    dim = sharded_dim(tensor)
    if dim is None:
        return shard if is_receiver else None

    # Rows are sent: the sharded dimension becomes the first one.
    shard = shard.movedim(dim, 0).contiguous()
    mesh = tensor.device_mesh
    senders = dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1))
    if not is_receiver:
        if rank in senders and shard.numel():
            transfer([dist.P2POp(dist.isend, shard, rank)])
        return None

    rows = tensor.shape[dim]
    full = torch.empty((rows, *shard.shape[1:]), dtype=tensor.dtype, device=shard.device)
    # If there are fewer chunks than ranks, the shards of the last ranks are empty.
    shards = dict(zip(senders, full.chunk(len(senders)), strict=False))
    transfer([dist.P2POp(dist.irecv, shards[peer], peer) for peer in shards if peer != rank])
    if rank in shards:
        shards[rank].copy_(shard)
    return full.movedim(0, dim)


def transfer(operations: list[dist.P2POp]) -> None:
    """Send and receive, all at once, and wait until everything has arrived."""
    if not operations:
        return
    for request in dist.batch_isend_irecv(operations):
        request.wait()


def reshard(model: nn.Module) -> None:
    """Free the weights that FSDP2 has gathered.

    A forward pass without a backward pass can leave gathered weights behind.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
