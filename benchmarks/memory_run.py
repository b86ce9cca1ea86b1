"""Run a recipe, and write what each rank holds in memory: python -m benchmarks.memory_run FOLDER RECIPE FLAG ...

``benchmarks.memory.measure_run`` describes the figures.
"""

import gc
import json
import os
import runpy
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

import llmtrain as lt
from benchmarks.memory import peak_resident_bytes, reset_peak, resident_bytes
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult, Training
from llmtrain.parallel.fsdp import parameter_groups
from llmtrain.parallel.shards import local_shard

# Earlier steps make the state of the optimizer and settle the buckets of DDP.
FIRST_MEASURED_STEP = 3


class MemoryCallback(lt.Callback):
    """Measures the memory of this rank during each step, and writes the figures to a file."""

    fingerprint = None

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rises: list[int] = []
        self.gradient_bytes = 0
        self.handles: list[torch.utils.hooks.RemovableHandle] = []

    def setup(self, training: Training) -> None:
        self.training = training

    def on_step_begin(self, batch: LocalBatch) -> None:
        if self.training.step + 1 < FIRST_MEASURED_STEP:
            return
        model = self.training.model
        optimizer = self.training.optimizer
        self.handles = [
            model.register_forward_pre_hook(self.measure_gradients),
            optimizer.register_step_pre_hook(self.measure_gradients),
        ]
        gc.collect()
        reset_peak()
        self.bytes_before = resident_bytes()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step < FIRST_MEASURED_STEP:
            return
        self.rises.append(peak_resident_bytes() - self.bytes_before)
        for handle in self.handles:
            handle.remove()

    def on_train_end(self) -> None:
        figures = {
            "weights": weight_bytes(self.training.model),
            "gradients": self.gradient_bytes,
            "optimizer": state_bytes(self.training.optimizer),
            # gloo's threads may free what they sent one step later, so single steps differ.
            "rise": statistics.median(self.rises),
        }
        self.file.write_text(json.dumps(figures))

    def measure_gradients(self, *_: object) -> None:
        """Keep the largest size of the gradients so far."""
        now = gradient_bytes(self.training.model)
        self.gradient_bytes = max(self.gradient_bytes, now)


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's weights. Tied weights count once."""
    parameters = [parameter for parameter in model.parameters() if not parameter.is_meta]
    by_address = {local_shard(p).untyped_storage().data_ptr(): p for p in parameters}
    return storage_bytes(by_address.values())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's optimizer state."""
    total = 0
    for state in optimizer.state.values():
        tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
        total += storage_bytes(tensors)
    return total


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of this rank's gradients, with those that FSDP has yet to reduce."""
    gradients = [parameter.grad for parameter in model.parameters()]
    for group in parameter_groups(model):
        gradients += [parameter.unsharded_accumulated_grad for parameter in group.fsdp_params]

    shards = [local_shard(gradient) for gradient in gradients if gradient is not None]
    return sum(shard.numel() * shard.element_size() for shard in shards)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(local_shard(tensor).untyped_storage().nbytes() for tensor in tensors)


def main() -> None:
    folder, recipe_file, *recipe_flags = sys.argv[1:]
    rank = os.environ.get("RANK", "0")
    callback = MemoryCallback(Path(folder) / f"rank-{rank}.json")

    recipe = runpy.run_path(recipe_file, run_name="recipe")
    settings = lt.parse(recipe["DEFAULTS"], recipe_flags)
    rows = recipe["tokenized"](settings)
    lt.fit(settings, rows, recipe["build"], callbacks=[callback])


if __name__ == "__main__":
    lt.launch(main)
