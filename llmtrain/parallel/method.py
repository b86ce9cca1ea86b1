"""Parallel methods that own the forward and backward passes of an update."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch, Forward
from llmtrain.parallel.bitwise import BitwiseGradients
from llmtrain.parallel.mesh import sharding_of
from llmtrain.parallel.pipeline import Pipeline


class Method(Protocol):
    """A ``forward_backward``."""

    def __call__(self, batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor: ...

    @property
    def forward(self) -> Forward | None:
        """The forward pass alone; ``None`` where it is the model's own."""


def method_of(
    accelerator: Accelerator, model: nn.Module, bitwise: bool, before_exchange: Callable[[], None]
) -> Method | None:
    """Return the method that computes the gradients; ``None`` where plain accumulation does.

    ``before_exchange`` is called when a rank has its gradients and waits for the others'.
    """
    if not is_whole(accelerator):
        return Pipeline(accelerator, model)
    return BitwiseGradients(accelerator, model, before_exchange) if bitwise else None


def is_whole(accelerator: Accelerator) -> bool:
    """Return whether each rank can run the whole model, if need be with gathered weights."""
    sharding = sharding_of(accelerator)
    return sharding is None or sharding.stages == 1
