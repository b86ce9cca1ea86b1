"""Accumulation: a global batch in several micro-batches, and gradients that are reduced once."""

from itertools import pairwise

import torch

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.stage import batch, claim, counting_sent, gradient, my_rows, show, small_gpt
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import ReplicatedEngine

PROCESSES = 2


def main() -> None:
    """Reduce one gradient in three ways and count the collectives of each."""
    accelerator = start_accelerator(ParallelConfig(ddp_bucket_cap_mb=0.1))
    model = accelerator.prepare(small_gpt())
    engine = ReplicatedEngine(accelerator, model)
    mine = my_rows(accelerator, 16)
    whole = [batch(mine)]
    split = [batch(share) for share in mine.chunk(4)]
    totals = engine.count(split)

    found = []
    forwards: list[int] = []  # buckets that were sent before each forward pass
    with counting_sent(engine) as sent:
        model.register_forward_pre_hook(lambda *_: forwards.append(len(sent)))
        for name, batches, sync_each_batch in (
            ("8 rows at once", whole, False),
            ("4 times 2 rows, under no_sync but for the last", split, False),
            ("4 times 2 rows, reduced each time", split, True),
        ):
            engine.sync_each_batch = sync_each_batch
            engine.forward_backward(batches, totals.denominator)
            model.zero_grad()  # DDP settles its buckets in the first pass
            forwards.clear()
            engine.forward_backward(batches, totals.denominator)
            counts = [after - before for before, after in pairwise([*forwards, len(sent)])]
            found.append(gradient(model))
            show(f"{name}: collectives in each micro-batch {counts}")
            *others, last = counts
            assert last > 0
            assert all(count > 0 if sync_each_batch else count == 0 for count in others)
            model.zero_grad()
    claim(
        "the gradients are the same in all three",
        all(torch.allclose(found[0], g, atol=1e-6) for g in found),
    )
