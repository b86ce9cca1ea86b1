"""Bits: one process and four differ in the last digits, unless --bitwise is set.

A computer rounds after each addition, so the order of additions matters. Four processes first add
the gradients of their own rows. One process adds those of all rows, one after the other. With
--bitwise the gradients of a batch's slots are added as the leaves of one binary tree, and every
process adds complete branches of it. This lesson writes that tree in a few lines of torch.
"""

import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from llmtrain.errors import short_repr
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import batch, claim, expect, flat_gradient, rows, show, small_gpt
from llmtrain.models.gpt import KeyedDropout
from llmtrain.seeds import seed_of


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

    check(_keyed_masks, accelerator.num_processes, seed=0)
    claim("on one process and on 4, dropout drops the same elements of each row", holds=True)


def _keyed_masks(seed: int, step: int, slots: list[int], size: int) -> torch.Tensor:
    """Return the masks of the package's dropout."""
    keys = torch.tensor([seed_of(seed, step, slot) for slot in slots])
    return KeyedDropout(0.5).forward(torch.ones(len(slots), size), keys) > 0


def check(masks: Callable[..., torch.Tensor], processes: int, seed: int) -> None:
    """Compare the masks of all ranks with those of one process, of other steps and other seeds.

    Args:
        masks: returns which half of the elements is kept, bool [slots, size], given the seed of
            the run, the number of the step, the slots of some rows in the global batch, and the
            size of a row.
        processes: the number of ranks.
        seed: chooses the arguments.
    """
    run_seed, step = random.Random(seed).choices(range(20, 900), k=2)
    size = 1000 + step
    slots = [*range(2 * processes)]
    first = 2 * dist.get_rank()

    whole = masks(run_seed, step, slots, size)
    is_mask = isinstance(whole, torch.Tensor) and whole.dtype == torch.bool
    expect(is_mask and whole.shape == (len(slots), size), "mask", got=short_repr(whole))
    expect(torch.equal(whole, masks(run_seed, step, slots, size)), "resume")

    of_first_rank = whole.byte()
    dist.broadcast(of_first_rank, src=0)
    part = masks(run_seed, step, slots[first : first + 2], size)
    expect(first == 0 or not torch.equal(part.byte(), of_first_rank[:2]), "ranks")
    expect(torch.equal(part.byte(), of_first_rank[first : first + 2]), "layout")

    share = float(whole.float().mean())
    expect(0.45 < share < 0.55, "half", share=f"{share:.0%}")

    # With these numbers, sums and digits written one after the other are often the same.
    pairs = [(0, step), (0, step + 1), (1, step), (1, step - 10), (0, 1), (0, 11)]
    slots.append(10)
    sources: dict[bytes, str] = {}
    for more, other_step in pairs:
        for slot, mask in zip(slots, masks(run_seed + more, other_step, slots, size), strict=True):
            source = f"seed {run_seed + more}, step {other_step}, slot {slot}"
            first_source = sources.setdefault(mask.numpy().tobytes(), source)
            expect(first_source == source, "repeated", first=first_source, second=source)


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
