"""Gradients whose bits do not depend on how many processes computed them.

Float addition does not associate, so an all-reduce over two processes and one over four differ in the last bits. Here
the gradients of the slots (micro-batches) of the global batch are added in one fixed binary tree: inside a process by
recursion, between processes by recursive doubling. With slots and processes a power of two, every process holds whole
subtrees, and a + b = b + a bit for bit, so all layouts add the same pairs in the same order.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Batch
from llmtrain.parallel.collectives import swap_with


def tree_sum(terms: Iterator[torch.Tensor], count: int) -> torch.Tensor:
    """Return the sum of the next ``count`` terms, a power of two, added pairwise as they come; they are overwritten.

    At most one subtree of each height is held, which waits for its other half.
    """
    assert count.bit_count() == 1, "the number of terms is no power of two"
    if count == 1:
        return next(terms)
    half = tree_sum(terms, count // 2)
    return half.add_(tree_sum(terms, count // 2))


def all_reduce_by_doubling(mine: torch.Tensor) -> torch.Tensor:
    """Return the sum over 2**k ranks, added in place as a tree of neighbours; the same bits on each."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    for height in range(ranks.bit_length() - 1):
        mine.add_(swap_with(dist.get_rank() ^ (1 << height), mine))
    return mine


class BitwiseGradients:
    """A ``forward_backward`` whose gradients, and whose summed nll, have the same bits on 1, 2, 4, ... ranks."""

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, before_exchange: Callable[[], None]
    ) -> None:
        self.accelerator, self.model, self.before_exchange = accelerator, model, before_exchange
        self.parameters = [p for p in model.parameters() if p.requires_grad]

    def __call__(self, batches: Sequence[Batch], tokens: torch.Tensor) -> torch.Tensor:
        """Leave the gradient of sum(nll) / tokens of the whole global batch in ``.grad``.

        Returns the summed nll: all of it on rank 0, and 0 on the others.
        """
        mine = tree_sum((self._of_slot(batch, tokens) for batch in batches), len(batches))
        self.before_exchange()
        total = all_reduce_by_doubling(mine)
        *gradients, nll = total.split_with_sizes([*(p.numel() for p in self.parameters), 1])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient.view_as(parameter)
        return nll[0] if self.accelerator.is_main_process else torch.zeros_like(nll[0])

    def _of_slot(self, batch: Batch, tokens: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a slot, and its nll at the end, as one vector."""
        with self.accelerator.no_sync(self.model):
            nll = self.model(**batch)
            self.accelerator.backward(nll / tokens.clamp(min=1))
        flat = [
            p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel())
            for p in self.parameters
        ]
        for parameter in self.parameters:
            parameter.grad = None
        return torch.cat([*flat, nll.detach().to(flat[0].dtype)[None]])
