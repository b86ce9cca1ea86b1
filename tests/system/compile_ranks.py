"""Run by test_compile_ranks.py on two processes that share a model: whether its blocks are compiled.

`compile_ranks.py FOLDER CASE...` writes what each process found into FOLDER/RANK.json.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from llmtrain import GPTConfig, launch
from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.models.gpt_family import build_gpt
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import ShardedEngine
from llmtrain.parallel.placement import place
from llmtrain.parallel.shards import full_tensor
from llmtrain.training import compiling
from llmtrain.types import Batch

LENGTH = 16
own_compile = torch.compile


def fails_at_once(forward: Callable[..., Any], **_: object) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no C++ compiler here\nand more")

    return fail


def fails_in_backward(forward: Callable[..., Any], **_: object) -> Callable[..., Any]:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("no room for the backward pass")

    def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = forward(*args, **kwargs)
        result.register_hook(fail)
        return result

    return computed


def works(forward: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Compile as far as takes no C++ compiler, which would take most of a minute."""
    return own_compile(forward, **settings | {"backend": "aot_eager"})


COMPILERS = {
    "fails at once": fails_at_once,
    "fails in backward": fails_in_backward,
    "works": works,
}


@contextmanager
def compilers(accelerator: Accelerator, on_rank_1: str) -> Iterator[None]:
    """Let rank 0 have a compiler that works, and rank 1 the one that is named."""
    compiler = COMPILERS[on_rank_1] if accelerator.process_index == 1 else works
    torch.compile = compiler  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = own_compile


def sharded_engine(accelerator: Accelerator) -> ShardedEngine:
    """Return an engine of a new model in training mode."""
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=LENGTH, dropout=0.2)
    with torch.device("meta"):
        gpt = build_gpt(config, 300)
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), LENGTH)
    bundle = gpt.bundle(words, trained_on="nothing", seed=3)
    return ShardedEngine(accelerator, place(accelerator, bundle).model.train())


def micro_batch(engine: Engine) -> Batch:
    generator = torch.Generator().manual_seed(engine.rank)
    ids = torch.randint(1, 250, (2, LENGTH + 1), generator=generator)
    return {"input_ids": ids, "labels": ids, "dropout_keys": torch.arange(2)}


def gradients_of(engine: Engine) -> list[torch.Tensor]:
    engine.accelerator.backward(engine.loss(micro_batch(engine)).loss)
    return [full_tensor(p.grad) for p in engine.model.parameters() if p.grad is not None]


def findings(accelerator: Accelerator, case: str) -> dict[str, Any]:
    """Choose whether to compile; say what was chosen, and what the model computes afterwards."""
    on_rank_1, wanted = case.split(", ")
    expected = gradients_of(sharded_engine(accelerator))

    engine = sharded_engine(accelerator)
    model = engine.model
    torch.manual_seed(5)
    next_random = torch.rand(3)
    torch.manual_seed(5)
    found: dict[str, Any] = {}
    with compilers(accelerator, on_rank_1):
        try:
            found["is compiled"] = compiling.choose_compiled_or_eager(
                engine, micro_batch(engine), passes=10**9, mode=wanted, earlier_choice=None
            )
        except UserError as error:
            found["error"] = str(error)
        found["random numbers as before"] = torch.equal(torch.rand(3), next_random)
        found["gradients left"] = sum(p.grad is not None for p in model.parameters())
        found["all sharded"] = all(isinstance(p, DTensor) for p in model.parameters())

        gradients = gradients_of(engine)
    apart = [(a - b).abs().max() / b.abs().max() for a, b in zip(gradients, expected, strict=True)]
    found["gradients apart"] = float(torch.stack(apart).max())
    found["compiled blocks"] = sum("forward" in vars(block) for block in model.transformer.h)
    return found


def main() -> None:
    folder, *cases = sys.argv[1:]
    accelerator = start_accelerator()
    compiling._MIN_REMAINING_SECONDS = 0.0  # or nothing so small would be compiled
    compiling._MAX_TIME_RATIO = float("inf")
    found = {case: findings(accelerator, case) for case in cases}
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
