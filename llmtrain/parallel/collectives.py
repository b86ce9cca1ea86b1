"""Collectives over shards of unequal sizes, and collectives with a gradient.

For the latter see Shoeybi et al. 2019, arXiv:1909.08053.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import GradBucket
from torch.distributed.device_mesh import DeviceMesh

# The future of a bucket's mean over the ranks. It is complete once all ranks have sent the bucket.
BucketFuture: TypeAlias = torch.futures.Future[torch.Tensor]
# Begins to average a bucket over the ranks, and does not wait for the mean.
BucketAverage: TypeAlias = Callable[[GradBucket], BucketFuture]
# Takes a full bucket, the function that averages it, and the bytes that are summed over the ranks.
# Returns the future of the mean.
BucketWatcher: TypeAlias = Callable[[GradBucket, BucketAverage, int], BucketFuture]
_Operation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def range_of(size: int, ranks: int, rank: int) -> range:
    """Return which of ``size`` rows a rank holds.

    All ranks hold the same number of rows, except the last ranks if the rows do not divide evenly.
    """
    share = -(-size // ranks)
    return range(min(rank * share, size), min((rank + 1) * share, size))


def shard_range(size: int, mesh: DeviceMesh) -> range:
    """Return which of ``size`` rows this rank of a one-dimensional mesh holds."""
    return range_of(size, mesh.size(), mesh.get_local_rank())


def all_reduce(
    x: torch.Tensor, mesh: DeviceMesh, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Return the sum over the ranks, or another reduction, as a new tensor without a gradient."""
    x = x.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op, mesh.get_group())
    return x


def all_gather(
    shard: torch.Tensor, group: dist.ProcessGroup, size: int, dimension: int
) -> torch.Tensor:
    """Gather a tensor from its shards on all ranks of a group.

    Args:
        shard: this rank's shard, as long as :func:`range_of` says.
        group: the ranks.
        size: the size of the full tensor along ``dimension``.
        dimension: the dimension that is sharded.
    """
    # All ranks must send tensors of the same shape, so shorter shards are padded at the end.
    ranks = dist.get_world_size(group)
    longest = len(range_of(size, ranks, 0))
    later_dimensions = shard.ndim - 1 - dimension
    padding = [0, 0] * later_dimensions + [0, longest - shard.shape[dimension]]
    padded = F.pad(shard, padding).contiguous()

    shards = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(shards, padded, group)
    return torch.cat(shards, dimension).narrow(dimension, 0, size)


def swap_with(peer: int, tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor to another rank, and return the tensor that it sends in exchange."""
    received = torch.empty_like(tensor)
    transfer([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)])
    return received


def transfer(operations: list[dist.P2POp]) -> None:
    """Send and receive, all at once, and wait until everything has arrived."""
    if not operations:
        return
    for request in dist.batch_isend_irecv(operations):
        request.wait()


# --- collectives with a gradient


def copy_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return ``x``, which is the same on all ranks; the gradient is summed over them.

    Use it before a computation that differs between the ranks.
    """
    return _Collective.call(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad, mesh))


def reduce_from(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum ``x`` over the ranks; the gradient is passed on as it is."""
    return _Collective.call(x, lambda x: all_reduce(x, mesh), lambda grad: grad)


def scatter_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Keep this rank's shard of the last dimension of ``x``; the gradient is gathered.

    Before, ``x`` is the same on all ranks.
    """
    size = x.shape[-1]
    return _Collective.call(x, lambda x: _shard(x, mesh), lambda grad: _gather(grad, mesh, size))


def gather_from(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    """Gather the last dimension, of ``size``, from its shards; the gradient is sharded."""
    return _Collective.call(x, lambda x: _gather(x, mesh, size), lambda grad: _shard(grad, mesh))


def _shard(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    columns = shard_range(x.shape[-1], mesh)
    return x[..., columns.start : columns.stop].contiguous()


def _gather(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    return all_gather(x, mesh.get_group(), size, x.ndim - 1)


class _Collective(torch.autograd.Function):
    """Two operations, of which the second computes the gradient of the first."""

    @staticmethod
    def call(x: torch.Tensor, forwards: _Operation, backwards: _Operation) -> torch.Tensor:
        result: torch.Tensor = _Collective.apply(  # type: ignore[no-untyped-call]
            x,
            forwards,
            backwards,
        )
        return result

    @staticmethod
    def forward(x: torch.Tensor, forwards: _Operation, backwards: _Operation) -> torch.Tensor:
        return forwards(x)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[torch.Tensor, _Operation, _Operation], output: object
    ) -> None:
        ctx.backwards = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.backwards(grad), None, None
