"""Started by tests/memory.py: train with a recipe, and measure each step from the third on.

`memory_ranks.py FOLDER RECIPE FLAG...` writes FOLDER/RANK.json with the fields of MeasuredMemory.
"""

import gc
import itertools
import json
import os
import runpy
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from llmtrain import launch
from llmtrain.interfaces.callback import StepResult
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.shards import local_shard
from llmtrain.training import loop
from tests.memory import MeasuredMemory, resident

# Earlier steps make the states of the optimizer, and let DDP build its buckets.
FIRST_MEASURED_STEP = 3


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the local shards. Tied weights count once."""
    storages = [local_shard(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def frozen_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of a frozen model: its shard, and what FSDP2 keeps gathered."""
    groups = parameter_groups(model)
    if not groups:
        return storage_bytes(model.parameters())
    tensors = []
    for parameter in itertools.chain.from_iterable(group.fsdp_params for group in groups):
        tensors.append(parameter._sharded_param_data)
        tensors += [t for t in (parameter._unsharded_param,) if t.untyped_storage().nbytes()]
    return storage_bytes(tensors)


def gradient_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of all gradients, and of those that FSDP has yet to reduce."""
    gradients = [p.grad for p in model.parameters() if not p.is_meta]
    for group in parameter_groups(model):
        gradients += [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]

    shards = [local_shard(gradient) for gradient in gradients if gradient is not None]
    return sum(shard.numel() * shard.element_size() for shard in shards)


class MeasuringStep:
    """Replaces `train_step`, and measures the memory of the process."""

    def __init__(self) -> None:
        self.train_step = loop.train_step
        self.step = 0
        self.weights = 0
        self.frozen = 0
        self.gradients = 0
        self.optimizer = 0
        self.bytes_added: list[int] = []

    def __call__(self, engine: Engine, optimizer: Any, batches: Any, **settings: Any) -> StepResult:
        self.step += 1
        if self.step < FIRST_MEASURED_STEP:
            return self.train_step(engine, optimizer, batches, **settings)

        model = engine.model
        self.weights = storage_bytes(p for p in model.parameters() if not p.is_meta)
        self.frozen = sum(frozen_bytes(frozen) for frozen in engine._frozen.values())
        states = itertools.chain.from_iterable(
            state.values() for state in optimizer.optimizer.state.values()
        )
        self.optimizer = storage_bytes(state for state in states if torch.is_tensor(state))

        def note_gradients(*_: object) -> None:
            self.gradients = max(self.gradients, gradient_bytes(model))

        hooks = [
            model.register_forward_pre_hook(note_gradients),
            optimizer.optimizer.register_step_pre_hook(note_gradients),
        ]

        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak, by proc(5)
        before = resident("VmRSS")
        result = self.train_step(engine, optimizer, batches, **settings)
        self.bytes_added.append(resident("VmHWM") - before)

        for hook in hooks:
            hook.remove()
        return result

    def as_json(self) -> str:
        # The median, because gloo's threads release a sent message at any time. It may be after the
        # end of its step, or within the next one.
        added = statistics.median(self.bytes_added)
        memory = MeasuredMemory(
            weights=self.weights,
            frozen=self.frozen,
            gradients=self.gradients,
            optimizer=self.optimizer,
            added_by_step=added,
        )
        return json.dumps(memory._asdict())


def main() -> None:
    folder, recipe, *flags = sys.argv[1:]
    measuring_step = MeasuringStep()
    loop.train_step = measuring_step

    runpy.run_path(recipe, run_name="recipe")["main"](flags)

    rank = os.environ.get("RANK", "0")
    Path(folder, f"{rank}.json").write_text(measuring_step.as_json())


if __name__ == "__main__":
    launch(main)
