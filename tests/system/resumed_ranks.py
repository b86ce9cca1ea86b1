"""Run on four ranks by test_resume.py: three steps after three others, with and without a restart.

After one restart DDP's buckets are settled, and after another they are not. It writes whether each
restart ends in the bits of the run that was not restarted.
"""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig, OptimConfig, launch, make_optimizer
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step


def batches_of(engine: Engine, step: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(100 * step + engine.ranks.rank)
    ids = torch.randint(300, (2, 17), generator=generator)
    return [{"input_ids": ids, "labels": ids}]


def fresh(
    accelerator: Accelerator, saved: dict[str, Any] | None = None
) -> tuple[ReplicatedEngine, Any]:
    """Return an engine of a new model, or of a saved one, and the optimizer."""
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=16), 300, seed=1)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    model, optimizer = accelerator.prepare(model, optimizer)
    return ReplicatedEngine(Ranks(accelerator), model), optimizer


def weights_after_steps(engine: Engine, optimizer: Any, first: int) -> torch.Tensor:
    """Make three steps; return all weights."""
    for step in range(first, first + 3):
        train_step(engine, optimizer, batches_of(engine, step), max_grad_norm=1.0)
    return torch.cat([p.detach().flatten() for p in engine.model.parameters()])


def main() -> None:
    accelerator = start_accelerator()
    engine, optimizer = fresh(accelerator)
    weights_after_steps(engine, optimizer, first=0)
    saved = copy.deepcopy(
        {
            "model": engine.unwrapped.state_dict(),
            "optimizer": optimizer.optimizer.state_dict(),
        }
    )
    expected = weights_after_steps(engine, optimizer, first=3)

    same = {}
    for settles in (True, False):
        engine, optimizer = fresh(accelerator, saved)
        if settles:
            engine.rebuild_buckets(batches_of(engine, 3)[0])
        weights = weights_after_steps(engine, optimizer, first=3)
        same["settled" if settles else "not settled"] = torch.equal(weights, expected)
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(same))


if __name__ == "__main__":
    launch(main)
