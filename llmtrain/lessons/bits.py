"""Bits: why one process and four do not end in the same last digits, and how --bitwise makes them.

Numbers of a computer are rounded after each addition, so the order of additions matters. Four processes add the
gradients of their own rows first, one process those of all, one after the other. With --bitwise the gradients of the
slots of a batch are added as the leaves of one binary tree, of which every process has whole branches.
"""

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.launch.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, digest, gradients, rows, show, small_gpt
from llmtrain.parallel.bitwise import TreeSum, all_reduce_by_doubling

PROCESSES = 4
SLOTS = 8


def main() -> None:
    a, b, c = torch.tensor([1e8, 1.0, -1e8])
    show(f"1e8 + 1 - 1e8 in float32: {float(a + b + c):g}; 1e8 - 1e8 + 1: {float(a + c + b):g}")

    accelerator = start_accelerator()
    rank, model = accelerator.process_index, small_gpt()
    slots = [gradient_of(model, part) for part in rows(16).split(2)]
    mine = slots[2 * rank : 2 * rank + 2]

    alone = torch.stack(slots).cumsum(0)[-1]
    together = mine[0] + mine[1]
    dist.all_reduce(together)
    apart = float((alone - together).norm() / alone.norm())
    show(f"one after the other, and by an all-reduce over 4 processes: the same bits: {torch.equal(alone, together)}")
    show(f"they differ by less than 1e-6 of the gradient: {apart < 1e-6}")
    assert not torch.equal(alone, together)
    assert apart < 1e-6

    trees = []
    for own in (slots, mine):
        tree = TreeSum()
        for slot in own:
            tree.add(slot.clone())
        trees.append(tree.total())
    all_reduce_by_doubling(trees[1])
    show(f"as a tree, alone and over 4 processes: the same bits: {digest(trees[:1]) == digest(trees[1:])}")
    assert torch.equal(*trees)


def gradient_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Of the sum over these rows, as one vector."""
    model.zero_grad()
    model(**batch(tokens)).backward()
    return torch.cat([gradient.flatten() for gradient in gradients(model)])
