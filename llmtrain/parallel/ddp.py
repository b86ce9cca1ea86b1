"""Distributed data parallel: every process holds the same weights and averages its gradients with the others'."""

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs


def data_parallel_size(accelerator: Accelerator) -> int:
    """Over how many replicas gradients are averaged; the loss is multiplied by it to turn the mean into the sum."""
    return accelerator.num_processes


def ddp_settings() -> DistributedDataParallelKwargs:
    """Gradients live in the buckets that are reduced: no second copy of them."""
    return DistributedDataParallelKwargs(gradient_as_bucket_view=True)
