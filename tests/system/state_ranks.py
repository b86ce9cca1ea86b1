"""Started by test_states.py on two ranks: check runs whose optimizers keep unusual states.

`state_ranks.py FOLDER` leaves the checkpoints of a run with each optimizer in FOLDER.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from llmtrain import GPT, GPTConfig, ModelBundle, launch
from llmtrain.errors import UserError
from llmtrain.interfaces.part import Part
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.placement import engine_for, move_to_devices
from llmtrain.parallel.ranks import ranks_of
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.record.checkpoint import STRUCTURE, read_file
from llmtrain.record.saver import Saver
from llmtrain.record.tensor_files import read_tensors_on_main
from llmtrain.training.adamw import EightBitAdamW
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run_state import collect_states, flat_part, restore_parts
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step
from tests.odd_optimizer import Odd
from tests.record.checkpoint_files import Files

heavyball = pytest.importorskip("heavyball")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

FLOAT32: Any = SimpleNamespace(mixed_precision="no")
VOCABULARY = 31  # odd, so that shards are uneven


class FullMomentum(torch.optim.Optimizer):
    """Keeps the whole momentum of a sharded weight on each rank, as some kinds of Muon do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                is_sharded = isinstance(p, DTensor)
                grad = p.grad.full_tensor() if is_sharded else p.grad
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(grad))
                momentum.lerp_(grad, 0.1)
                update = momentum
                if is_sharded:
                    update = distribute_tensor(momentum, p.device_mesh, p.placements)
                p.add_(update, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "odd": lambda model: Odd(model.parameters()),
    "odd in bf16": lambda model: Odd(model.bfloat16().parameters()),
    "full momentum": lambda model: FullMomentum(model.parameters(), {"lr": 1e-2}),
    "8-bit adamw": lambda model: EightBitAdamW(model.bfloat16().parameters(), lr=1e-2),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "heavyball soap": lambda model: heavyball.SOAP(model.parameters(), lr=1e-2),
    "heavyball adamw": lambda model: heavyball.AdamW(model.parameters(), lr=1e-2),
    "pytorch_optimizer soap": lambda model: pytorch_optimizer.SOAP(
        model.parameters(), lr=1e-2, precondition_frequency=2
    ),
    "schedule-free": lambda model: pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=1e-2),
    "muon": lambda model: make_optimizer(FLOAT32, model, OptimConfig(optim="muon")),
}
# It counts in an entry of its own in its state_dict.
NOT_RESUMABLE = ["heavyball soap"]
# With sharded parameters, it ends in an error.
ONLY_REPLICATED = ["pytorch_optimizer soap"]
# heavyball before 3.2.1 finds the state of a tensor by its address, which is 0 for every DTensor.
PERHAPS_ONLY_REPLICATED = ["heavyball soap", "heavyball adamw"]


class Average(Part):
    """A part of a run. Its state has tensors, sharded like the weights of a model, and a number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.mean = {name: 2 * p.detach() for name, p in model.named_parameters()}
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        self.step = state["step"]


class Training:
    """A small model in training, with the state of its optimizer and a part."""

    def __init__(self, accelerator: Any, name: str) -> None:
        accelerator.free_memory()  # the accelerator forgets the previous model
        width = 68 if name == "8-bit adamw" else 12  # shorter rows have no moments in 8 bits
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=width, block_size=8), VOCABULARY)
        bundle = ModelBundle(model, Files(), model.initial_weights(1))
        move_to_devices(accelerator.ranks, bundle)
        prepared, self.optimizer = accelerator.prepare(model, OPTIMIZERS[name](model))
        self.engine = engine_for(
            ranks_of(accelerator),
            prepared,
            objective=bundle.objective,
            config=ParallelConfig(),
        )
        self.model = self.engine.unwrapped
        self.state = OptimizerState(self.model, self.optimizer.optimizer)
        self.average = Average(self.model)

    def make_steps(self, steps: range) -> None:
        """Make steps with different rows on each rank and in each step."""
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + self.engine.ranks.rank)
            token_ids = torch.randint(VOCABULARY, (2, 9), generator=generator)
            batch = {"input_ids": token_ids, "labels": token_ids}
            train_step(self.engine, self.optimizer, [batch], max_grad_norm=1.0)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the weights, and the tensors of the optimizer and of the part, by name."""
        weights = {f"model {name}": p for name, p in self.model.named_parameters()}
        average = {f"average {name}": tensor for name, tensor in self.average.mean.items()}
        return {**self.state.flatten().tensors, **weights, **average}


# --- restarts


def layout_and_bits(tensor: torch.Tensor) -> list[Any]:
    """Return all that must be the same after a restart."""
    shard = local_shard(tensor)
    layout = [str(tensor.dtype), [*tensor.shape], str(tensor.device), [*shard.stride()]]
    if isinstance(tensor, DTensor):
        layout.append(str(tensor.placements))
    bits = shard.contiguous().flatten().view(torch.uint8).tolist()
    return [*layout, bits]


def assert_same_states(first: Training, second: Training) -> None:
    first_tensors = first.tensors()
    second_tensors = second.tensors()
    assert first_tensors.keys() == second_tensors.keys()
    for name, tensor in first_tensors.items():
        assert layout_and_bits(tensor) == layout_and_bits(second_tensors[name]), name
    assert first.state.flatten().structure == second.state.flatten().structure


def check_restart(accelerator: Any, name: str, folder: Path) -> None:
    """Make six steps, with and without a restart in the middle. The bits must be the same."""
    uninterrupted = Training(accelerator, name)
    uninterrupted.make_steps(range(3))
    uninterrupted.average = Average(uninterrupted.model)
    uninterrupted.average.step = 3
    saver = save(uninterrupted, folder)
    uninterrupted.make_steps(range(3, 6))
    saver.wait()
    accelerator.wait_for_everyone()

    resumed = Training(accelerator, name)
    restore(resumed, folder / "step-00000003")
    assert resumed.average.step == 3
    resumed.make_steps(range(3, 6))
    assert_same_states(uninterrupted, resumed)


def save(training: Training, folder: Path) -> Saver:
    """Begin to save a checkpoint in the background. The next steps must not change it."""
    ranks = training.engine.ranks
    part = flat_part("Average", training.average)
    states = {"optimizer": training.state.flatten(), "parts/Average": part}
    saver = Saver(folder, Files(), keep=2, in_background=True)
    if ranks.is_sharded:
        saver.join(ranks.with_new_group(), can_write=True)
    if ranks.is_sharded or ranks.is_main:
        saver.save(3, training.model.state_dict(), states, {"step": 3})
    return saver


def restore(training: Training, checkpoint: Path) -> None:
    ranks = training.engine.ranks
    fill(training.model.state_dict(), read_tensors_on_main(checkpoint / "model", ranks))
    tensors = read_tensors_on_main(checkpoint / "optimizer", ranks)
    training.state.restore(read_file(checkpoint / "optimizer" / STRUCTURE), tensors)
    restore_parts({"Average": training.average}, checkpoint, ranks)


def check_restarts(accelerator: Any, folder: Path) -> None:
    is_sharded = ranks_of(accelerator).is_sharded
    for name in OPTIMIZERS:
        error = None
        try:
            check_restart(accelerator, name, folder / name)
        except UserError as raised:
            error = str(raised)
            assert re.match(
                r"the optimizer (SOAP|AdamW) changes heavyball of its state_dict", error
            )
        except RuntimeError as raised:  # of the optimizer itself, which knows no DTensor
            error = str(raised)
            assert is_sharded, error
            assert name in [*ONLY_REPLICATED, *PERHAPS_ONLY_REPLICATED], error
        if not is_sharded or name not in PERHAPS_ONLY_REPLICATED:
            fails = name in NOT_RESUMABLE or (is_sharded and name in ONLY_REPLICATED)
            assert (error is not None) == fails, (name, error)


# --- sharded and full parameters

SHAPES = [(61, 70), (129, 300), (5, 64, 13), (4100,)]


def check_sharded_parameters(accelerator: Any) -> None:
    """Step 8-bit AdamW with sharded and with full parameters. The states must be the same."""
    mesh = accelerator.torch_device_mesh
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(0)

    def random_tensors() -> list[torch.Tensor]:
        return [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]

    def shard_all(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [distribute_tensor(tensor, mesh, placements) for tensor in tensors]

    weights = random_tensors()
    full = [torch.nn.Parameter(weight) for weight in weights]
    sharded = [torch.nn.Parameter(weight) for weight in shard_all(weights)]
    full_optimizer = EightBitAdamW(full, lr=1e-2)
    sharded_optimizer = EightBitAdamW(sharded, lr=1e-2)
    for _ in range(4):
        gradients = random_tensors()
        set_gradients(full, gradients)
        set_gradients(sharded, shard_all(gradients))
        full_optimizer.step()
        sharded_optimizer.step()

    for full_parameter, sharded_parameter in zip(full, sharded, strict=True):
        expected = {"weights": full_parameter.detach(), **full_optimizer.state[full_parameter]}
        states = {
            "weights": sharded_parameter.detach(),
            **sharded_optimizer.state[sharded_parameter],
        }
        assert states.keys() == expected.keys()
        for name, state in states.items():
            gathered = state.full_tensor() if isinstance(state, DTensor) else state
            assert torch.equal(gathered, expected[name]), (expected["weights"].shape, name)


def set_gradients(parameters: list[torch.nn.Parameter], gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


# --- ranks that differ


def check_differing_ranks(accelerator: Any) -> None:
    """All ranks must have the same tensors: ranks that save together gather one after another."""
    training = Training(accelerator, "adamw")
    training.make_steps(range(1))
    if accelerator.process_index == 1:
        training.optimizer.state.clear()

    run: Any = SimpleNamespace(
        parts=SimpleNamespace(by_name=lambda: {"Average": training.average}),
        ranks=training.engine.ranks,
    )
    with pytest.raises(UserError, match="the states of rank 1 have other tensors than those of"):
        collect_states(run, training.state)


def main() -> None:
    accelerator = start_accelerator()
    check_restarts(accelerator, Path(sys.argv[1]))
    if ranks_of(accelerator).is_sharded:
        check_sharded_parameters(accelerator)
    check_differing_ranks(accelerator)


if __name__ == "__main__":
    launch(main)
