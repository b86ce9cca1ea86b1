"""Gradients and eval losses whose bits do not depend on how many processes computed them.

Floating-point addition is not associative, so all-reduces over two and four processes differ in
the last bits. Here the gradients of the micro-batches of a global batch are added in a fixed binary
tree: within a process by recursion, and between processes by recursive doubling.

The numbers of micro-batches and processes are powers of two, so the micro-batches of a process are
a complete subtree. As a + b and b + a have the same bits, all layouts add the same pairs in the
same order.

In an evaluation, neighbouring micro-batches go to neighbouring ranks. So the first levels of the
tree are between processes, and the others within them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, StepTotals
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import add_sums
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import transfer


def tree_sum(terms: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of the next ``count`` terms, added in a binary tree.

    Terms are added as soon as they come. At most one sum of each height of the tree is in memory
    at a time; it waits for its sibling.

    Args:
        terms: tensors of one shape. They are overwritten.
        count: how many of them to add, a power of two.
    """
    assert count.bit_count() == 1, "the number of terms is no power of two"
    if count == 1:
        return next(terms)
    left = tree_sum(terms, count // 2)
    right = tree_sum(terms, count // 2)
    return left.add_(right)


def _tree_sum_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the rows of ``values``, [rows, N], added in a binary tree."""
    # Zeros change no sum. They fill the tree up, and with more ranks some are in `values`.
    count = 1 << (len(values) - 1).bit_length()
    zeros = values.new_zeros(count - len(values), *values.shape[1:])
    return tree_sum(iter(torch.cat([values, zeros])), count)


def all_reduce_by_doubling(local_sum: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """Return the sum over all ranks, with the same bits on each of them.

    Sums of neighbouring ranks are added first, then the sums of neighbouring pairs, and so on.

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


def swap_with(peer: int, tensor: torch.Tensor) -> torch.Tensor:
    """Send a tensor to another rank, and return the tensor that it sends in exchange."""
    received = torch.empty_like(tensor)
    transfer([dist.P2POp(dist.isend, tensor, peer), dist.P2POp(dist.irecv, received, peer)])
    return received


class BitwiseEngine(ReplicatedEngine):
    """Data parallelism whose gradients and losses have the same bits on 1, 2, 4, ... ranks."""

    def __init__(self, ranks: Ranks, model: nn.Module, **settings: Any) -> None:
        super().__init__(ranks, model, **settings)
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def forward_backward(
        self, batches: Sequence[Batch], totals: StepTotals, extra: Batch | None = None
    ) -> LossSums:
        """Leave the gradient of the mean loss of the global batch in ``.grad``.

        Returns:
            The loss of the whole global batch on rank 0, and zero on all others. Further metrics
            are this rank's sums.
        """
        metric_sums: dict[str, torch.Tensor] = {}
        gradients = (self._gradient_of(batch, totals, extra, metric_sums) for batch in batches)
        local_sum = tree_sum(gradients, len(batches))

        self.phases.begin("exchange")
        total = all_reduce_by_doubling(local_sum, self.ranks.rank, self.ranks.world_size)

        sizes = [parameter.numel() for parameter in self.parameters]
        *gradients_of_parameters, loss_sum = total.split_with_sizes([*sizes, 1])
        for parameter, gradient in zip(self.parameters, gradients_of_parameters, strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype)
        loss = loss_sum[0] if self.ranks.is_main else torch.zeros_like(loss_sum[0])
        return LossSums(loss, metric_sums)

    def _start_sum(self, counts: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sum the counts of all micro-batches in the tree in which their gradients are added."""
        local_sum = _tree_sum_of_rows(counts)
        return all_reduce_by_doubling(local_sum, self.ranks.rank, self.ranks.world_size), None

    def sum_of_micro_batches(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the micro-batches of all ranks, added in a binary tree."""
        sums_over_ranks = all_reduce_by_doubling(
            values.clone(), self.ranks.rank, self.ranks.world_size
        )
        return _tree_sum_of_rows(sums_over_ranks)

    def _gradient_of(
        self,
        batch: Batch,
        totals: StepTotals,
        extra: Batch | None,
        metric_sums: dict[str, torch.Tensor],
    ) -> torch.Tensor:
        """Compute the gradient of a micro-batch, and add its further metrics to ``metric_sums``.

        Returns:
            All gradients as one vector, in float32 or more, with the summed loss at the end.
        """
        with self.no_sync():
            sums = self.loss(batch, extra)
            self.accelerator.backward(sums.loss / self._divisor(totals).to(sums.loss.dtype))
        add_sums(metric_sums, sums.metrics)

        flat = []
        for parameter in self.parameters:
            if parameter.grad is None:
                flat.append(parameter.new_zeros(parameter.numel()))
            else:
                flat.append(parameter.grad.flatten())
            parameter.grad = None
        dtype = torch.promote_types(flat[0].dtype, torch.float32)
        return torch.cat([vector.to(dtype) for vector in [*flat, sums.loss.detach()[None]]])
