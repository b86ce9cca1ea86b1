"""Distributed data parallel: every process holds the same weights and averages its gradients with the others'."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.parallel.fsdp import parameter_groups


def data_parallel_size(accelerator: Accelerator) -> int:
    """Over how many replicas gradients are averaged; the loss is multiplied by it to turn the mean into the sum."""
    return accelerator.num_processes


def ddp_settings() -> DistributedDataParallelKwargs:
    """Gradients live in the buckets that are reduced: no second copy of them."""
    return DistributedDataParallelKwargs(gradient_as_bucket_view=True)


def settle_buckets(accelerator: Accelerator, model: nn.Module, batch: dict[str, torch.Tensor]) -> None:
    """Bring DDP to where it is after a first update; the gradients are thrown away.

    DDP rebuilds its buckets once, in the order in which gradients came. Which process adds which part first depends on
    the buckets, so on three processes or more the sums of a run that goes on would else differ in their last bits from
    those of one that never stopped.
    """
    if isinstance(model, DistributedDataParallel):
        accelerator.backward(model(**batch))
        model.zero_grad()


class GradientSyncs:
    """Counts the backward passes whose gradients are reduced: one an update, however many micro-batches it has.

    Losses and weights agree even when every micro-batch is reduced; only the time does not.
    """

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self.sharded = parameter_groups(model)
        model.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, model: nn.Module, inputs: Any) -> None:
        ddp = getattr(model, "require_backward_grad_sync", False)
        if torch.is_grad_enabled() and (ddp or any(group.reduce_grads for group in self.sharded)):
            self.count += 1

    def restart(self) -> None:
        self.count = 0
