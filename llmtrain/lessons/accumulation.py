"""Accumulation: a step in several micro-batches, reduced once."""

import random
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain import ParallelConfig
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    BLOCK,
    Messages,
    Training,
    batch,
    claim,
    compare,
    expect,
    flat_gradient,
    rows,
    show,
    small_gpt,
)


def main() -> None:
    """Reduce one gradient in three ways, and count the collectives of each."""
    accelerator = start_accelerator(ParallelConfig(ddp_bucket_cap_mb=0.1, threads=1))
    training = Training(accelerator, small_gpt())
    training.accumulate([batch(rows(8))])  # DDP arranges its buckets in the first pass
    training.model.zero_grad()

    for name, size, sync_each_batch in (
        ("8 rows at once", 16, False),
        ("4 times 2 rows, all but the last under no_sync", 4, False),
        ("4 times 2 rows, reduced each time", 4, True),
    ):
        training.engine.sync_each_batch = sync_each_batch
        counts = _check_step(
            lambda _, batches, tokens: training.accumulate(batches),
            training.model,
            torch.split(rows(16), size),
            sync_each_batch,
        )
        show(f"{name}: collectives in each micro-batch {counts}")
    claim("the gradients are the same in all three", holds=True)


def check(accumulate: Callable[..., object], processes: int, seed: int) -> None:
    """Make steps with random micro-batches; see :func:`_check_step`."""
    draw = random.Random(seed)
    model = DistributedDataParallel(small_gpt())
    for sizes in ([1, 3, 2], [2, 1]):
        parts = [rows(size * processes, step=draw.randrange(2**31)) for size in sizes]
        _check_step(accumulate, model, parts)


def _check_step(
    accumulate: Callable[..., object],
    model: nn.Module,
    parts: Sequence[torch.Tensor],
    sync_each_batch: bool = False,
) -> list[int]:
    """Compare the gradient of a step with that of one pass without DDP.

    Args:
        accumulate: leaves the gradient of the mean loss in ``.grad``, given the model, this rank's
            micro-batches, and the number of target tokens in those of all ranks.
        model: the model.
        parts: the rows of each micro-batch, over all ranks.
        sync_each_batch: whether each micro-batch should be reduced, instead of the last one.

    Returns:
        The number of buckets that were reduced in each micro-batch.
    """
    processes = dist.get_world_size()
    batches = [batch(part.chunk(processes)[dist.get_rank()]) for part in parts]
    tokens = BLOCK * sum(map(len, parts))
    reference = small_gpt()
    reference(**batch(torch.cat([*parts]))).backward()
    total = flat_gradient(reference)
    mean = total / tokens

    starts: list[int] = []
    with Messages() as messages:
        names = messages.collectives
        hook = model.register_forward_pre_hook(lambda *_: starts.append(len(names)))
        accumulate(model, batches, tokens)
    hook.remove()
    expect(len(starts) == len(batches), "passes", got=len(starts), expected=len(batches))
    ends = [*starts[1:], len(names)]
    counts = [names[start:end].count("allreduce") for start, end in zip(starts, ends, strict=True)]
    is_reduced = [count > 0 for count in counts]
    is_right = is_reduced == [sync_each_batch] * (len(batches) - 1) + [True]
    symptoms = {0: "never", len(batches): "each"}
    expect(is_right, symptoms.get(sum(is_reduced), "which"), counts=counts)
    gradient = flat_gradient(model)
    compare(gradient, mean, averaged=[mean / processes], undivided=[total, total / processes])
    model.zero_grad()
    return counts
