"""Distributed data parallel: every rank holds the same weights and averages its gradients with the others'."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed's stub lacks it
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from llmtrain.console import say
from llmtrain.contract import Batch
from llmtrain.errors import UserError
from llmtrain.parallel.collectives import BucketMean
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.fsdp import parameter_groups

Average: TypeAlias = Callable[[GradBucket], BucketMean]  # begins to average a bucket over the ranks
# Called with a full bucket, what averages it, and the bytes that are summed over the ranks.
Watcher: TypeAlias = Callable[[GradBucket, Average, int], BucketMean]


def average_exactly(state: None, bucket: GradBucket) -> BucketMean:
    """Average a bucket over all ranks, with the bits of DDP without a hook.

    DDP multiplies by 1 / ranks. PyTorch's own ``allreduce_hook`` divides by the ranks, which rounds
    differently unless their number is a power of two. A watched run must have the bits of any other.
    """
    buffer = bucket.buffer().mul_(1 / dist.get_world_size())
    total: BucketMean = dist.all_reduce(buffer, async_op=True).get_future()
    return total.then(lambda done: done.value()[0])


COMM_HOOKS: dict[str, Callable[[Any, GradBucket], BucketMean]] = {  # by --ddp_comm_hook
    "none": average_exactly,
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
COMPRESSED_TO = {"bf16": torch.bfloat16, "fp16": torch.float16}


class DDPHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # accelerate has no types
    """The settings by which Accelerate wraps a model in DDP."""

    def __init__(self, config: ParallelConfig, bitwise: bool = False) -> None:
        super().__init__(gradient_as_bucket_view=True)
        self.config = config
        self.bitwise = bitwise
        self.watcher: Watcher | None = None

    def to_kwargs(self) -> dict[str, object]:
        """Return the arguments of DDP that differ from its defaults."""
        known = inspect.signature(DistributedDataParallel).parameters
        # torch 2.13 has renamed the argument
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        settings: dict[str, object] = {"gradient_as_bucket_view": True, buffers: False}
        # Unless it gets a size, DDP makes the first bucket smaller than the others.
        size = self.config.ddp_bucket_cap_mb
        if self.config.given("ddp_bucket_cap_mb") or size != ParallelConfig.ddp_bucket_cap_mb:
            settings["bucket_cap_mb"] = size
        return settings

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Have DDP compress its buckets, if the config says so; Accelerate calls this."""
        dtype = COMPRESSED_TO.get(self.config.ddp_comm_hook)
        if dtype is None:
            return
        model.register_comm_hook(None, self._average)
        name = str(dtype).removeprefix("torch.")
        say("exchange", f"approximate: gradients are added up in {name}")

    def watch(self, model: nn.Module, watcher: Watcher | None) -> None:
        """Call ``watcher`` for every bucket, if the model is in DDP; ``None`` ends that.

        Call this before the first step. The watcher has to average the bucket, with the function
        that it is given. DDP keeps its hook for good, which then only averages.
        """
        self.watcher = watcher
        if isinstance(model, DistributedDataParallel) and not model._comm_hooks:
            model.register_comm_hook(None, self._average)

    def _average(self, state: None, bucket: GradBucket) -> BucketMean:
        """Average a bucket, through the watcher if there is one: the communication hook of DDP."""
        name = self.config.ddp_comm_hook
        average = functools.partial(COMM_HOOKS[name], None)
        if self.watcher is None:
            return average(bucket)
        buffer = bucket.buffer()
        dtype = COMPRESSED_TO.get(name, buffer.dtype)
        return self.watcher(bucket, average, buffer.numel() * dtype.itemsize)


def handler_of(accelerator: Accelerator) -> DDPHandler:
    """Return how this run's models are wrapped in DDP.

    Raises:
        UserError: if ``llmtrain.start()`` did not make this Accelerator.
    """
    handler = accelerator.ddp_handler
    if not isinstance(handler, DDPHandler):
        raise UserError("this loop needs the Accelerator that llmtrain.start() makes.")
    return handler


def settle_buckets(accelerator: Accelerator, model: nn.Module, batch: Batch) -> None:
    """Bring DDP's buckets to where they are after a first step; the gradients are thrown away.

    DDP rebuilds its buckets once, in the order in which gradients came. The buckets decide in which
    order the ranks are summed. So without this, on three ranks or more, the sums of a resumed run
    would differ in their last bits from those of a run that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        accelerator.backward(model(**batch))
        model.zero_grad()


class GradientSyncs:
    """Counts the backward passes whose gradients are reduced, while :meth:`counting` runs.

    There should be one in a step, however many micro-batches it has. Losses and weights agree even
    if every micro-batch is reduced; only the time does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0
        self.sharded = parameter_groups(model)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the block runs, by a hook on the model."""
        hook = self.model.register_forward_pre_hook(self._before_forward)
        try:
            yield
        finally:
            hook.remove()

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        ddp_reduces = (
            isinstance(model, DistributedDataParallel) and model.require_backward_grad_sync
        )
        if ddp_reduces or any(group.reduce_grads for group in self.sharded):
            self.count += 1

    def restart(self) -> None:
        """Count from 0 again."""
        self.count = 0
