"""A metric of the user, which every evaluation computes."""

from __future__ import annotations  # so that annotations do not import torch

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.part import Part

if TYPE_CHECKING:
    import torch

# Sums over a micro-batch by name: a sum, or a sum and its denominator.
MetricSums: TypeAlias = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]
# A metric as a plain function: see `Metric.compute`.
MetricFunction: TypeAlias = Callable[[Any, Batch], MetricSums]


class Metric(Part):
    """A metric that every evaluation computes, of all eval rows."""

    def compute(self, model: Any, batch: Batch) -> MetricSums:
        """Return sums over an eval micro-batch by name.

        This runs inside ``model.forward``, without gradients. A sum with a denominator becomes
        their ratio, after both were added up over all micro-batches and ranks. So the result does
        not depend on the parallel layout.

        Args:
            model: the unwrapped model, in eval mode, with the methods of :class:`llmtrain.Model`.
            batch: a micro-batch by column, among them ``input_ids`` and ``labels`` [B, T].
        """
        raise NotImplementedError


class FunctionMetric(Metric):
    """A metric that the user has written as a plain function."""

    def __init__(self, function: MetricFunction) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def compute(self, model: Any, batch: Batch) -> MetricSums:
        return self.function(model, batch)
