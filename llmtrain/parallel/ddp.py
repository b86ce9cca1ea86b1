"""Distributed data parallel: all ranks hold the same weights, and average their gradients."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from llmtrain.interfaces.batches import Batch
from llmtrain.parallel.engine import BucketFuture, BucketWatcher, Engine
from llmtrain.parallel.ranks import Ranks


def average_bucket(bucket: GradBucket) -> BucketFuture:
    """Average a bucket over all ranks, with the bits of DDP without a hook.

    DDP multiplies by 1 / ranks. PyTorch's own ``allreduce_hook`` divides by the ranks, which rounds
    differently unless their number is a power of two. A watched run must have the bits of any
    other.
    """
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    total: BucketFuture = dist.all_reduce(buffer, async_op=True).get_future()
    return total.then(lambda done: done.value()[0])


class DDPHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # accelerate has no types
    """The settings by which Accelerate wraps a model in DDP.

    Args:
        bucket_mib: the size of a bucket; ``None`` for DDP's own sizes, of which the first is
            smaller.
    """

    def __init__(self, bucket_mib: float | None = None) -> None:
        super().__init__(gradient_as_bucket_view=True)
        self.bucket_mib = bucket_mib

    def to_kwargs(self) -> dict[str, object]:
        """Return the arguments of DDP that differ from its defaults."""
        known = inspect.signature(DistributedDataParallel).parameters
        # torch 2.13 has renamed the argument.
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, object] = {"gradient_as_bucket_view": True, buffers: False}
        if self.bucket_mib is not None:
            settings["bucket_cap_mb"] = self.bucket_mib
        return settings


class ReplicatedEngine(Engine):
    """Data parallelism: every rank holds the full model. A single process is a special case.

    Args:
        settings: the arguments of :class:`Engine`.
    """

    def __init__(self, ranks: Ranks, model: nn.Module, **settings: Any) -> None:
        super().__init__(ranks, model, **settings)
        self.watcher: BucketWatcher | None = None

    @property
    def reduces_gradients(self) -> bool:
        is_ddp = isinstance(self.model, DistributedDataParallel)
        return is_ddp and bool(self.model.require_backward_grad_sync)

    def _average(self, state: None, bucket: GradBucket) -> BucketFuture:
        """Average a bucket over the ranks, through the watcher if there is one."""
        if self.watcher is None:
            return average_bucket(bucket)
        return self.watcher(bucket, average_bucket)

    @contextlib.contextmanager
    def watching_buckets(self, watcher: BucketWatcher) -> Iterator[None]:
        """Call ``watcher`` for every bucket of gradients while the block runs.

        The watcher has to average the bucket, with the function that it is given. Call this before
        the first step. DDP keeps its hook for good, which then only averages.
        """
        self.watcher = watcher
        # DDP takes one hook, before the first step.
        if isinstance(self.model, DistributedDataParallel) and not self.model._comm_hooks:
            self.model.register_comm_hook(None, self._average)
        try:
            yield
        finally:
            self.watcher = None

    def rebuild_buckets(self, batch: Batch) -> None:
        """Let DDP rebuild its buckets, by a pass whose gradients are thrown away.

        DDP rebuilds its buckets once, in the order in which gradients came. The buckets decide in
        which order the ranks are summed. So without this, on three ranks or more, the sums of a
        resumed run would differ in their last bits from those of a run that never stopped.
        """
        if isinstance(self.model, DistributedDataParallel):
            self.accelerator.backward(self.warm_up_loss(batch))
            self.model.zero_grad()
