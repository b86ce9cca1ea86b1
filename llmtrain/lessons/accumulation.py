"""Accumulation: a global batch in several micro-batches, and gradients that are reduced once."""

from itertools import pairwise

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, claim, count_sent, gradient, my_rows, show, small_gpt
from llmtrain.parallel.config import ParallelConfig
from llmtrain.training.step import Accumulation, count_tokens

PROCESSES = 2


def main() -> None:
    """Reduce one gradient in three ways and count the collectives of each."""
    accelerator = start_accelerator(ParallelConfig(ddp_bucket_cap_mb=0.1))
    model = accelerator.prepare(small_gpt())
    sent = count_sent(accelerator, model)
    forwards: list[int] = []  # buckets that were sent before each forward pass
    model.register_forward_pre_hook(lambda *_: forwards.append(len(sent)))
    mine = my_rows(accelerator, 16)
    whole, window = [batch(mine)], [batch(share) for share in mine.chunk(4)]
    tokens, _ = count_tokens(accelerator, window, False)

    found = []
    once, each = Accumulation(accelerator, model, "once"), Accumulation(accelerator, model, "each")
    for name, batches, forward_backward in (
        ("8 rows at once", whole, once),
        ("4 times 2 rows, under no_sync but for the last", window, once),
        ("4 times 2 rows, reduced each time", window, each),
    ):
        forward_backward(batches, tokens)
        model.zero_grad()  # DDP settles its buckets in the first pass
        forwards.clear()
        forward_backward(batches, tokens)
        counts = [after - before for before, after in pairwise([*forwards, len(sent)])]
        found.append(gradient(model))
        show(f"{name}: collectives in each micro-batch {counts}")
        *others, last = counts
        assert last > 0
        assert all(count > 0 if forward_backward is each else count == 0 for count in others)
        model.zero_grad()
    claim(
        "the gradients are the same in all three",
        all(torch.allclose(found[0], g, atol=1e-6) for g in found),
    )
