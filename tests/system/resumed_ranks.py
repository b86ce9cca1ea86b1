"""Started by test_resume.py on four ranks: restart a run between two times three steps.

`resumed_ranks.py FILE` writes whether the weights then have the bits of a run without a restart: if
DDP's buckets are rebuilt after the restart ("rebuilt"), and if they are not ("not rebuilt").
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
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step


class Training:
    """A model in training, from the beginning or from saved states."""

    def __init__(self, accelerator: Accelerator, saved: dict[str, Any] | None = None) -> None:
        config = GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=16)
        model = GPT(config, 300, seed=1)
        optimizer = make_optimizer(accelerator, model, OptimConfig())
        if saved is not None:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        prepared, self.optimizer = accelerator.prepare(model, optimizer)
        self.engine = ReplicatedEngine(Ranks(accelerator), prepared)

    def batch(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(100 * step + self.engine.ranks.rank)
        token_ids = torch.randint(300, (2, 17), generator=generator)
        return {"input_ids": token_ids, "labels": token_ids}

    def make_steps(self, steps: range) -> None:
        for step in steps:
            train_step(self.engine, self.optimizer, [self.batch(step)], max_grad_norm=1.0)

    def states(self) -> dict[str, Any]:
        return {
            "model": copy.deepcopy(self.engine.unwrapped.state_dict()),
            "optimizer": copy.deepcopy(self.optimizer.optimizer.state_dict()),
        }

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.engine.model.parameters()])


def main() -> None:
    accelerator = start_accelerator()
    uninterrupted = Training(accelerator)
    uninterrupted.make_steps(range(3))
    saved = uninterrupted.states()
    uninterrupted.make_steps(range(3, 6))

    has_same_bits = {}
    for name in ("rebuilt", "not rebuilt"):
        resumed = Training(accelerator, saved)
        if name == "rebuilt":
            resumed.engine.rebuild_buckets(resumed.batch(3))
        resumed.make_steps(range(3, 6))
        has_same_bits[name] = torch.equal(resumed.weights(), uninterrupted.weights())

    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(has_same_bits))


if __name__ == "__main__":
    launch(main)
