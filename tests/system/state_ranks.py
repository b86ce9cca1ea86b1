"""Run on two ranks by test_states.py: optimizers that keep odd states go on after a restart.

`state_ranks.py FOLDER NAME...` writes for each optimizer whether weights and state after a restart
have the bits of the run without one, or the error that it ended with.
"""

import json
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
from llmtrain.interfaces.callback import StepInfo
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.placement import place
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import fill, local_shard
from llmtrain.parallel.team import Team
from llmtrain.record.checkpoint import read_structure
from llmtrain.record.saver import Saver
from llmtrain.record.tensor_files import read_tensors_on_main
from llmtrain.training.adamw import EightBitAdamW
from llmtrain.training.callbacks import CheckStates
from llmtrain.training.optim import make_optimizer
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.part_states import flat_part, restore_parts
from llmtrain.training.run_state import compare_states
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step
from tests.odd_optimizer import Odd
from tests.record.test_checkpoint import Files

heavyball = pytest.importorskip("heavyball")
pytorch_optimizer = pytest.importorskip("pytorch_optimizer")

VOCABULARY = 31  # odd, so that shards are uneven
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "odd": lambda model: Odd(model.parameters()),
    "odd in bf16": lambda model: Odd(model.bfloat16().parameters()),
    "compact": lambda model: EightBitAdamW(model.bfloat16().parameters(), lr=1e-2),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "heavyball soap": lambda model: heavyball.SOAP(model.parameters(), lr=1e-2),
    "heavyball adamw": lambda model: heavyball.AdamW(model.parameters(), lr=1e-2),
    "pytorch_optimizer soap": lambda model: pytorch_optimizer.SOAP(
        model.parameters(), lr=1e-2, precondition_frequency=2
    ),
    "schedule-free": lambda model: pytorch_optimizer.ScheduleFreeAdamW(model.parameters(), lr=1e-2),
}


class Average:
    """A part with the weights of a model, sharded like these, and a number."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.mean = {name: 2 * p.detach() for name, p in model.named_parameters()}
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]
        self.step = state["step"]


class Training:
    """A small model in training.

    Attributes:
        state: the state of its optimizer.
        average: the weights at the beginning.
    """

    def __init__(self, accelerator: Any, name: str) -> None:
        accelerator.free_memory()  # it forgets the model before, which is not trained any more
        width = 68 if name == "compact" else 12  # shorter rows have no moments in 8 bits
        with torch.device("meta"):
            model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=width, block_size=8), VOCABULARY)
        bundle = ModelBundle(model, Files(), model.initial_weights(1))
        place(accelerator, bundle)
        if name == "muon":
            optimizer = make_optimizer(accelerator, model, OptimConfig(optim="muon"))
        else:
            optimizer = OPTIMIZERS[name](model)
        prepared, self.optimizer = accelerator.prepare(model, optimizer)
        self.engine = engine_for(
            Ranks(accelerator),
            prepared,
            objective=bundle.objective,
            config=ParallelConfig(),
            accumulation=1,
        )
        self.model = self.engine.unwrapped
        self.state = OptimizerState(self.model, self.optimizer.optimizer)
        self.average = Average(self.model)

    def steps(self, first: int) -> None:
        """Make three steps, each with other rows."""
        for step in range(first, first + 3):
            generator = torch.Generator().manual_seed(100 * step + self.engine.ranks.rank)
            ids = torch.randint(VOCABULARY, (2, 9), generator=generator)
            batch = {"input_ids": ids, "labels": ids}
            train_step(self.engine, self.optimizer, [batch], max_grad_norm=1.0)


def form_and_bits(tensor: torch.Tensor) -> list[Any]:
    """Return all that must be the same after a restart."""
    local = local_shard(tensor)
    form = [str(tensor.dtype), [*tensor.shape], str(tensor.device), [*local.stride()]]
    if isinstance(tensor, DTensor):
        form.append(str(tensor.placements))
    return [*form, local.contiguous().flatten().view(torch.uint8).tolist()]


def differences(first: Training, second: Training) -> list[str]:
    """Return the names of tensors that differ in bits or form, and of states that differ otherwise."""
    one, other = first.state.flatten(), second.state.flatten()
    tensors, others = (
        {
            **state.tensors,
            **{f"model {k}": v for k, v in training.model.named_parameters()},
            **{f"average {k}": v for k, v in training.average.mean.items()},
        }
        for state, training in ((one, first), (other, second))
    )
    names = [name for name in {**tensors, **others} if name not in others or name not in tensors]
    for name in tensors.keys() & others.keys():
        if form_and_bits(tensors[name]) != form_and_bits(others[name]):
            names.append(name)
    keys = [key for key in one.structure if one.structure[key] != other.structure[key]]
    return sorted(names) + keys


def restarted(accelerator: Any, name: str, folder: Path) -> list[str]:
    """Return what differs after a restart in the middle of six steps."""
    straight = Training(accelerator, name)
    straight.steps(0)
    straight.average = Average(straight.model)
    straight.average.step = 3
    compare_states({"optimizer": straight.state.flatten()})
    ranks = straight.engine.ranks
    saver = Saver(folder, Files(), keep=2, in_background=True)
    if ranks.is_sharded:
        saver.join(Team.with_new_group(), can_write=True)
    if ranks.is_sharded or ranks.is_main:
        part = flat_part("Average", straight.average.state_dict())
        states = {"optimizer": straight.state.flatten(), "parts/Average": part}
        saver.save(3, straight.model.state_dict(), states, {"step": 3})
    straight.steps(3)
    saver.wait()
    accelerator.wait_for_everyone()

    resumed = Training(accelerator, name)
    path = folder / "step-00000003"
    device = accelerator.device
    fill(resumed.model.state_dict(), read_tensors_on_main(path / "model", device))
    tensors = read_tensors_on_main(path / "optimizer", device)
    resumed.state.restore(read_structure(path / "optimizer"), tensors)
    restore_parts({"Average": resumed.average}, path, device)
    assert resumed.average.step == 3
    resumed.steps(3)
    return differences(straight, resumed)


def sharded_and_full(accelerator: Any) -> list[str]:
    """Return which states of the same steps differ between sharded and full parameters."""
    mesh = accelerator.torch_device_mesh
    if mesh is None:
        return []
    generator = torch.Generator().manual_seed(0)
    shapes = [(61, 70), (129, 300), (5, 64, 13), (4100,)]
    full = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    sharded = [distribute_tensor(tensor, mesh, placements) for tensor in full]
    optimizers = []
    for parameters in (full, sharded):
        trained = [torch.nn.Parameter(tensor) for tensor in parameters]
        optimizers.append(EightBitAdamW(trained, lr=1e-2))

    for _ in range(4):
        gradients = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
        for optimizer in optimizers:
            for p, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                is_sharded = isinstance(p, DTensor)
                p.grad = distribute_tensor(gradient, mesh, placements) if is_sharded else gradient
            optimizer.step()

    differing = []
    for index, (p, q) in enumerate(
        zip(*(o.param_groups[0]["params"] for o in optimizers), strict=True)
    ):
        states = [{"weights": p.detach(), **optimizers[0].state[p]}]
        states.append({"weights": q.detach(), **optimizers[1].state[q]})
        assert states[0].keys() == states[1].keys()
        for name, tensor in states[1].items():
            gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            if not torch.equal(gathered, states[0][name]):
                differing.append(f"{shapes[index]} {name}")
    return differing


def of_ranks_that_differ(accelerator: Any) -> dict[str, str]:
    """Return the errors for states that are not the same on all ranks."""
    rank = accelerator.process_index
    training = Training(accelerator, "adamw")
    training.steps(0)
    found = {}

    training.average.step = rank
    found["a number"] = error_of_check(training)
    training.average.step = 0
    training.average.mean["rows"] = torch.full((2, 3), rank)
    found["a tensor"] = error_of_check(training)
    del training.average.mean["rows"]

    state = training.optimizer.state[next(training.model.parameters())]
    state["noise"] = torch.tensor(rank)
    found["the optimizer"] = error_of_check(training)
    if rank == 1:
        training.optimizer.state.clear()
    found["one rank"] = error_of_check(training)
    return found


def error_of_check(training: Training) -> str:
    """Return the error with which a run stops after its first step."""
    run: Any = SimpleNamespace(
        parts=SimpleNamespace(by_name=lambda: {"Average": training.average}),
        saver=SimpleNamespace(saves_alone=not training.engine.ranks.is_sharded),
        settings=None,
    )
    context: Any = SimpleNamespace(
        run=run,
        engine=training.engine,
        optimizer=training.optimizer,
        optimizer_state=training.state,
    )
    batch: Any = None
    result: Any = SimpleNamespace(grad_norm=1.0)
    info = StepInfo(step=1, is_last=False, should_stop=False)
    try:
        CheckStates(context).on_step_end(batch, result, info)
    except UserError as error:
        return str(error)
    return "not noticed"


def main() -> None:
    accelerator = start_accelerator()
    root = Path(sys.argv[1])
    found: dict[str, Any] = {}
    for name in sys.argv[2:]:
        try:
            found[name] = restarted(accelerator, name, root / name)
        except UserError as error:
            found[name] = str(error)
    found["sharded and full"] = sharded_and_full(accelerator)
    found["ranks that differ"] = of_ranks_that_differ(accelerator)
    (root / f"found-{accelerator.process_index}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    launch(main)
