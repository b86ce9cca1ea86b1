"""A resumed run goes on with the state of its optimizer and of the user's parts."""

import copy
import dataclasses
import functools
import json
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.record.checkpoint import part_names, state_hashes
from llmtrain.training.adamw import CompactAdamW
from llmtrain.training.muon import Muon
from llmtrain.training.optim import MuonWithAdamW
from llmtrain.training.optimizer_state import OptimizerState
from tests.odd_optimizer import Odd
from tests.training.small_runs import THREE_STEPS, StopAfter


@pytest.fixture
def rows(text_file: Path) -> Tokenized:
    return lt.tokenize(dataclasses.replace(THREE_STEPS.data, dataset=[str(text_file)]), 16)


# --- runs that stop and are resumed


class Average(Callback):
    """An average of the weights. A run without it has the same fingerprint."""

    settings = None

    def __init__(self) -> None:
        self.steps = 0

    def setup(self, training: Any) -> None:
        self.model = training.model
        self.mean = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.steps += 1
        for name, p in self.model.named_parameters():
            self.mean[name].lerp_(p.detach(), 1 / self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.mean = state["mean"]


def train(
    rows: Tokenized,
    folder: Path,
    *callbacks: Callback,
    optimizer_class: Callable[..., torch.optim.Optimizer] = Odd,
) -> None:
    """Train four steps."""
    settings = dataclasses.replace(
        THREE_STEPS,
        optim=dataclasses.replace(THREE_STEPS.optim, max_steps=4),
        run=dataclasses.replace(THREE_STEPS.run, output_dir=str(folder)),
    )
    accelerator = lt.start(settings)
    model: Any = lt.GPT(THREE_STEPS.model, rows.vocabulary, seed=0)
    bundle = lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset))
    optimizer = optimizer_class(model.parameters())

    opened_run = lt.open_run(
        accelerator, settings, rows, bundle=bundle, optimizer=optimizer, callbacks=callbacks
    )
    with opened_run as run:
        batches, _ = lt.loaders(run)
        lt.train(run, *accelerator.prepare(model, optimizer, batches))


def last_digest(folder: Path) -> dict[str, str]:
    return state_hashes(folder / "checkpoints" / "step-00000004")


def test_a_resumed_run_has_the_same_states_bit_for_bit(rows: Tokenized, tmp_path: Path) -> None:
    uninterrupted = Average()
    train(rows, tmp_path / "uninterrupted", uninterrupted)

    train(rows, tmp_path / "run", Average(), StopAfter(2))
    resumed = Average()
    train(rows, tmp_path / "run", resumed)

    assert resumed.steps == uninterrupted.steps == 4
    assert uninterrupted.mean
    for name, mean in uninterrupted.mean.items():
        assert torch.equal(resumed.mean[name], mean), name
    assert last_digest(tmp_path / "run") == last_digest(tmp_path / "uninterrupted")
    assert part_names(tmp_path / "run/checkpoints/step-00000004") == ["Average"]


class GivenState(Callback):
    """A callback with a given state, which it cannot load. It has the name of the average."""

    settings = None
    name = "Average"

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("mean of the tail")


def test_a_state_without_its_part_is_noted_and_a_part_without_a_state_is_no_damage(
    rows: Tokenized, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(rows, tmp_path / "gone", Average(), StopAfter(2))
    train(rows, tmp_path / "gone")
    output = capsys.readouterr().out
    assert "the state of Average in " in output
    assert "damaged" not in output

    train(rows, tmp_path / "new", GivenState({}), StopAfter(2))
    assert part_names(tmp_path / "new/checkpoints/step-00000002") == []
    train(rows, tmp_path / "new", Average())


def test_a_part_that_cannot_load_its_state_is_named(rows: Tokenized, tmp_path: Path) -> None:
    train(rows, tmp_path / "run", Average(), StopAfter(2))

    with pytest.raises(UserError, match=r"Average cannot load its state from .*KeyError"):
        train(rows, tmp_path / "run", GivenState({"steps": 1}))


# --- the check at the first checkpoint


class DequeOptimizer(Odd):
    """An optimizer that keeps a deque for each parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["recent"] = [deque()]


@pytest.mark.parametrize(
    ("parts", "optimizer_class", "named"),
    [
        pytest.param([], DequeOptimizer, "transformer.wte.weight.recent[0]", id="optimizer"),
        pytest.param(
            [GivenState({"recent": deque()})],
            functools.partial(torch.optim.SGD, lr=1e-2),
            "Average keeps a deque in recent",
            id="callback beside an optimizer without a state",
        ),
    ],
)
def test_a_state_that_cannot_be_stored_is_named_at_the_first_checkpoint(
    parts: list[Callback],
    optimizer_class: Callable[..., torch.optim.Optimizer],
    named: str,
    rows: Tokenized,
    tmp_path: Path,
) -> None:
    with pytest.raises(UserError, match=re.escape(named)):
        train(rows, tmp_path / "run", *parts, optimizer_class=optimizer_class)

    assert not [*(tmp_path / "run").glob("checkpoints/step-*")]


# --- the state of an optimizer


class Codes(torch.optim.Optimizer):
    """Keeps float32 moments, uint8 codes and a large count, whatever the dtype of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "steps": 1_000_000})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["moment"] = torch.zeros_like(p, dtype=torch.float32)
                    state["codes"] = torch.zeros_like(p, dtype=torch.uint8)
                    state["count"] = torch.tensor(1_000_000, dtype=torch.int64)
                    state["note"] = "text"
                state["moment"].add_(p.grad, alpha=1.00390625).add_(1e-4)
                state["codes"].add_(201)
                state["count"].add_(1)
                p.sub_(group["lr"] * state["moment"].to(p.dtype))


def test_the_state_of_bfloat16_weights_is_restored_with_its_dtypes_and_bits() -> None:
    def make() -> SmallTraining:
        torch.manual_seed(0)
        model = nn.Linear(3, 2).bfloat16()
        optimizer = Codes(model.parameters())
        return SmallTraining(model, optimizer, OptimizerState(model, optimizer))

    saved = make()
    for _ in range(3):
        saved.make_step()
    resumed = make()
    save_and_restore(saved.state, resumed.state)

    assert resumed.optimizer.param_groups[0]["steps"] == 1_000_003
    expected_states = [*saved.optimizer.state.values()]
    states = [*resumed.optimizer.state.values()]
    assert [state["count"].item() for state in states] == [1_000_003] * 2
    for state, expected in zip(states, expected_states, strict=True):
        assert state["note"] == "text"
        for name in ("moment", "codes", "count"):
            assert state[name].dtype == expected[name].dtype
            assert torch.equal(state[name], expected[name])


class SmallTraining(NamedTuple):
    """A small model with its optimizer, and the optimizer's state for checkpoints."""

    model: nn.Module
    optimizer: Any
    state: OptimizerState

    def make_step(self) -> None:
        [weight, *_] = self.model.parameters()
        self.model(torch.ones(3, dtype=weight.dtype)).sum().backward()
        self.optimizer.step()


def small_training(weight_decay: float = 0.1) -> SmallTraining:
    """Return a linear layer in bfloat16, with an optimizer of unusual states."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Odd(model.parameters(), decay=weight_decay)
    return SmallTraining(model, optimizer, OptimizerState(model, optimizer))


def test_tensors_keep_their_dtypes_and_other_values_their_types() -> None:
    saved = small_training(weight_decay=0.1)
    saved.make_step()
    structure, tensors = saved.state.flatten()
    assert {"weight.moment", "weight.codes", "weight[0].list[0]"} < tensors.keys()

    resumed = small_training(weight_decay=0.2)
    [group] = resumed.optimizer.param_groups
    learning_rate = torch.tensor(0.5)
    group["lr"] = learning_rate
    resumed.state.restore(structure, tensors.items())

    state = resumed.optimizer.state[resumed.model.weight]
    assert state["moment"].dtype == torch.float32
    assert state["codes"].dtype == torch.uint8
    assert type(state["count"]) is tuple
    assert state["seen"] == {1}

    # The group has the settings of this start, and the count of the checkpoint.
    [restored_group] = resumed.optimizer.param_groups
    assert restored_group["step"] == 1
    assert restored_group["decay"] == 0.2
    assert restored_group["function"] is len
    assert restored_group["lr"] is learning_rate


def test_another_optimizer_starts_without_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    saved = small_training()
    saved.make_step()
    structure, tensors = saved.state.flatten()

    adamw = torch.optim.AdamW(saved.model.parameters())
    OptimizerState(saved.model, adamw).restore(structure, tensors.items())

    assert not adamw.state
    assert "AdamW for weights in bfloat16 starts without a state" in capsys.readouterr().out


def test_a_state_for_weights_of_another_dtype_is_not_restored() -> None:
    """Weights in bfloat16 need a compensation, which the state of float32 weights lacks."""

    def training_in(dtype: torch.dtype) -> SmallTraining:
        model = nn.Linear(3, 3).to(dtype)
        optimizer = CompactAdamW(model.parameters(), lr=1e-3)
        return SmallTraining(model, optimizer, OptimizerState(model, optimizer))

    saved = training_in(torch.float32)
    saved.make_step()
    structure, tensors = saved.state.flatten()

    resumed = training_in(torch.bfloat16)
    resumed.state.restore(structure, tensors.items())
    assert not resumed.optimizer.state

    resumed.make_step()
    states = [*resumed.optimizer.state.values()]
    assert len(states) == 2
    assert all("compensation" in state for state in states)


def save_and_restore(saved: OptimizerState, resumed: OptimizerState) -> None:
    """Restore a state as another run does, which reads the structure from a file."""
    structure, tensors = saved.flatten()
    resumed.restore(json.loads(json.dumps(structure)), tensors.items())


GPU = "meta"  # stands for a GPU


@pytest.mark.parametrize(
    "is_capturable", [pytest.param(False, id="cpu"), pytest.param(True, id="gpu")]
)
@pytest.mark.parametrize(
    "was_capturable", [pytest.param(False, id="from cpu"), pytest.param(True, id="from gpu")]
)
def test_the_count_of_steps_is_on_the_device_that_this_implementation_needs(
    was_capturable: bool, is_capturable: bool
) -> None:
    """torch needs it on the GPU if AdamW is capturable, and else has it on the CPU."""
    step_devices = {True: GPU, False: "cpu"}

    def make(capturable: bool) -> tuple[torch.optim.AdamW, OptimizerState]:
        model = nn.Linear(3, 1, bias=False, device=GPU)
        optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)
        return optimizer, OptimizerState(model, optimizer)

    saved, saved_state = make(was_capturable)
    [weight] = saved.param_groups[0]["params"]
    step = torch.zeros((), device=step_devices[was_capturable])
    saved.state[weight] = {"step": step, "exp_avg": torch.zeros_like(weight)}
    structure, tensors = saved_state.flatten()
    tensors_of_files = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}

    structure_before = copy.deepcopy(structure)

    resumed, resumed_state = make(is_capturable)
    resumed_state.restore(structure, tensors_of_files.items())

    assert structure == structure_before
    [state] = resumed.state.values()
    assert state["step"].device.type == step_devices[is_capturable]
    assert state["exp_avg"].device.type == GPU


class Settings(torch.optim.SGD):
    """An optimizer whose group has what no checkpoint can hold."""

    def __init__(self, params: Any, **values: Any) -> None:
        super().__init__([{"params": [*params], **values}], lr=0.1)


@pytest.mark.parametrize("value", [len, torch.float32, np.float64(1), deque([1])], ids=repr)
def test_a_setting_that_no_checkpoint_can_hold_stays_unless_it_changes(value: Any) -> None:
    model = nn.Linear(3, 2)
    optimizer = Settings(model.parameters(), rule=value)
    state = OptimizerState(model, optimizer)

    structure, _ = state.flatten()
    assert "rule" not in structure["param_groups"][0]

    if isinstance(value, deque):
        value.append(2)
    else:
        optimizer.param_groups[0]["rule"] = np.float64(2)
    with pytest.raises(UserError, match=r"in param_groups\[0\]\.rule"):
        state.flatten()


@pytest.mark.parametrize(("now", "restored"), [(1.0, 3.0), (0.0, 0.0)], ids=["same", "another"])
def test_a_tensor_in_a_group_is_restored_unless_this_start_has_another(
    now: float, restored: float
) -> None:
    model = nn.Linear(3, 2)
    saved = Settings(model.parameters(), scale=torch.tensor(1.0))
    saved_state = OptimizerState(model, saved)
    saved.param_groups[0]["scale"].fill_(3.0)

    resumed = Settings(model.parameters(), scale=torch.tensor(now))
    save_and_restore(saved_state, OptimizerState(model, resumed))
    assert resumed.param_groups[0]["scale"] == restored


class CountingMuon(MuonWithAdamW):
    """Adds an entry to the `state_dict`."""

    count: Any = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


def test_a_further_entry_of_the_state_dict_is_refused_once_it_changes() -> None:
    model = nn.Linear(3, 2)
    muon = Muon([model.weight], lr=0.1, weight_decay=0.0)
    optimizer = CountingMuon(muon, torch.optim.AdamW([model.bias]))
    state = OptimizerState(model, optimizer)
    state.flatten()

    optimizer.count = 1
    with pytest.raises(
        UserError, match="the optimizer CountingMuon changes count of its state_dict"
    ):
        state.flatten()


def test_a_further_entry_is_compared_in_all_its_digits() -> None:
    model = nn.Linear(3, 2)
    muon = Muon([model.weight], lr=0.1, weight_decay=0.0)
    optimizer = CountingMuon(muon, torch.optim.AdamW([model.bias]))
    optimizer.count = torch.zeros(2000)  # its repr has only the first and the last numbers
    state = OptimizerState(model, optimizer)
    optimizer.count[1000] = 1
    with pytest.raises(UserError, match="CountingMuon changes count"):
        state.flatten()


def test_a_state_of_something_else_than_a_parameter_is_refused() -> None:
    training = small_training()
    training.optimizer.state["global"] = {"steps": 1}

    with pytest.raises(UserError, match="Odd keeps a state of 'global', which is no parameter"):
        training.state.flatten()
