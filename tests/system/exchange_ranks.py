"""Run on three ranks by test_exchange.py: gradients that are watched, and compressed.

It writes what it finds as JSON.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed import GradBucket

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import StepTotals
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.collectives import BucketAverage, BucketFuture
from llmtrain.parallel.ddp import DDPHandler, ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step


def batches_of(engine: Engine, step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * step + engine.ranks.rank)
    ids = torch.randint(300, (2, 17), generator=generator)
    return [{"input_ids": ids, "labels": ids}]


def fresh(accelerator: Accelerator, hook: str = "none") -> tuple[ReplicatedEngine, Any]:
    """Return an engine of a new model, and the optimizer."""
    accelerator.ddp_handler = DDPHandler(bucket_mib=0.2)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16), 300, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig(optim="adamw"))
    model, optimizer = accelerator.prepare(model, optimizer)
    return ReplicatedEngine(Ranks(accelerator), model, comm_hook=hook), optimizer


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def weights_after(accelerator: Accelerator, watched: bool) -> torch.Tensor:
    """Return the weights after a few steps."""
    engine, optimizer = fresh(accelerator)

    def only_average(bucket: GradBucket, average: BucketAverage, sent_bytes: int) -> BucketFuture:
        return average(bucket)

    with engine.watching_buckets(only_average) if watched else contextlib.nullcontext():
        for step in range(3):
            train_step(engine, optimizer, batches_of(engine, step), max_grad_norm=1.0)
    return flat(engine.model.parameters())


def gradient(engine: Engine, step: int) -> torch.Tensor:
    """Return the gradient of one step's rows, the same on each rank; the weights stay."""
    engine.model.zero_grad()
    engine.forward_backward(batches_of(engine, step), StepTotals(torch.tensor([96, 96, 0])))
    return flat(p.grad for p in engine.model.parameters())


def main() -> None:
    accelerator = start_accelerator()
    exact, _ = fresh(accelerator)
    expected = gradient(exact, 0)
    found: dict[str, Any] = {
        "watched": torch.equal(weights_after(accelerator, True), weights_after(accelerator, False))
    }
    for hook in ("bf16", "fp16"):
        compressed, _ = fresh(accelerator, hook)
        found[hook] = float((gradient(compressed, 0) - expected).norm() / expected.norm())
        found[f"{hook} bytes"] = sum(bytes_of(accelerator, hook)) / sum(bytes_of(accelerator))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


def bytes_of(accelerator: Accelerator, hook: str = "none") -> list[int]:
    """Return the bytes of each bucket of one step."""
    engine, _ = fresh(accelerator, hook)
    sent: list[int] = []

    def note_bytes(bucket: GradBucket, average: BucketAverage, sent_bytes: int) -> BucketFuture:
        sent.append(sent_bytes)
        return average(bucket)

    with engine.watching_buckets(note_bytes):
        gradient(engine, 0)
    return sent


if __name__ == "__main__":
    launch(main)
