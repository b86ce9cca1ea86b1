"""Run by test_plan.py: a recipe, and what its updates from the third on hold. `memory_ranks.py FOUND RECIPE FLAG...`"""

import gc
import json
import os
import runpy
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from llmtrain import launch
from llmtrain.interfaces.callback import StepResult
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.shards import local_shard
from llmtrain.training import loop
from tests.memory import resident

FIRST = 3  # those before make optimizer state, and settle DDP's buckets
own_step = loop.train_step
calls: list[int] = []
found: dict[str, float] = {}
rises: list[int] = []


def bytes_of(tensors: Any) -> int:
    return sum(local_shard(tensor).untyped_storage().nbytes() for tensor in tensors)


def watched(engine: Engine, optimizer: Any, batches: Any, **settings: Any) -> StepResult:
    """Make a step, and note what it holds."""
    calls.append(1)
    if len(calls) < FIRST:
        return own_step(engine, optimizer, batches, **settings)
    model = engine.model
    parameters = [p for p in model.parameters() if not p.is_meta]
    storages = {
        local_shard(p).untyped_storage().data_ptr(): p for p in parameters
    }  # what is tied, once
    found["weights"] = bytes_of(storages.values())
    states = [
        v
        for state in optimizer.optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor)
    ]
    found["optimizer"] = bytes_of(states)
    found.setdefault("gradients", 0)
    before_optimizer = optimizer.optimizer.register_step_pre_hook(
        lambda *_: see_gradients(model, parameters)
    )
    passes = model.register_forward_pre_hook(lambda *_: see_gradients(model, parameters))
    gc.collect()
    Path("/proc/self/clear_refs").write_text(
        "5"
    )  # the most that was ever resident is from here on, proc(5)
    before = resident("VmRSS")
    result = own_step(engine, optimizer, batches, **settings)
    # The median step: gloo's threads release what they sent when they come to it, which may be
    # after one step's end (its memory then counts as held before) or within the next.
    rises.append(resident("VmHWM") - before)
    found["most"] = statistics.median(rises)
    before_optimizer.remove()
    passes.remove()
    return result


def see_gradients(model: Any, parameters: list[Any]) -> None:
    """The most that there were: FSDP keeps those that are not yet reduced to itself."""
    kept = [p.grad for p in parameters if p.grad is not None]
    now = sum(local_shard(grad).numel() * grad.element_size() for grad in kept)
    for group in parameter_groups(model):
        for one in group.fsdp_params:
            grad = one.unsharded_accumulated_grad
            now += 0 if grad is None else local_shard(grad).numel() * grad.element_size()
    found["gradients"] = max(found["gradients"], now)


def main() -> None:
    where, recipe, *flags = sys.argv[1:]
    loop.train_step = watched
    runpy.run_path(recipe, run_name="recipe")["main"](flags)
    rank = os.environ.get("RANK", "0")
    Path(where, f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
