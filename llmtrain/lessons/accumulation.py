"""Accumulation: a step in several micro-batches, reduced once."""

from collections.abc import Sequence

import torch
from torch.distributed import GradBucket

from llmtrain import ParallelConfig
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    Batch,
    BucketAverage,
    BucketFuture,
    Training,
    batch,
    claim,
    flat_gradient,
    rank_rows,
    show,
    small_gpt,
)


def main() -> None:
    """Reduce one gradient in three ways, and count the collectives of each."""
    accelerator = start_accelerator(ParallelConfig(ddp_bucket_cap_mb=0.1, threads=1))
    training = Training(accelerator, small_gpt())
    model = training.model

    tokens = rank_rows(accelerator, 16)
    one_batch = [batch(tokens)]
    four_batches = [batch(part) for part in tokens.chunk(4)]

    gradients = []
    for name, batches, sync_each_batch in (
        ("8 rows at once", one_batch, False),
        ("4 times 2 rows, all but the last under no_sync", four_batches, False),
        ("4 times 2 rows, reduced each time", four_batches, True),
    ):
        training.engine.sync_each_batch = sync_each_batch
        _collectives_of_each_batch(training, batches)
        model.zero_grad()  # DDP arranges its buckets in the first pass

        counts = _collectives_of_each_batch(training, batches)
        gradients.append(flat_gradient(model))
        model.zero_grad()

        show(f"{name}: collectives in each micro-batch {counts}")
        *earlier_counts, last_count = counts
        assert last_count > 0
        assert all((count > 0) == sync_each_batch for count in earlier_counts)

    are_same = all(torch.allclose(gradients[0], other, atol=1e-6) for other in gradients)
    claim("the gradients are the same in all three", are_same)


def _collectives_of_each_batch(training: Training, batches: Sequence[Batch]) -> list[int]:
    """Compute a gradient, and return how many buckets are sent in each micro-batch."""
    counts: list[int] = []

    def count(bucket: GradBucket, send: BucketAverage) -> BucketFuture:
        counts[-1] += 1
        return send(bucket)

    hook = training.model.register_forward_pre_hook(lambda *_: counts.append(0))
    with training.engine.watching_buckets(count):
        training.accumulate(batches)
    hook.remove()
    return counts
