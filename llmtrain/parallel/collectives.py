"""Collectives over shards of unequal sizes, and messages between two ranks."""

from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import GradBucket

# The future of a bucket's mean over the ranks. It is complete once all ranks have sent the bucket.
BucketFuture: TypeAlias = torch.futures.Future[torch.Tensor]
# Begins to average a bucket over the ranks, and does not wait for the mean.
BucketAverage: TypeAlias = Callable[[GradBucket], BucketFuture]
# Takes a full bucket, the function that averages it, and the bytes that are summed over the ranks.
# Returns the future of the mean.
BucketWatcher: TypeAlias = Callable[[GradBucket, BucketAverage, int], BucketFuture]


def range_of(size: int, ranks: int, rank: int) -> range:
    """Return which of ``size`` rows a rank holds.

    All ranks hold the same number of rows, except the last ranks if the rows do not divide evenly.
    """
    share = -(-size // ranks)
    return range(min(rank * share, size), min((rank + 1) * share, size))


def all_gather_rows(shard: torch.Tensor, group: dist.ProcessGroup, size: int) -> torch.Tensor:
    """Gather a tensor whose rows are sharded over the ranks of a group.

    Args:
        shard: this rank's rows, as many as :func:`range_of` says.
        group: the ranks.
        size: the rows of the full tensor.
    """
    # All ranks must send tensors of the same shape, so shorter shards are padded at the end.
    ranks = dist.get_world_size(group)
    longest = len(range_of(size, ranks, 0))
    padding = [0, 0] * (shard.ndim - 1) + [0, longest - len(shard)]
    padded = F.pad(shard, padding).contiguous()

    shards = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(shards, padded, group)
    return torch.cat(shards)[:size]


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
