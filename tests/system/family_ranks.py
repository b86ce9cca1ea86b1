"""Started by test_finetune.py on one and on two ranks: train a model of each family for three steps.

`family_ranks.py FILE` writes the losses and gradient norms of each family. It fails if the ranks do
not have the same weights.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator

from llmtrain import ModelBundle, ModelConfig, OptimConfig, launch, load_model, make_optimizer
from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.batches import IGNORED, Batch
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
    """Return this rank's share of a global batch, as two micro-batches.

    Each row has two documents, and rows have different numbers of targets.
    """
    generator = torch.Generator().manual_seed(step)
    token_ids = torch.randint(1, 250, (ROWS, LENGTH), generator=generator)
    target_shares = torch.linspace(0.1, 0.9, ROWS)[:, None]
    is_target = torch.rand(ROWS, LENGTH, generator=generator) < target_shares
    positions = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])
    global_batch = {
        "input_ids": token_ids,
        "labels": torch.where(is_target, token_ids, IGNORED),
        "position_ids": positions.expand(ROWS, -1),
    }

    rows_per_rank = ROWS // engine.ranks.world_size
    local_batch = split(global_batch, rows_per_rank)[engine.ranks.rank]
    return split(local_batch, rows_per_rank // 2)


def build_model(accelerator: Accelerator, family: str) -> ModelBundle:
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    rows = rows_of(tokenizer, packed=True)
    config = ModelConfig(from_config=family, config_overrides=OVERRIDES, max_length=LENGTH)
    bundle = place(accelerator, load_model(config, None, rows, 3, accelerator.mixed_precision))
    # The random numbers of these modules depend on the layout.
    for module in bundle.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return bundle


def train(accelerator: Accelerator, family: str) -> dict[str, list[float]]:
    """Return the losses and the gradient norms of three steps."""
    bundle = build_model(accelerator, family)
    optimizer = make_optimizer(accelerator, bundle.model, OptimConfig(learning_rate=1e-2))
    model, optimizer = accelerator.prepare(bundle.model, optimizer)
    engine = ReplicatedEngine(Ranks(accelerator), model, objective=bundle.objective)

    losses = []
    norms = []
    for step in range(3):
        result = train_step(engine, optimizer, batches_of(engine, step), max_grad_norm=1.0)
        loss_sum = engine.ranks.sum_over_ranks(result.sums.loss)
        losses.append(float(loss_sum / result.denominator))
        norms.append(result.grad_norm)

    check_replicas(Ranks(accelerator), model)
    accelerator.free_memory()
    return {"losses": losses, "norms": norms}


def main() -> None:
    accelerator = start_accelerator()
    results = {family: train(accelerator, family) for family in FAMILIES}
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    launch(main)
