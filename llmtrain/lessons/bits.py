"""Bits: one process and four do not end in the same last digits, unless --bitwise makes them.

Numbers of a computer are rounded after each addition, so the order of additions matters. Four processes add the
gradients of their own rows first, one process those of all, one after the other. With --bitwise the gradients of the
slots of a batch are added as the leaves of one binary tree, of which every process has whole branches.
"""

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, claim, gradient, rows, show, small_gpt
from llmtrain.parallel.bitwise import all_reduce_by_doubling, tree_sum

PROCESSES = 4


def main() -> None:
    """Add the same gradients one after the other, by an all-reduce, and as a tree."""
    a, b, c = torch.tensor([1e8, 1.0, -1e8])
    show(f"1e8 + 1 - 1e8 in float32: {float(a + b + c):g}; 1e8 - 1e8 + 1: {float(a + c + b):g}")

    rank, model = start_accelerator().process_index, small_gpt()
    slots = [_gradient_of(model, tokens) for tokens in rows(16).chunk(8)]
    mine = slots[2 * rank : 2 * rank + 2]

    alone = torch.stack(slots).cumsum(0)[-1]
    together = mine[0] + mine[1]
    dist.all_reduce(together)
    apart = float((alone - together).norm() / alone.norm())
    claim(
        "added one after the other, and by an all-reduce over 4 processes: the same bits",
        apart == 0,
        expected=False,
    )
    claim("they differ by less than 1e-6 of the gradient", apart < 1e-6)
    whole = tree_sum((slot.clone() for slot in slots), len(slots))
    share = tree_sum((slot.clone() for slot in mine), len(mine))
    same = torch.equal(whole, all_reduce_by_doubling(share, rank, PROCESSES))
    claim("added as a tree, by one process and by 4: the same bits", same)


def _gradient_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    model.zero_grad()
    model(**batch(tokens)).backward()
    return gradient(model)
