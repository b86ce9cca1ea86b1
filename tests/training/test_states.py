"""The state of an optimizer and of the user's parts, through a run that stops and goes on."""

import dataclasses
from collections import deque
from pathlib import Path
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
    assert "the state of the optimizer Odd; AdamW starts without a state" in capsys.readouterr().out
