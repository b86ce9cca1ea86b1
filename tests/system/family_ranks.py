"""Run on one and on two ranks by test_finetune.py: a few updates of each family; writes their losses, norms and whether
the ranks hold the same weights."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain import ModelConfig, OptimConfig, launch, load_model, make_optimizer
from llmtrain.data import tokenizer as tok
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.fsdp import place
from llmtrain.training.step import train_step
from tests.families import FAMILIES, OVERRIDES, rows_of

ROWS, LENGTH = 8, 24


def batches(accelerator: Accelerator, step: int) -> list[dict[str, torch.Tensor]]:
    """This process's share of a global batch of packed rows with masked places, as two micro-batches."""
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
    share = ROWS // accelerator.num_processes
    mine = slice(share * accelerator.process_index, share * (accelerator.process_index + 1))
    halves = zip(*(column[mine].chunk(2) for column in columns.values()), strict=True)
    return [dict(zip(columns, parts, strict=True)) for parts in halves]


def readings(accelerator: Accelerator, family: str) -> dict[str, Any]:
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    config = ModelConfig(from_config=family, config_overrides=OVERRIDES, block_size=LENGTH)
    built = load_model(config, None, rows_of(words, packed=True), 3, accelerator.mixed_precision)
    model: Any = place(accelerator, built).model
    for module in model.modules():  # dropout in its modules differs between layouts, in its draws
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = make_optimizer(accelerator, model, OptimConfig(learning_rate=1e-2))
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, norms = [], []
    for step in range(3):
        update = train_step(accelerator, model, optimizer, batches(accelerator, step), 1.0)
        losses.append(float(accelerator.reduce(update.nll, reduction="sum") / update.tokens))
        norms.append(update.grad_norm)
    check_replicas(accelerator, model)
    accelerator.free_memory()
    return {"losses": losses, "norms": norms}


def main() -> None:
    accelerator = start_accelerator()
    found = {family: readings(accelerator, family) for family in FAMILIES}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
