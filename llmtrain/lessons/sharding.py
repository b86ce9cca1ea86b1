"""Shards instead of copies: FSDP.

DDP needs the full model on every device. FSDP keeps a shard of every tensor on each device, and
gathers the weights of a block only while it computes that block. Use DDP while the model fits, and
FSDP when it does not.
"""

import os
import random
from collections.abc import Callable

import torch
import torch.distributed as dist

from llmtrain.launching.accelerator import start_accelerator
from llmtrain.lessons.common import (
    BLOCK,
    Messages,
    Training,
    batch,
    claim,
    compare_shard,
    expect,
    random_tensor,
    rank_rows,
    rows,
    shards_of,
    show,
    small_gpt,
)
from llmtrain.parallel.placement import place_sharded
from llmtrain.parallel.ranks import ranks_of


def main() -> None:
    """Compute a gradient with FSDP, and with the same model in one process."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    accelerator = start_accelerator()
    full_model = small_gpt()
    with torch.device("meta"):
        model = small_gpt()
    place_sharded(ranks_of(accelerator), model, model.initial_weights(0))
    training = Training(accelerator, model)
    model_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    rank_bytes = sum(parameter.to_local().nbytes for parameter in training.model.parameters())
    share = rank_bytes / model_bytes
    show(f"this process holds {share:.0%} of the {model_bytes:,} bytes of weights")
    assert rank_bytes < 0.6 * model_bytes

    training.accumulate([batch(rank_rows(accelerator, 8))])
    mean_loss = full_model(**batch(rows(8))) / (8 * BLOCK)
    mean_loss.backward()
    rank = accelerator.process_index
    pairs = zip(training.model.parameters(), full_model.parameters(), strict=True)
    for sharded, full in pairs:
        compare_shard(sharded.grad.to_local(), full.grad, rank, accelerator.num_processes)
    claim("each process has its own rows of the full model's gradient", holds=True)


def check(reduce_scatter: Callable[[torch.Tensor], object], processes: int, seed: int) -> None:
    """Reduce gradients of random sizes, and compare the shards with the mean over all ranks.

    Args:
        reduce_scatter: returns this rank's rows of the mean of a gradient.
        processes: the number of ranks.
        seed: chooses the gradients.
    """
    rank = dist.get_rank()
    rows = processes * random.Random(seed).randint(2, 9)
    for count in (rows, rows + 1, processes - 1):
        gradient = random_tensor(count, 4, seed=seed, rank=rank)
        with Messages() as messages:
            shard = reduce_scatter(gradient.clone())

        total = gradient.clone()
        dist.all_reduce(total)
        own = [*shards_of(gradient, processes), *shards_of(gradient / processes, processes)]
        sums = shards_of(total, processes)
        compare_shard(shard, total / processes, rank, processes, own=own, sum=sums)
        names = messages.collectives
        has_scattered = any("reduce_scatter" in name for name in names)
        expect(has_scattered and "allreduce" not in names, "collective", names=names)
