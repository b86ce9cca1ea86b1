"""Run by test_compile_ranks.py on two processes that share a model: its blocks are compiled.

`compile_ranks.py FOLDER` writes what each process found into FOLDER/RANK.json.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from llmtrain import GPTConfig, launch
from llmtrain.data import tokenizer as tok
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.gpt_family import build_gpt
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import full_tensor
from llmtrain.training import compiling

LENGTH = 16


def sharded_engine(accelerator: Accelerator) -> ShardedEngine:
    """Return an engine of a new model in training mode."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=LENGTH, dropout=0.2)
    with torch.device("meta"):
        gpt = build_gpt(config, 300)
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    bundle = gpt.bundle(words, trained_on="nothing", seed=3)
    return ShardedEngine(Ranks(accelerator), place(accelerator, bundle).model.train())


def micro_batch(engine: Engine) -> Batch:
    generator = torch.Generator().manual_seed(engine.ranks.rank)
    ids = torch.randint(1, 250, (2, LENGTH + 1), generator=generator)
    return {"input_ids": ids, "labels": ids, "dropout_keys": torch.arange(2)}


def gradients_of(engine: Engine) -> list[torch.Tensor]:
    engine.accelerator.backward(engine.loss(micro_batch(engine)).loss)
    return [full_tensor(p.grad) for p in engine.model.parameters() if p.grad is not None]


def findings(accelerator: Accelerator) -> dict[str, Any]:
    """Compile the blocks of a model; return what that left behind, and what the model computes."""
    expected = gradients_of(sharded_engine(accelerator))

    engine = sharded_engine(accelerator)
    model = engine.model
    torch.manual_seed(5)
    next_random = torch.rand(3)
    torch.manual_seed(5)
    # The backend goes as far as takes no C++ compiler, which would take most of a minute.
    compiling._compile = functools.partial(compiling._compile, backend="aot_eager")
    compiling.compile_blocks(engine, micro_batch(engine), shapes=1)
    found: dict[str, Any] = {
        "random numbers as before": torch.equal(torch.rand(3), next_random),
        "gradients left": sum(p.grad is not None for p in model.parameters()),
        "all sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }

    gradients = gradients_of(engine)
    apart = [(a - b).abs().max() / b.abs().max() for a, b in zip(gradients, expected, strict=True)]
    found["gradients apart"] = float(torch.stack(apart).max())
    found["compiled blocks"] = sum("forward" in vars(block) for block in model.transformer.h)
    return found


def main() -> None:
    accelerator = start_accelerator()
    found = findings(accelerator)
    Path(sys.argv[1], f"{accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
