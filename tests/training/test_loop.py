"""The loop calls the callbacks, and leaves nothing behind: a model can be trained again."""

import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.data.prepare import Tokenized
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.record.history import as_numbers, read_lines
from llmtrain.training import periodic
from llmtrain.training.checks import check_wrapping
from llmtrain.training.context import LoopContext
from llmtrain.training.periodic import Finish
from tests.launching import read_json
from tests.training.small_runs import THREE_STEPS


class CrashError(Exception):
    """Stands for a crash."""


@pytest.fixture
def rows(text_file: Path) -> Tokenized:
    return lt.tokenize(dataclasses.replace(THREE_STEPS.data, dataset=[str(text_file)]), 16)


@pytest.fixture
def model(rows: Tokenized) -> Any:
    return lt.GPT(THREE_STEPS.model, rows.vocabulary, seed=0)


@pytest.fixture
def train(rows: Tokenized, model: Any, tmp_path: Path) -> Callable[..., None]:
    """A function that trains the model in a folder below ``tmp_path``, with callbacks."""

    def train(name: str, callbacks: Sequence[Callback] = ()) -> None:
        run_config = dataclasses.replace(THREE_STEPS.run, output_dir=str(tmp_path / name))
        settings = dataclasses.replace(THREE_STEPS, run=run_config)
        bundle = lt.ModelBundle(model, model.files(rows.tokenizer, rows.metadata.dataset))
        lt.fit(settings, rows, lambda *_: bundle, callbacks=callbacks)

    return train


@pytest.fixture
def failing_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run fail when it counts its first step."""

    def fail(*_: object, **__: object) -> None:
        raise CrashError("out of luck")

    monkeypatch.setattr(LoopContext, "settle", fail)


# --- hooks on the model


def hook_count(model: nn.Module) -> int:
    """Return how many hooks there are on a model's modules and parameters."""
    on_modules = sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()
    )
    on_parameters = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return on_modules + on_parameters


def test_a_run_leaves_no_hooks_on_the_model(train: Callable, model: nn.Module) -> None:
    before = hook_count(model)

    train("first")
    assert hook_count(model) == before

    train("second")
    assert hook_count(model) == before


@pytest.mark.usefixtures("failing_steps")
def test_a_run_that_fails_leaves_no_hooks_on_the_model(train: Callable, model: nn.Module) -> None:
    before = hook_count(model)

    with pytest.raises(CrashError):
        train("first")
    assert hook_count(model) == before

    with pytest.raises(CrashError):
        train("second")
    assert hook_count(model) == before


# --- calls of callbacks


class Recorder(Callback):
    """Records the calls of the loop, and stops it after ``last_step``."""

    def __init__(self, last_step: int = 3) -> None:
        self.last_step = last_step
        self.steps = 0
        self.calls: list[str] = []

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        self.calls.append("open")
        try:
            yield
        finally:
            self.calls.append("close")

    def on_train_begin(self) -> None:
        self.calls.append("train begins")

    def on_step_begin(self, batch: LocalBatch) -> None:
        assert len(batch.rows) == 2
        self.calls.append("step begins")

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.steps = info.step
        assert result.target_tokens == int(batch.targets.sum())
        assert info.should_stop == result.should_stop
        assert info.is_last == (info.step == 3)
        self.calls.append(f"step {info.step} ends")

    def wants_to_stop(self) -> bool:
        return self.steps + 1 == self.last_step

    def on_train_end(self) -> None:
        self.calls.append("train ends")


def test_a_callback_of_the_user_is_called_around_every_step(train: Callable) -> None:
    recorder = Recorder()

    train("run", [recorder])

    assert recorder.calls == [
        "open",
        "train begins",
        "step begins",
        "step 1 ends",
        "step begins",
        "step 2 ends",
        "step begins",
        "step 3 ends",
        "train ends",
        "close",
    ]


class Whereabouts(Callback):
    """Keeps where the heartbeat says that this process is, in each call of the loop."""

    def __init__(self) -> None:
        self.locations: dict[str, list[str]] = {}

    def setup(self, training: Any) -> None:
        self.phases = training._context.engine.phases


def keep_location(name: str) -> Callable:
    """Return a method of that name which keeps the location."""

    def method(self: Whereabouts, *arguments: object) -> object:
        self.locations.setdefault(name, []).append(self.phases.location)
        return getattr(Callback, name)(self, *arguments)

    return method


def test_a_callback_that_hangs_is_named_with_its_method_and_the_steps_made(
    train_gpt: Callable,
) -> None:
    steps_made = {
        "on_train_begin": [0],
        "on_step_begin": range(12),
        "wants_to_stop": range(12),
        "on_step_end": range(1, 13),
        "on_step_result": range(1, 13),
        "on_evaluate": range(0, 13, 4),
        # The norm of the weights, and the first evaluation; then steps and evaluations.
        "on_log": [0, 0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 12],
        "on_train_end": [12],
    }
    for name in steps_made:
        setattr(Whereabouts, name, keep_location(name))
    whereabouts = Whereabouts()

    train_gpt(callbacks=[whereabouts])

    assert "Whereabouts" not in whereabouts.phases.location
    assert whereabouts.locations == {
        name: [f"Whereabouts.{name} after step {step}" for step in steps]
        for name, steps in steps_made.items()
    }


def test_a_callback_may_stop_the_run_which_is_saved(train: Callable, tmp_path: Path) -> None:
    recorder = Recorder(last_step=2)

    train("run", [recorder])

    assert recorder.calls[-3:] == ["step 2 ends", "train ends", "close"]
    status = read_json(tmp_path / "run" / "status.json")
    assert status["state"] == "preempted"
    assert status["step"] == 2


@pytest.mark.usefixtures("failing_steps")
def test_the_context_of_a_callback_is_closed_after_an_error(train: Callable) -> None:
    recorder = Recorder()

    with pytest.raises(CrashError):
        train("run", [recorder])

    assert recorder.calls == ["open", "train begins", "step begins", "close"]


class Disturb(Callback):
    """Makes all weights much larger after a step, as a divergence does."""

    fingerprint = None

    def setup(self, training: Any) -> None:
        self.model = training.model

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step == 5:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(30)


@pytest.mark.parametrize("callbacks", [[], [Disturb()]], ids=["healthy", "diverging"])
def test_a_run_that_diverges_finishes_with_one_event_and_one_line(
    train_gpt: Callable,
    callbacks: list[Callback],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    run = train_gpt(callbacks=callbacks)

    assert run.is_finished
    events = [
        event["text"]
        for event in read_lines(tmp_path / "run" / "events.jsonl")
        if event["kind"] == "rising"
    ]
    lines = re.findall("(?m)^rising +(.*)$", capsys.readouterr().out)
    assert events == lines
    assert len(lines) == len(callbacks)
    for line in lines:
        assert re.match(r"the train loss is [\d.]+ and has stayed above its start, 5\.\d+", line)


# --- log entries


class LogRecorder(Callback):
    """Keeps the numbers of each log entry."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, dict[str, float]]] = []

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.entries.append((step, dict(metrics)))


def test_a_callback_gets_the_numbers_of_each_log_entry(train: Callable, tmp_path: Path) -> None:
    recorder = LogRecorder()

    train("run", [recorder])

    logged = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert recorder.entries == [(entry["step"], as_numbers(entry)) for entry in logged]

    names = set()
    for _, metrics in recorder.entries:
        names |= metrics.keys()
    assert {"epoch", "train/loss", "train/grad_norm", "train/learning_rate"} <= names
    assert "phases" not in names


def test_the_callbacks_of_the_loop_get_each_log_entry_too(
    train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(Finish, "on_log", lambda self, step, metrics: steps.append(step))
    recorder = LogRecorder()

    train("run", [recorder])

    assert steps == [step for step, _ in recorder.entries]
    assert steps


# --- the end of a run


def test_a_run_is_finished_as_soon_as_its_model_is_written(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(periodic, "final_sample", interrupt)

    with pytest.raises(KeyboardInterrupt):
        train("run")

    status = read_json(tmp_path / "run" / "status.json")
    assert status["state"] == "finished"
    assert status["step"] == 3


# --- the accelerator


def test_an_accelerator_that_llmtrain_has_not_made_is_refused() -> None:
    with pytest.raises(UserError, match=r"needs the Accelerator that llmtrain\.start\(\) makes"):
        check_wrapping(Accelerator(cpu=True), nn.Linear(2, 2))
