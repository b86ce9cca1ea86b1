"""The memory to save and load a sharded model, against Accelerate's gathering of its state dict.

The model is a GPT with 24 equal blocks and a small vocabulary, so most of it is in its shards. Each
line is the peak of the resident memory above the memory before, on the process with the highest.

Repeat it on Linux with

    accelerate launch --config_file accelerate_configs/fsdp2.yaml --mixed_precision no \
        -m benchmarks.sharding

It writes no file.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from benchmarks.memory import peak_resident_bytes, reset_peak, resident_bytes
from llmtrain import GPT, GPTConfig, ModelBundle, OptimConfig, make_optimizer
from llmtrain.console import say
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.placement import parameter_bytes, place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import fill
from llmtrain.parallel.team import Team
from llmtrain.record.saver import Saver
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.step import train_step

MIB = 2**20
VOCABULARY = 512
MODEL = GPTConfig(n_layer=24, n_head=8, n_embd=512, block_size=32)


class WeightsOnly:
    """Writes a model folder that has nothing but weights."""

    weights_name = "model.safetensors"
    may_split_weights = True

    def write(self, folder: Path, parameters: int) -> None:
        pass


def main() -> None:
    accelerator = start_accelerator()
    measure = partial(print_cost, accelerator)

    with torch.device("meta"):
        model = GPT(MODEL, VOCABULARY)
    bundle = ModelBundle(model, WeightsOnly(), model.initial_weights(0))
    measure("making and filling the model", lambda: place(accelerator, bundle))

    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    make_one_step(accelerator, bundle, model, optimizer)
    print_weights(model)

    team = Team.with_new_group()
    [folder_name] = broadcast_object_list([tempfile.mkdtemp() if team.is_main else None])
    folder = Path(folder_name)
    optimizer_state = OptimizerState(model, optimizer.optimizer)
    state = optimizer_state.flatten()

    def save(saver: Saver) -> None:
        saver.save(1, model.state_dict(), {"optimizer": state}, {"step": 1})
        saver.wait()

    for name, in_background in (("saving", False), ("saving in the background", True)):
        saver = Saver(folder / name, WeightsOnly(), keep=2, in_background=in_background)
        saver.join(team, can_write=True)
        measure(name, partial(save, saver))
    accelerator.wait_for_everyone()

    checkpoint = folder / "saving" / "step-00000001"

    def load_weights() -> None:
        fill(model.state_dict(), read_tensors(checkpoint / "model"))

    def load_optimizer() -> None:
        optimizer_state.restore(state.structure, read_tensors(checkpoint / "optimizer"))

    measure("loading weights", load_weights)
    measure("loading the optimizer", load_optimizer)
    measure("accelerator.get_state_dict", lambda: accelerator.get_state_dict(model))


def print_cost(accelerator: Accelerator, name: str, action: Callable[[], object]) -> None:
    """Print the peak memory and the seconds of an action, which all processes take together."""
    gc.collect()
    accelerator.wait_for_everyone()
    reset_peak()
    bytes_before = resident_bytes()
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    peak = torch.tensor([peak_resident_bytes() - bytes_before], device=accelerator.device)
    highest = int(accelerator.gather(peak).max())
    say("measured", f"{name:<34}{highest / MIB:8.1f} MiB above, {seconds:6.2f} s")
    del result  # it is alive until here, so that its memory is measured


def make_one_step(
    accelerator: Accelerator,
    bundle: ModelBundle,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Make a step, so that the optimizer has a state."""
    engine = engine_for(
        Ranks(accelerator),
        model,
        objective=bundle.objective,
        config=ParallelConfig(),
        accumulation=1,
    )
    ids = torch.randint(VOCABULARY, (1, MODEL.block_size + 1))
    train_step(engine, optimizer, [{"input_ids": ids, "labels": ids}], max_grad_norm=1.0)


def print_weights(model: torch.nn.Module) -> None:
    """Print the size of the weights on this rank and on all ranks."""
    on_this_rank, on_all_ranks = parameter_bytes(model)
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    say(
        "weights",
        f"{on_this_rank / MIB:.1f} of {on_all_ranks / MIB:.1f} MiB on this rank, "
        f"the largest {largest / MIB:.1f} MiB",
    )


if __name__ == "__main__":
    launch(main)
