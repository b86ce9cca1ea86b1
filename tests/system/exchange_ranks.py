"""Run on three ranks by test_exchange.py: gradients whose exchange is watched, or compressed.

Rank 0 writes a comparison with the usual exchange as JSON.
"""

import copy
import json
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed import GradBucket

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.ddp import DDPHandler, ReplicatedEngine
from llmtrain.parallel.engine import BucketAverage, BucketFuture, Engine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training.step import train_step
from tests.engines import ScaledRows

VOCABULARY = 300
ROWS_PER_RANK = 2
TARGETS_PER_ROW = 16


def batches_of(engine: Engine, step: int) -> list[Batch]:
    """Return the micro-batch of this rank in a step."""
    generator = torch.Generator().manual_seed(100 * step + engine.ranks.rank)
    shape = (ROWS_PER_RANK, TARGETS_PER_ROW + 1)
    ids = torch.randint(VOCABULARY, shape, generator=generator)
    return [{"input_ids": ids, "labels": ids}]


def new_engine(accelerator: Accelerator) -> tuple[ReplicatedEngine, AcceleratedOptimizer]:
    """Return an engine with a new model of several buckets, and the optimizer."""
    accelerator.ddp_handler = DDPHandler(bucket_mib=0.2)
    config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=TARGETS_PER_ROW)
    model = GPT(config, VOCABULARY, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig(optim="adamw"))
    model, optimizer = accelerator.prepare(model, optimizer)
    return ReplicatedEngine(ranks_of(accelerator), model), optimizer


def flatten(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


# --- watched


def train(engine: Engine, optimizer: AcceleratedOptimizer, steps: range = range(3)) -> torch.Tensor:
    """Make some steps, and return the weights."""
    for step in steps:
        train_step(engine, optimizer, batches_of(engine, step), max_grad_norm=1.0)
    return flatten(engine.model.parameters())


def only_average(bucket: GradBucket, average: BucketAverage) -> BucketFuture:
    return average(bucket)


def has_same_bits_if_watched(accelerator: Accelerator) -> bool:
    """Return whether steps whose exchange is watched make the same weights."""
    engine, optimizer = new_engine(accelerator)
    weights = train(engine, optimizer)

    watched_engine, watched_optimizer = new_engine(accelerator)
    with watched_engine.watching_buckets(only_average):
        weights_if_watched = train(watched_engine, watched_optimizer)

    return torch.equal(weights, weights_if_watched)


# --- counted


def reductions(accelerator: Accelerator) -> list[int]:
    """Return how many buckets are reduced in each micro-batch of three steps of three."""
    engine, optimizer = new_engine(accelerator)
    counts: list[int] = []

    def count_bucket(bucket: GradBucket, average: BucketAverage) -> BucketFuture:
        counts[-1] += 1
        return average(bucket)

    engine.model.register_forward_pre_hook(lambda *_: counts.append(0))
    with engine.watching_buckets(count_bucket):
        for step in range(3):
            train_step(engine, optimizer, 3 * batches_of(engine, step), max_grad_norm=1.0)
    return counts


def reductions_without_no_sync(accelerator: Accelerator) -> list[int]:
    """Plant the bug that the counts must show."""
    with mock.patch.object(accelerator, "no_sync", return_value=nullcontext()):
        return reductions(accelerator)


# --- restarted


def has_same_bits_if_restarted(accelerator: Accelerator, rebuilds_buckets: bool) -> bool:
    """Return whether a restart between two times three steps changes no bit of the weights."""
    engine, optimizer = new_engine(accelerator)
    engine.objective = ScaledRows()
    train(engine, optimizer)
    model_state = copy.deepcopy(engine.unwrapped.state_dict())
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    weights = train(engine, optimizer, range(3, 6))

    resumed, resumed_optimizer = new_engine(accelerator)
    resumed.objective = engine.objective
    resumed.unwrapped.load_state_dict(model_state)
    resumed_optimizer.load_state_dict(optimizer_state)
    if rebuilds_buckets:
        resumed.rebuild_buckets(batches_of(resumed, step=3)[0])
    return torch.equal(train(resumed, resumed_optimizer, range(3, 6)), weights)


def main() -> None:
    accelerator = start_accelerator()
    comparison: dict[str, Any] = {
        "has_same_bits_if_watched": has_same_bits_if_watched(accelerator),
        "has_same_bits_if_restarted": has_same_bits_if_restarted(accelerator, True),
        "has_same_bits_without_rebuilding": has_same_bits_if_restarted(accelerator, False),
        "reductions": reductions(accelerator),
        "reductions_without_no_sync": reductions_without_no_sync(accelerator),
    }
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(comparison))


if __name__ == "__main__":
    launch(main)
