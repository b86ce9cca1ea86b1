"""Trackers get each step once, and none of them can hold up or stop a run."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmtrain.files import copy_lines_up_to, write_json
from llmtrain.parallel.ranks import ranks_of
from llmtrain.record import tracking
from llmtrain.record.trackers.tracker import TrackedRun
from llmtrain.record.tracking import MetricsLog
from tests.launching import read_json
from tests.waiting import wait_until


class FakeTracker(GeneralTracker):
    """Keeps everything it is sent. It stands for its class, which Accelerate would call.

    Args:
        name: its name in notes.
        before_log: called with the step of each log entry, and may block or raise.
    """

    requires_logging_directory = False
    tracker = None

    def __init__(self, name: str, before_log: Callable[[int], object] = lambda step: None) -> None:
        self.name = name
        self.before_log = before_log
        self.entries: list[dict[str, float]] = []
        self.finished = threading.Event()

    def __call__(self, project: str) -> "FakeTracker":
        return self

    @property
    def steps(self) -> list[float]:
        return [entry["step"] for entry in self.entries]

    def log(self, values: dict[str, float], step: int | None = None, **_: object) -> None:
        assert step == values["step"]
        self.before_log(step)
        self.entries.append(dict(values))

    def finish(self) -> None:
        self.finished.set()


@pytest.fixture
def start(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that opens the metrics of a run in ``tmp_path``, with the given trackers."""

    def start(*trackers: FakeTracker, **arguments: Any) -> MetricsLog:
        for tracker in trackers:
            monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, tracker.name, tracker)
        metrics = MetricsLog(ranks_of(accelerator), tmp_path, **arguments)
        run = TrackedRun(tmp_path, "run", "abcd1234")
        metrics.start([tracker.name for tracker in trackers], run)
        return metrics

    return start


@pytest.fixture
def end_of_test() -> Iterator[threading.Event]:
    """An event for a tracker to wait for, so that its thread ends with the test."""
    event = threading.Event()
    yield event
    event.set()


def entries_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- what trackers get


def test_a_step_is_sent_once_with_the_largest_value_of_all_ranks(start) -> None:
    """It belongs to the rank that the others wait for, or that runs out of memory first."""
    tracker = FakeTracker("tracker")
    metrics = start(tracker)

    memory = {"cuda": [10.0, 79.0], "host": [4.0, 2.0]}
    metrics.write({"step": 1, "train/loss": math.nan, "memory": memory, "time": 1000.0})
    metrics.write({"step": 1, "eval/loss": 2.0, "time": 1000.0})
    metrics.close(exit_code=0)

    [entry] = tracker.entries
    assert math.isnan(entry.pop("train/loss"))
    constants = {"step": 1, "time": 1000.0}
    assert entry == constants | {"memory/cuda": 79.0, "memory/host": 4.0, "eval/loss": 2.0}

    resumed = start(tracker)
    resumed.write({"step": 2, "time": 9000.0})
    resumed.close(exit_code=0)

    assert tracker.steps == [1, 2]


# --- trackers that fail or stall


def test_trackers_that_fail_or_stall_disturb_neither_the_run_nor_others(
    start,
    end_of_test: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_START_SECONDS", 1)
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 2)
    stalls = FakeTracker("stalls", before_log=lambda step: end_of_test.wait())
    fails_at_2 = FakeTracker("fails", before_log=lambda step: 1 / (step - 2))
    opens_late = FakeTracker("opens late")
    opens_late.start = end_of_test.wait
    healthy = FakeTracker("healthy")
    metrics = start(stalls, fails_at_2, opens_late, healthy)

    for step in range(100):  # this loop ends only if no write waits for a tracker
        metrics.write({"step": step, "train/loss": 1.0, "time": 1000.0})
    metrics.close(exit_code=1)

    steps = [*range(100)]
    assert [entry["step"] for entry in entries_in(tmp_path)] == steps
    assert healthy.steps == steps
    assert healthy.finished.is_set()
    assert fails_at_2.steps == [0, 1]
    assert read_json(tmp_path / "trackers/fails.json")["step"] == 1
    assert not stalls.finished.is_set()

    end_of_test.set()  # now one opens: the file still has everything
    assert opens_late.finished.wait(10)
    assert opens_late.steps == steps

    notes = capsys.readouterr().err.splitlines()
    assert sorted(notes) == [
        "note: fails: tracking stopped: division by zero; metrics.jsonl has everything.",
        "note: opens late: no answer in 1 s; it gets all entries later.",
        "note: opens late: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.",
        "note: stalls: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.",
    ]


def test_sending_the_model_takes_no_longer_than_other_ranks_wait(
    start,
    end_of_test: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    tracker = FakeTracker("tracker")
    tracker.finish = end_of_test.wait
    (tmp_path / "model").mkdir()

    start(tracker, model_seconds=1).close(exit_code=0, model=tmp_path / "model")

    assert capsys.readouterr().err.count("no answer in 1 s, so it is abandoned") == 1


# --- a real tracker


def tensorboard_losses(folder: Path) -> list[tuple[int, float]]:
    """Return the steps and training losses that TensorBoard reads, sorted by step."""
    events = EventAccumulator(str(folder))
    events.Reload()
    # Two files of the same second are read in the order of their names, in which 10 is before 9.
    return sorted((event.step, event.value) for event in events.Scalars("train/loss"))


def test_tensorboard_has_each_entry_once_after_a_kill_and_a_resume(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed in step 5, right after TensorBoard got step 4, and resumes from step 2."""
    monkeypatch.setenv("WANDB_PROJECT", "something")
    run = TrackedRun(tmp_path, "run", "abcd1234", config={"seed": 3})

    def start_run() -> MetricsLog:
        metrics = MetricsLog(ranks_of(accelerator), tmp_path)
        metrics.start(["tensorboard"], run)
        return metrics

    def write(metrics: MetricsLog, steps: list[int]) -> None:
        for step in steps:
            metrics.write({"step": step, "train/loss": step / 4, "time": 1000.0})

    killed = start_run()
    write(killed, [1, 2, 3, 4, 5])
    state = tmp_path / "trackers/tensorboard.json"
    wait_until(lambda: read_json(state)["step"] == 4)
    write_json(state, {"step": 3})

    copy_lines_up_to(tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl", step=2)
    resumed = start_run()
    write(resumed, [3, 4, 5])
    resumed.close(exit_code=0)
    killed.close(exit_code=0)  # only now, to end its thread

    losses = tensorboard_losses(tmp_path / "tensorboard")
    assert losses == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.25)]
    assert not (tmp_path / "something").exists()
    assert len([*tmp_path.rglob("hparams.yml")]) == 1
