"""Count how often gradients are reduced over the ranks."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback
from llmtrain.parallel.fsdp import parameter_groups


class GradientSyncs(Callback):
    """Counts the backward passes of a step whose gradients are reduced.

    With DDP and FSDP2 a step should have one, however many micro-batches it has. If every
    micro-batch were reduced, as ``--sync_each_batch`` asks, losses and weights would still be
    right, but the step would take longer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.count = 0
        self.fsdp_groups = parameter_groups(model)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Keep a hook on the model, which counts, while the block runs."""
        hook = self.model.register_forward_pre_hook(self._before_forward)
        try:
            yield
        finally:
            hook.remove()

    def _before_forward(self, model: nn.Module, inputs: object) -> None:
        if not torch.is_grad_enabled():
            return
        ddp_reduces = False
        if isinstance(model, DistributedDataParallel):
            ddp_reduces = model.require_backward_grad_sync
        fsdp_reduces = any(group.reduce_grads for group in self.fsdp_groups)
        if ddp_reduces or fsdp_reduces:
            self.count += 1

    def on_step_begin(self, batch: LocalBatch) -> None:
        """Count from 0 again."""
        self.count = 0
