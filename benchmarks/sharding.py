"""The memory that saving and loading a sharded model takes, beside accelerate's own gathering of a state dict.

accelerate launch --config_file accelerate_configs/fsdp2.yaml --mixed_precision no -m benchmarks.sharding

The model is a GPT of 24 equal blocks and a small vocabulary, so that its shards are the bulk of it. Peaks are of the
resident memory (Linux: VmHWM), above what the process held before, of the process with the highest.
"""

import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate.utils import broadcast_object_list

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
from tests.memory import resident

CONFIG, VOCABULARY = GPTConfig(n_layer=24, n_head=8, n_embd=512, block_size=32), 512


class WeightsOnly:
    """The writer of a model folder that holds nothing but weights."""

    weights_name = "model.safetensors"
    may_split_weights = True

    def write(self, folder: Path, parameters: int) -> None:
        pass


def main() -> None:
    accelerator = start_accelerator()

    def measure(what: str, action: Callable[[], object]) -> None:
        gc.collect()
        accelerator.wait_for_everyone()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before, began = resident("VmRSS"), time.perf_counter()
        kept = action()
        seconds = time.perf_counter() - began
        peak = torch.tensor(resident("VmHWM") - before, device=accelerator.device)
        highest = int(accelerator.gather(peak[None]).max())
        say("measured", f"{what:<34}{highest / 2**20:8.1f} MiB above, {seconds:6.2f} s")
        del kept

    with torch.device("meta"):
        model = GPT(CONFIG, VOCABULARY)
    bundle = ModelBundle(model, WeightsOnly(), model.initial_weights(0))
    measure("making and filling the model", lambda: place(accelerator, bundle))
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.randint(VOCABULARY, (1, 33))
    engine = engine_for(
        Ranks(accelerator),
        model,
        objective=bundle.objective,
        config=ParallelConfig(),
        accumulation=1,
    )
    train_step(engine, optimizer, [{"input_ids": ids, "labels": ids}], max_grad_norm=1.0)
    here, everywhere = parameter_bytes(model)
    largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    say(
        "weights",
        f"{here / 2**20:.1f} of {everywhere / 2**20:.1f} MiB here, the largest {largest / 2**20:.1f} MiB",
    )

    team = Team.with_new_group()
    folder = Path(broadcast_object_list([tempfile.mkdtemp() if team.is_main else None])[0])
    optimizer_state = OptimizerState(model, optimizer.optimizer)
    state = optimizer_state.flatten()
    for name, in_background in (("saving", False), ("saving in the background", True)):
        saver = Saver(folder / name, WeightsOnly(), keep=2, in_background=in_background)
        saver.join(team, can_write=True)

        def save(saver: Saver = saver) -> None:
            saver.save(
                1,
                model.state_dict(),
                {"optimizer": state},
                {"step": 1},
            )
            saver.wait()

        measure(name, save)
    accelerator.wait_for_everyone()
    saved = folder / "saving" / "step-00000001"
    measure("loading weights", lambda: fill(model.state_dict(), read_tensors(saved / "model")))

    def load() -> None:
        optimizer_state.restore(state.structure, read_tensors(saved / "optimizer"))

    measure("loading the optimizer", load)
    measure("accelerator.get_state_dict", lambda: accelerator.get_state_dict(model))


if __name__ == "__main__":
    launch(main)
