"""Run on one and on two ranks by test_finetune.py: a few steps of each family.

It writes their losses and norms, and fails if the ranks do not hold the same weights.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain import ModelConfig, OptimConfig, launch, load_model, make_optimizer
from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step
from tests.engines import split
from tests.families import FAMILIES, OVERRIDES, rows_of

ROWS = 8
LENGTH = 24


def batches_of(engine: Engine, step: int) -> list[Batch]:
    """Return this rank's share of a global batch of packed rows, as two micro-batches."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    trained = (
        torch.rand(ROWS, LENGTH, generator=generator) < torch.linspace(0.1, 0.9, ROWS)[:, None]
    )
    columns = {
        "input_ids": ids,
        "labels": torch.where(trained, ids, -100),
        "position_ids": torch.cat([torch.arange(10), torch.arange(LENGTH - 10)]).expand(ROWS, -1),
    }
    share = ROWS // engine.ranks.world_size
    local_rows = split(columns, share)[engine.ranks.rank]
    return split(local_rows, share // 2)


def measured(accelerator: Accelerator, family: str) -> dict[str, Any]:
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    config = ModelConfig(from_config=family, config_overrides=OVERRIDES, max_length=LENGTH)
    rows = rows_of(words, packed=True)
    bundle = place(accelerator, load_model(config, None, rows, 3, accelerator.mixed_precision))
    model: Any = bundle.model
    for module in model.modules():  # dropout in its modules differs between layouts, in its draws
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = make_optimizer(accelerator, model, OptimConfig(learning_rate=1e-2))
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = ReplicatedEngine(Ranks(accelerator), model, objective=bundle.objective)
    losses = []
    norms = []
    for step in range(3):
        result = train_step(engine, optimizer, batches_of(engine, step), max_grad_norm=1.0)
        losses.append(float(engine.ranks.sum_over_ranks(result.sums.loss) / result.denominator))
        norms.append(result.grad_norm)
    check_replicas(Ranks(accelerator), model)
    accelerator.free_memory()
    return {"losses": losses, "norms": norms}


def main() -> None:
    accelerator = start_accelerator()
    found = {family: measured(accelerator, family) for family in FAMILIES}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
