"""Collectives over unequal shards, and those that have a gradient (Shoeybi et al. 2019, arXiv:1909.08053)."""

from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._C._distributed_c10d import GradBucket  # torch.distributed's stub lacks it
from torch.distributed.device_mesh import DeviceMesh

BucketMean: TypeAlias = torch.futures.Future[
    torch.Tensor
]  # of a bucket's gradients, over the ranks
# Begins to average a bucket over the ranks.
BucketAverage: TypeAlias = Callable[[GradBucket], BucketMean]
# Called with a full bucket, the function that averages it, and the bytes that are summed over the ranks.
# It returns the average.
BucketWatcher: TypeAlias = Callable[[GradBucket, BucketAverage, int], BucketMean]
_Operation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]


def range_of(size: int, ranks: int, rank: int) -> range:
    """Return which of ``size`` rows a rank has: as many as the others, and the last ranks what is left."""
    each = -(-size // ranks)
    return range(min(rank * each, size), min((rank + 1) * each, size))


def shard_range(size: int, mesh: DeviceMesh) -> range:
    """Return which of ``size`` rows this rank of a mesh of one dimension has."""
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
    """Gather a dimension of ``size`` from the shards of all ranks of a group, each as long as :func:`range_of` says."""
    ranks, after = dist.get_world_size(group), shard.ndim - 1 - dimension
    padding = [0, 0] * after + [0, len(range_of(size, ranks, 0)) - shard.shape[dimension]]
    padded = F.pad(shard, padding).contiguous()
    everyone = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everyone, padded, group)
    return torch.cat(everyone, dimension).narrow(dimension, 0, size)


def swap_with(peer: int, mine: torch.Tensor) -> torch.Tensor:
    """Send a tensor to another rank, which sends one of its own; return that."""
    theirs = torch.empty_like(mine)
    transfer([dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)])
    return theirs


def transfer(operations: list[dist.P2POp]) -> None:
    """Send and receive, all at once, and wait for the end."""
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


def copy_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Copy ``x``, which all ranks have, to where each computes something else: the gradient is summed over them."""
    return _Collective.call(x, lambda x: x.view_as(x), lambda grad: all_reduce(grad, mesh))


def reduce_from(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum ``x`` over the ranks, all of which go on with the sum: the gradient is copied."""
    return _Collective.call(x, lambda x: all_reduce(x, mesh), lambda grad: grad)


def scatter_to(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Scatter the last dimension of ``x``, which all ranks have: the gradient is gathered."""
    size = x.shape[-1]
    return _Collective.call(
        x, lambda x: _scattered(x, mesh), lambda grad: _gathered(grad, mesh, size)
    )


def gather_from(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    """Gather a last dimension of ``size`` from its shards: the gradient is scattered."""
    return _Collective.call(
        x, lambda x: _gathered(x, mesh, size), lambda grad: _scattered(grad, mesh)
    )


def _scattered(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    mine = shard_range(x.shape[-1], mesh)
    return x[..., mine.start : mine.stop].contiguous()


def _gathered(x: torch.Tensor, mesh: DeviceMesh, size: int) -> torch.Tensor:
    return all_gather(x, mesh.get_group(), size, x.ndim - 1)


class _Collective(torch.autograd.Function):
    """An operation with another for its gradient."""

    @staticmethod
    def call(x: torch.Tensor, forwards: _Operation, backwards: _Operation) -> torch.Tensor:
        return cast(torch.Tensor, _Collective.apply(x, forwards, backwards))  # type: ignore[no-untyped-call]

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
