"""Run on three ranks by test_exchange.py: gradients that are watched, and compressed. Writes what it finds as JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ddp import DDPHandler
from llmtrain.training.step import Accumulation, train_step


def batches(accelerator: Accelerator, step: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(100 * step + accelerator.process_index)
    ids = torch.randint(300, (2, 17), generator=draw)
    return [{"input_ids": ids, "labels": ids}]


def fresh(accelerator: Accelerator, hook: str = "none") -> tuple[Any, Any]:
    accelerator.ddp_handler = DDPHandler(ParallelConfig(ddp_comm_hook=hook, ddp_bucket_cap_mb=0.2))
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=16), 300, seed=1)
    return accelerator.prepare(
        model, make_optimizer(accelerator, model, OptimConfig(optim="adamw"))
    )


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def weights_after(accelerator: Accelerator, watched: bool) -> torch.Tensor:
    model, optimizer = fresh(accelerator)
    if watched:
        accelerator.ddp_handler.watch(model, lambda bucket, send, sent_bytes: send(bucket))
    for step in range(3):
        train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
    return flat(model.parameters())


def gradient(accelerator: Accelerator, model: Any, step: int) -> torch.Tensor:
    """That the processes agree on, of one update's rows; the weights stay."""
    model.zero_grad()
    Accumulation(accelerator, model)(batches(accelerator, step), torch.tensor(96))
    return flat(p.grad for p in model.parameters())


def main() -> None:
    accelerator = start_accelerator()
    whole, _ = fresh(accelerator)
    truth = gradient(accelerator, whole, 0)
    found: dict[str, Any] = {
        "watched": torch.equal(weights_after(accelerator, True), weights_after(accelerator, False))
    }
    for hook in ("bf16", "fp16"):
        half, _ = fresh(accelerator, hook)
        found[hook] = float((gradient(accelerator, half, 0) - truth).norm() / truth.norm())
        found[f"{hook} bytes"] = sum(bytes_of(accelerator, hook)) / sum(bytes_of(accelerator))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


def bytes_of(accelerator: Accelerator, hook: str = "none") -> list[int]:
    """The bytes of each bucket of one step."""
    model, _ = fresh(accelerator, hook)
    sent: list[int] = []

    def watcher(bucket: Any, average: Any, sent_bytes: int) -> Any:
        sent.append(sent_bytes)
        return average(bucket)

    accelerator.ddp_handler.watch(model, watcher)
    gradient(accelerator, model, 0)
    return sent


if __name__ == "__main__":
    launch(main)
