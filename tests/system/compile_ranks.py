"""Started by test_compile_ranks.py on two ranks that share a model: compile its blocks, and check them."""

import functools

import torch
from accelerate import Accelerator
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from llmtrain import launch
from llmtrain.interfaces.batches import Batch
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training import compiling
from tests.system.sharded_ranks import LENGTH, Case, build_own_model


def sharded_engine(accelerator: Accelerator) -> ShardedEngine:
    """Return an engine with a new model in training mode."""
    bundle = build_own_model(Case.parse("gpt/1"), accelerator, dropout=0.2)
    return ShardedEngine(ranks_of(accelerator), bundle.model.train())


def micro_batch(engine: Engine) -> Batch:
    """Return a micro-batch of two rows, which are different on each rank."""
    generator = torch.Generator().manual_seed(engine.ranks.rank)
    ids = torch.randint(1, 250, (2, LENGTH + 1), generator=generator)
    return {"input_ids": ids, "labels": ids, "dropout_keys": torch.arange(2)}


def full_gradients(engine: Engine) -> list[torch.Tensor]:
    """Return the gradients of all parameters, after a forward and a backward pass."""
    engine.accelerator.backward(engine.loss(micro_batch(engine)).loss)
    gradients = [p.grad for p in engine.model.parameters() if p.grad is not None]
    return [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]


def relative_difference(gradients: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference, relative to the largest gradient of the parameter."""
    differences = []
    for gradient, expected_gradient in zip(gradients, expected, strict=True):
        largest = (gradient - expected_gradient).abs().max()
        differences.append(largest / expected_gradient.abs().max())
    return float(torch.stack(differences).max())


def main() -> None:
    accelerator = start_accelerator()
    expected_gradients = full_gradients(sharded_engine(accelerator))
    torch.manual_seed(5)
    expected_numbers = torch.rand(3)

    # The backend does everything that needs no C++ compiler, which would take most of a minute.
    compiling._compile = functools.partial(compiling._compile, backend="aot_eager")
    engine = sharded_engine(accelerator)
    model = engine.model
    torch.manual_seed(5)
    compiling.compile_blocks(engine, micro_batch(engine), shapes=1)

    assert torch.equal(torch.rand(3), expected_numbers), "random numbers as before"
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    graphs = counters["stats"]["unique_graphs"]
    assert relative_difference(full_gradients(engine), expected_gradients) < 1e-5
    assert counters["stats"]["unique_graphs"] == graphs > 0, "nothing more is compiled"
    assert ["forward" in vars(block) for block in model.transformer.h] == [True, True]


if __name__ == "__main__":
    launch(main)
