"""Bits: one process and four differ in the last digits, unless --bitwise is set.

A computer rounds after each addition, so the order of additions matters. Four processes first add
the gradients of their own rows. One process adds those of all rows, one after the other. With
--bitwise the gradients of a batch's slots are added as the leaves of one binary tree, and every
process adds complete branches of it. This lesson writes that tree in a few lines of torch.
"""

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import batch, claim, flat_gradient, rows, show, small_gpt


def main() -> None:
    """Add the same gradients one after the other, by an all-reduce, and as a tree."""
    a, b, c = torch.tensor([1e8, 1.0, -1e8])
    show(f"1e8 + 1 - 1e8 in float32: {float(a + b + c):g}; 1e8 - 1e8 + 1: {float(a + c + b):g}")

    accelerator = start_accelerator()
    rank = accelerator.process_index
    model = small_gpt()
    gradients = [_gradient_of(model, tokens) for tokens in rows(16).chunk(8)]  # of each slot
    rank_gradients = gradients[2 * rank : 2 * rank + 2]

    in_order = torch.stack(gradients).cumsum(0)[-1]
    all_reduced = rank_gradients[0] + rank_gradients[1]
    dist.all_reduce(all_reduced)
    difference = float((in_order - all_reduced).norm() / in_order.norm())
    claim(
        "one after the other, or by an all-reduce over 4 processes: the sums have the same bits",
        difference == 0,
        expected=False,
    )
    claim("they differ by less than 1e-6 of the gradient", difference < 1e-6)

    full_tree = _tree_sum(gradients)
    branches = accelerator.gather(_tree_sum(rank_gradients)[None])
    distributed_tree = _tree_sum(list(branches))
    claim(
        "as a tree, in one process or in 4: the sums have the same bits",
        torch.equal(full_tree, distributed_tree),
    )


def _tree_sum(terms: list[torch.Tensor]) -> torch.Tensor:
    """Add neighbours, then the sums of neighbours, until one sum is left."""
    while len(terms) > 1:
        terms = [left + right for left, right in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


def _gradient_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the summed loss of some rows."""
    model.zero_grad()
    model(**batch(tokens)).backward()
    return flat_gradient(model)
