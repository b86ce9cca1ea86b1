"""The state of an optimizer and of the user's parts, through a run that stops and goes on."""

import dataclasses
import functools
import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.data.prepare import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.record.checkpoint import part_names, tensors_digest
from llmtrain.training.adamw import CompactAdamW
from llmtrain.training.callbacks import CheckStates
from llmtrain.training.muon import Muon
from llmtrain.training.optim import MuonWithAdamW
from llmtrain.training.optimizer_state import OptimizerState
from tests.odd_optimizer import Odd
from tests.training.test_loop import SETTINGS


@pytest.fixture
def rows(text_file: Path) -> Tokenized:
    return lt.tokenize(dataclasses.replace(SETTINGS.data, dataset=[str(text_file)]), 16)


class Average(Callback):
    """An average of the weights, which can stop the run. A run without it counts as the same."""

    fingerprint = None

    def __init__(self, model: nn.Module, last_step: int = 9) -> None:
        self.model = model
        self.last_step = last_step
        self.steps = 0
        self.mean = {name: p.detach().clone() for name, p in model.named_parameters()}

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.steps += 1
        for name, p in self.model.named_parameters():
            self.mean[name].lerp_(p.detach(), 1 / self.steps)

    def wants_to_stop(self) -> bool:
        return self.steps + 1 == self.last_step

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        self.mean = state["mean"]


class Broken(Average):
    """A part that cannot load its state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("mean of the tail")


Broken.__name__ = "Average"


def train(
    rows: Tokenized,
    folder: Path,
    *,
    last_step: int = 9,
    kind: type[Average] | None = Average,
    optimizer_class: Any = Odd,
) -> Average | None:
    """Train four steps; the run is stopped after ``last_step``."""
    settings = dataclasses.replace(
        SETTINGS,
        optim=dataclasses.replace(SETTINGS.optim, max_steps=4),
        run=dataclasses.replace(SETTINGS.run, output_dir=str(folder)),
    )
    accelerator = lt.start(settings)
    model: Any = lt.GPT(SETTINGS.model, rows.vocabulary, seed=0)
    bundle = lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset))
    average = kind(model, last_step) if kind else None
    optimizer = optimizer_class(model.parameters())
    callbacks = [average] if average else []
    opened = lt.open_run(accelerator, settings, rows, bundle, optimizer, callbacks=callbacks)
    with opened as run:
        batches, _ = lt.loaders(run)
        accelerator.register_for_checkpointing(nn.LayerNorm(2))
        lt.train(run, *accelerator.prepare(model, optimizer, batches))
    return average


def last_digest(folder: Path) -> str:
    return tensors_digest(folder / "checkpoints" / "step-00000004")


def test_a_run_that_stops_and_goes_on_has_the_same_states_to_the_bit(
    rows: Tokenized, tmp_path: Path
) -> None:
    straight = train(rows, tmp_path / "straight")
    train(rows, tmp_path / "run", last_step=2)
    resumed = train(rows, tmp_path / "run")
    assert straight is not None
    assert resumed is not None
    for name, mean in straight.mean.items():
        assert torch.equal(resumed.mean[name], mean)
    assert resumed.steps == straight.steps == 4
    assert last_digest(tmp_path / "run") == last_digest(tmp_path / "straight")
    assert part_names(tmp_path / "run/checkpoints/step-00000004") == ["Average", "LayerNorm"]


def test_a_part_that_is_gone_or_new_is_told_and_no_damage(
    rows: Tokenized, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(rows, tmp_path / "gone", last_step=2)
    train(rows, tmp_path / "gone", kind=None)
    output = capsys.readouterr().out
    assert "the state of Average in " in output
    assert "is not used: this run has no such part" in output
    assert "damaged" not in output

    class Stop(Average):
        def state_dict(self) -> dict[str, Any]:
            return {}

    train(rows, tmp_path / "new", last_step=2, kind=Stop)
    assert part_names(tmp_path / "new/checkpoints/step-00000002") == ["LayerNorm"]
    assert "starts without a state" not in capsys.readouterr().out
    train(rows, tmp_path / "new")
    assert "Average starts without a state: " in capsys.readouterr().out


def test_a_part_that_cannot_load_its_state_is_named(rows: Tokenized, tmp_path: Path) -> None:
    train(rows, tmp_path / "run", last_step=2)
    with pytest.raises(UserError, match=r"Average cannot load its state from .*Average \(KeyErr"):
        train(rows, tmp_path / "run", kind=Broken)


class Recent(Odd):
    """An optimizer that keeps the last gradients in a deque."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            state["recent"] = [deque()]


def test_a_state_that_cannot_be_stored_is_named_after_the_first_step(
    rows: Tokenized, tmp_path: Path
) -> None:
    message = r"the optimizer Recent keeps a deque in transformer\.wte\.weight\.recent\[0\], which"
    with pytest.raises(UserError, match=message):
        train(rows, tmp_path / "run", optimizer_class=Recent)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 1


class Watching(Average):
    """A part whose state a checkpoint cannot hold."""

    def state_dict(self) -> dict[str, Any]:
        return {"recent": deque()}


def test_states_are_checked_after_the_first_step_even_if_the_optimizer_has_none(
    rows: Tokenized, tmp_path: Path
) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=1e-2)
    with pytest.raises(UserError, match="Watching keeps a deque in recent, which"):
        train(rows, tmp_path / "run", kind=Watching, optimizer_class=sgd)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) <= 1


def test_states_are_checked_once_after_a_step_that_was_not_skipped() -> None:
    norms: list[float] = []
    run = SimpleNamespace(
        parts=SimpleNamespace(by_name=lambda: norms.append(norm) or {}),  # type: ignore[func-returns-value]
        saver=SimpleNamespace(saves_alone=True),
        settings=None,
    )
    context: Any = SimpleNamespace(
        run=run, engine=None, optimizer_state=odd_state()[2], settle=lambda: None
    )
    check = CheckStates(context)
    batch: Any = None
    for norm in (math.nan, math.inf, 1.0, 2.0):
        result: Any = SimpleNamespace(grad_norm=norm)
        check.on_step_end(batch, result, StepInfo(step=1, is_last=False, should_stop=False))
    assert norms == [1.0]


def odd_state(weight_decay: float = 0.1) -> tuple[nn.Module, Odd, OptimizerState]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).bfloat16()
    optimizer = Odd(model.parameters(), decay=weight_decay)
    return model, optimizer, OptimizerState(model, optimizer)


def test_each_tensor_keeps_its_dtype_and_settings_come_from_the_new_start() -> None:
    model, optimizer, state = odd_state()
    model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    structure, tensors = state.flatten()
    assert {"weight.moment", "weight.codes", "weight[0].list[0]"} < tensors.keys()

    _, resumed, resumed_state = odd_state(weight_decay=0.2)
    learning_rate = torch.tensor(0.5)
    resumed.param_groups[0]["lr"] = learning_rate
    resumed_state.restore(structure, tensors.items())

    restored = resumed.state[resumed.param_groups[0]["params"][0]]
    assert restored["moment"].dtype == torch.float32
    assert restored["codes"].dtype == torch.uint8
    assert type(restored["count"]) is tuple
    assert resumed.state["global"] == {"steps": 1, "seen": {1, 2}}  # type: ignore[index]
    [group] = resumed.param_groups
    assert group["step"] == 1
    assert group["decay"] == 0.2
    assert group["lr"] is learning_rate
    assert resumed.entries == {"name": "odd", "inner": {"count": 1, "function": len}}


def test_another_optimizer_starts_without_a_state(capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer, state = odd_state()
    model(torch.ones(3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    structure, tensors = state.flatten()
    adamw = torch.optim.AdamW(model.parameters())
    OptimizerState(model, adamw).restore(structure, tensors.items())
    assert not adamw.state
    assert (
        "the state of the optimizer Odd for weights in bfloat16; AdamW for weights in bfloat16 "
        "starts without a state"
    ) in capsys.readouterr().out


def test_a_state_for_weights_of_another_dtype_is_not_taken_over() -> None:
    """Weights in bfloat16 need a compensation, which the state of float32 weights lacks."""
    states = []
    for dtype in (torch.float32, torch.bfloat16):
        model = torch.nn.Linear(3, 3).to(dtype)
        optimizer = CompactAdamW(model.parameters(), lr=1e-3)
        model(torch.ones(3, dtype=dtype)).sum().backward()
        states.append((optimizer, OptimizerState(model, optimizer)))
    (first, first_state), (second, second_state) = states
    first.step()
    structure, tensors = first_state.flatten()
    second_state.restore(structure, tensors.items())
    assert not second.state
    second.step()
    assert all("compensation" in state for state in second.state.values())


def move(first: OptimizerState, second: OptimizerState) -> None:
    """Save one state and restore it as the other."""
    structure, tensors = first.flatten()
    second.restore(json.loads(json.dumps(structure)), tensors.items())


def add_nine(value: Any) -> None:
    if isinstance(value, set):
        value.add(9)
    elif isinstance(value, OrderedDict):
        value["count"] = 9
    else:
        value[0]["mean"] += 9


@pytest.mark.parametrize(
    "make", [lambda: {1}, lambda: OrderedDict(count=1), lambda: [{"mean": torch.zeros(2)}]]
)
def test_a_value_that_the_optimizer_changes_in_place_is_state(make: Callable[[], Any]) -> None:
    model, optimizer, _ = odd_state()
    optimizer.param_groups[0]["value"] = make()
    optimizer.entries["value"] = make()
    state = OptimizerState(model, optimizer)
    assert state.flatten().structure["param_groups"] == [{"dict": []}]

    add_nine(optimizer.param_groups[0]["value"])
    add_nine(optimizer.entries["value"])
    _, resumed, resumed_state = odd_state()
    move(state, resumed_state)
    changed = make()
    add_nine(changed)
    assert str(resumed.param_groups[0]["value"]) == str(changed)
    assert str(resumed.entries["value"]) == str(changed)


def test_tensors_with_the_same_path_have_different_names() -> None:
    def make() -> tuple[Any, OptimizerState]:
        model = nn.ModuleDict({"state": nn.Linear(1, 1, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return optimizer, OptimizerState(model, optimizer)

    optimizer, state = make()
    [weight] = optimizer.param_groups[0]["params"]
    optimizer.state[weight] = {"mean": torch.ones(1)}
    optimizer.state["weight"] = {"mean": torch.zeros(1)}

    resumed, resumed_state = make()
    move(state, resumed_state)
    [weight] = resumed.param_groups[0]["params"]
    assert resumed.state == {weight: {"mean": 1}, "weight": {"mean": 0}}


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_steps_lie_where_the_implementation_of_this_run_needs_them(
    before: bool, after: bool
) -> None:
    """The meta device stands for a GPU."""

    def make(is_capturable: bool) -> tuple[torch.optim.AdamW, OptimizerState]:
        model = nn.Linear(3, 1, bias=False, device="meta")
        optimizer = torch.optim.AdamW(model.parameters(), capturable=is_capturable)
        return optimizer, OptimizerState(model, optimizer)

    saved, state = make(before)
    step = torch.zeros((), device="meta" if before else "cpu")
    [weight] = saved.param_groups[0]["params"]
    saved.state[weight] = {"step": step, "exp_avg": torch.zeros_like(weight)}
    structure, tensors = state.flatten()
    files = {name: torch.zeros(tensor.shape) for name, tensor in tensors.items()}

    for is_capturable in (before, after):
        resumed, resumed_state = make(is_capturable)
        resumed_state.restore(structure, files.items())
        [restored] = resumed.state.values()
        assert restored["step"].device.type == ("meta" if is_capturable else "cpu")
        assert restored["exp_avg"].device.type == "meta"


class CountingMuon(MuonWithAdamW):
    """Adds an entry to the `state_dict`, and shares groups with two other optimizers."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.count = state_dict["count"]


def test_groups_that_an_optimizer_shares_with_others_stay_shared() -> None:
    def make() -> tuple[CountingMuon, OptimizerState]:
        model = nn.Linear(3, 2)
        muon = Muon([model.weight], lr=0.1, weight_decay=0.0)
        adamw = torch.optim.AdamW([model.bias], lr=torch.tensor(0.1))
        optimizer = CountingMuon(muon, adamw)
        return optimizer, OptimizerState(model, optimizer)

    optimizer, state = make()
    optimizer.count = 3
    resumed, resumed_state = make()
    rate = resumed.param_groups[1]["lr"]
    move(state, resumed_state)
    assert resumed.count == 3
    assert resumed.param_groups[1]["lr"] is rate
    in_parts = [group for part in resumed.parts for group in part.param_groups]
    assert all(a is b for a, b in zip(in_parts, resumed.param_groups, strict=True))


def test_a_group_that_was_added_late_is_refused() -> None:
    _, optimizer, state = odd_state()
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(UserError, match="the optimizer Odd has 2 parameter groups, and had 1 when"):
        state.flatten()
