"""Run on four ranks by test_resume.py: three updates after three others, without a break, after a restart with its
buckets settled, and after one without; writes whether each restart ends in the bits of the unbroken run."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.ddp import settle_buckets
from llmtrain.training.step import train_step


def batches(accelerator: Accelerator, step: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + accelerator.process_index)
    ids = torch.randint(300, (2, 17), generator=generator)
    return [{"input_ids": ids, "labels": ids}]


def fresh(accelerator: Accelerator, saved: dict[str, Any] | None = None) -> tuple[Any, Any]:
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=16), 300, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    return accelerator.prepare(model, optimizer)


def main() -> None:
    accelerator = start_accelerator()
    model, optimizer = fresh(accelerator)

    def updates(first: int) -> torch.Tensor:
        for step in range(first, first + 3):
            train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    updates(0)
    plain = accelerator.unwrap_model(model)
    saved = {"model": {k: v.clone() for k, v in plain.state_dict().items()}}
    state = optimizer.optimizer.state_dict()
    state["state"] = {
        i: {k: v.clone() for k, v in entry.items()} for i, entry in state["state"].items()
    }
    saved["optimizer"] = state
    unbroken = updates(3)
    same = {}
    for settled in (True, False):
        model, optimizer = fresh(accelerator, saved)
        if settled:
            settle_buckets(accelerator, model, batches(accelerator, 3)[0])
        same["settled" if settled else "not settled"] = torch.equal(updates(3), unbroken)
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(same))


if __name__ == "__main__":
    launch(main)
