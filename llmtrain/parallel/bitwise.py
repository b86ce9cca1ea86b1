"""Gradients whose bits do not depend on how many processes computed them.

Float addition does not associate, so an all-reduce over two processes and one over four differ in the last bits. Here
the gradients of the slots (micro-batches) of the global batch are added in one fixed binary tree: inside a process by
recursion, between processes by recursive doubling. With slots and processes a power of two, every process holds whole
subtrees, and a + b = b + a bit for bit, so all layouts add the same pairs in the same order.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.parallel.collectives import swap_with
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import add_metrics
from llmtrain.types import Batch, LossSums


def tree_sum(terms: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of the next ``count`` terms, a power of two, added pairwise as they come; they are overwritten.

    At most one subtree of each height is held, which waits for its other half.
    """
    assert count.bit_count() == 1, "the number of terms is no power of two"
    if count == 1:
        return next(terms)
    half = tree_sum(terms, count // 2)
    return half.add_(tree_sum(terms, count // 2))


def all_reduce_by_doubling(local_sum: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the sum over all ranks, with the same bits on each of them.

    Subtrees of neighbouring ranks are added first, then their sums, and so on.

    Args:
        local_sum: the sum of this rank. It is overwritten.
        rank: the number of this process.
        world_size: the number of processes, a power of two.
    """
    total = local_sum
    for height in range(world_size.bit_length() - 1):
        neighbour = rank ^ (1 << height)
        total.add_(swap_with(neighbour, total))
    return total


class BitwiseEngine(ReplicatedEngine):
    """Data parallelism whose gradients and losses have the same bits on 1, 2, 4, ... ranks."""

    may_choose_by_timing = False  # they differ between layouts, and must not decide about bits

    def __init__(self, accelerator: Accelerator, model: nn.Module, **settings: Any) -> None:
        super().__init__(accelerator, model, **settings)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def forward_backward(
        self, batches: Sequence[Batch], denominator: torch.Tensor, extra: Batch | None = None
    ) -> LossSums:
        """Leave the gradient of the mean loss of the global batch in ``.grad``.

        Returns:
            The sums of the whole global batch on rank 0, and zeros on the others. Further metrics
            are this rank's own sums.
        """
        metric_sums: dict[str, torch.Tensor] = {}
        gradients = (self._gradient_of(batch, denominator, extra, metric_sums) for batch in batches)
        local_sum = tree_sum(gradients, len(batches))

        self.set_phase("exchange")
        total = all_reduce_by_doubling(local_sum, self.rank, self.world_size)
        *gradients_of_parameters, loss_sum = total.split_with_sizes(
            [*(p.numel() for p in self.parameters), 1]
        )
        for parameter, gradient in zip(self.parameters, gradients_of_parameters, strict=True):
            parameter.grad = gradient.view_as(parameter)
        loss = loss_sum[0] if self.is_main else torch.zeros_like(loss_sum[0])
        return LossSums(loss, metric_sums)

    def _gradient_of(
        self,
        batch: Batch,
        denominator: torch.Tensor,
        extra: Batch | None,
        metric_sums: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the gradient of a micro-batch as one vector, with its summed loss at the end.

        Its sums of further metrics are added to ``metric_sums``.
        """
        with self.no_sync():
            sums = self.loss(batch, extra)
            self.accelerator.backward(sums.loss / denominator.clamp(min=1))
        add_metrics(metric_sums, sums.metrics)

        flat = [
            p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
            for p in self.parameters
        ]
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*flat, sums.loss.detach().to(flat[0].dtype)[None]])
