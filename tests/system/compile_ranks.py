"""Started by test_compile_ranks.py on two ranks that share a model: compile its blocks.

`compile_ranks.py FOLDER` writes FOLDER/RANK.json on each rank, with:
    random numbers as before: whether the next random number is that without compiling.
    gradients left: the number of parameters that have a gradient after compiling.
    all sharded: whether all parameters are still sharded.
    compiled blocks: the number of blocks that run compiled code.
    gradient difference: the largest difference from the gradients of an uncompiled model, relative
        to the largest gradient of the parameter.
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
    """Return an engine with a new model in training mode."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=LENGTH, dropout=0.2)
    with torch.device("meta"):
        gpt = build_gpt(config, 300)

    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    bundle = gpt.bundle(tokenizer, trained_on="nothing", seed=3)
    model = place(accelerator, bundle).model.train()
    return ShardedEngine(Ranks(accelerator), model)


def micro_batch(engine: Engine) -> Batch:
    """Return a micro-batch of two rows, which are different on each rank."""
    generator = torch.Generator().manual_seed(engine.ranks.rank)
    ids = torch.randint(1, 250, (2, LENGTH + 1), generator=generator)
    return {"input_ids": ids, "labels": ids, "dropout_keys": torch.arange(2)}


def full_gradients(engine: Engine) -> list[torch.Tensor]:
    """Return the gradients of all parameters, after a forward and a backward pass."""
    engine.accelerator.backward(engine.loss(micro_batch(engine)).loss)
    return [full_tensor(p.grad) for p in engine.model.parameters() if p.grad is not None]


def relative_difference(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient of the parameter."""
    differences = []
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        largest = (gradient - expected_gradient).abs().max()
        differences.append(largest / expected_gradient.abs().max())
    return float(torch.stack(differences).max())


def compile_and_compare(accelerator: Accelerator) -> dict[str, Any]:
    """Compile the blocks of a model, and return the results of this rank."""
    expected_gradients = full_gradients(sharded_engine(accelerator))

    torch.manual_seed(5)
    expected_numbers = torch.rand(3)

    # The backend does everything that needs no C++ compiler, which would take most of a minute.
    compiling._compile = functools.partial(compiling._compile, backend="aot_eager")
    engine = sharded_engine(accelerator)
    model = engine.model
    torch.manual_seed(5)
    compiling.compile_blocks(engine, micro_batch(engine), shapes=1)

    results: dict[str, Any] = {
        "random numbers as before": torch.equal(torch.rand(3), expected_numbers),
        "gradients left": sum(p.grad is not None for p in model.parameters()),
        "all sharded": all(isinstance(p, DTensor) for p in model.parameters()),
    }
    gradients = full_gradients(engine)
    results["gradient difference"] = relative_difference(gradients, expected_gradients)
    results["compiled blocks"] = sum("forward" in vars(block) for block in model.transformer.h)
    return results


def main() -> None:
    accelerator = start_accelerator()
    results = compile_and_compare(accelerator)
    file = Path(sys.argv[1], f"{accelerator.process_index}.json")
    file.write_text(json.dumps(results))


if __name__ == "__main__":
    launch(main)
