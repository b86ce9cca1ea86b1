"""Trackers get all log entries, and none of them can hold up or stop a run."""

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmtrain.files import copy_lines_up_to
from llmtrain.parallel.ranks import ranks_of
from llmtrain.record import tracking
from llmtrain.record.trackers.tracker import TrackedRun, Tracker
from llmtrain.record.tracking import MetricsLog
from tests.launching import read_json
from tests.waiting import wait_until


class FakeTracker(Tracker):
    """Keeps everything it is sent.

    Args:
        name: its name in notes.
        before_log: called with the step of each log entry, and may block or raise.
    """

    def __init__(self, name: str, before_log: Callable[[int], object] = lambda step: None) -> None:
        super().__init__(name, TrackedRun(Path(), "run", "abcd1234"))
        self.before_log = before_log
        self.inner = self
        self.entries: list[dict[str, float]] = []
        self.checkpoints: list[str] = []
        self.exit_code: int | None = None
        self.finished = threading.Event()

    @property
    def steps(self) -> list[float]:
        return [entry["step"] for entry in self.entries]

    def open(self) -> None: ...

    def log(self, numbers: dict[str, float]) -> None:
        self.before_log(int(numbers["step"]))
        self.entries.append(numbers)

    def log_checkpoint(self, path: Path) -> None:
        self.checkpoints.append(path.name)

    def finish(self, exit_code: int, model: Path | None) -> None:
        self.exit_code = exit_code
        self.finished.set()


@pytest.fixture
def start(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that opens the metrics of a run in ``tmp_path``, with the given trackers."""

    def start(*trackers: FakeTracker, model_seconds: float = 1500) -> MetricsLog:
        by_name = {tracker.name: tracker for tracker in trackers}
        monkeypatch.setattr(MetricsLog, "_tracker", lambda self, name, run: by_name[name])
        metrics = MetricsLog(ranks_of(accelerator), tmp_path, model_seconds)
        metrics.start([*by_name], TrackedRun(tmp_path, "run", "abcd1234"))
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


def test_of_values_of_all_ranks_trackers_get_the_largest(start) -> None:
    """It belongs to the rank that the others wait for, or that runs out of memory first."""
    wandb = FakeTracker("wandb")
    metrics = start(wandb)

    memory = {"cuda": [10.0, 79.0], "host": [4.0, 2.0]}
    metrics.write({"step": 1, "train/loss": math.nan, "memory": memory})
    metrics.close(exit_code=0)

    [entry] = wandb.entries
    assert math.isnan(entry.pop("train/loss"))
    assert entry == {"step": 1, "memory/cuda": 79.0, "memory/host": 4.0}


def test_hours_count_only_the_time_in_which_a_start_was_running(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There were starts at 1000 s and at 9000 s. Nothing ran from 2800 s to 9000 s."""
    wandb = FakeTracker("wandb")
    wandb.run = TrackedRun(Path(), "run", "abcd1234", start_times=(1000.0, 9000.0))
    metrics = start(wandb)

    for step, time in enumerate((1000.0, 2800.0, 10800.0)):
        metrics.write({"step": step, "time": time})
    metrics.close(exit_code=0)

    assert [entry["hours"] for entry in wandb.entries] == [0.0, 0.5, 1.0]


# --- trackers that fail or stall


def test_trackers_that_fail_or_stall_disturb_neither_the_run_nor_others(
    start,
    end_of_test: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("it was deleted")

    monkeypatch.setattr(tracking, "_START_SECONDS", 1)
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 2)
    stalls = FakeTracker("stalls", before_log=lambda step: end_of_test.wait())
    fails_at_2 = FakeTracker("fails", before_log=lambda step: 1 / (step - 2))
    opens_late = FakeTracker("opens late")
    opens_late.open = end_of_test.wait
    refuses_checkpoints = FakeTracker("refuses")
    refuses_checkpoints.log_checkpoint = refuse
    healthy = FakeTracker("healthy")
    metrics = start(stalls, fails_at_2, opens_late, refuses_checkpoints, healthy)

    for step in range(100):  # this loop ends only if no write waits for a tracker
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.send_checkpoint(Path("checkpoints/step-00000010"))
    metrics.write({"step": 100})
    metrics.close(exit_code=1)

    steps = [*range(101)]
    assert [entry["step"] for entry in entries_in(tmp_path)] == steps
    assert healthy.steps == steps
    assert healthy.checkpoints == ["step-00000010"]
    assert healthy.exit_code == 1
    assert refuses_checkpoints.steps == steps
    assert fails_at_2.steps == [0, 1]
    assert fails_at_2.finished.is_set()
    assert not stalls.finished.is_set()

    end_of_test.set()  # now one opens, too late
    assert opens_late.finished.wait(10)
    assert opens_late.entries == []

    notes = capsys.readouterr().err.splitlines()
    assert sorted(notes) == [
        "note: fails: tracking stopped: division by zero; metrics.jsonl is still written.",
        "note: opens late: tracking is off: no answer in 1 s; metrics.jsonl has everything.",
        "note: refuses: step-00000010 was not sent: it was deleted; metrics.jsonl has everything.",
        "note: stalls: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.",
    ]


def test_sending_the_model_takes_no_longer_than_other_ranks_wait(
    start,
    end_of_test: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    wandb = FakeTracker("wandb")
    wandb.finish = lambda exit_code, model: end_of_test.wait()
    (tmp_path / "model").mkdir()

    start(wandb, model_seconds=1).close(exit_code=0, model=tmp_path / "model")

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
    """The run is killed after step 4 and resumes from step 2, so steps 3 and 4 are made twice."""
    monkeypatch.setenv("WANDB_PROJECT", "something")
    run = TrackedRun(tmp_path, "run", "abcd1234", config={"seed": 3})

    def start_run() -> MetricsLog:
        metrics = MetricsLog(ranks_of(accelerator), tmp_path)
        metrics.start(["tensorboard"], run)
        return metrics

    def write(metrics: MetricsLog, steps: list[int]) -> None:
        for step in steps:
            metrics.write({"step": step, "train/loss": step / 4})

    killed = start_run()
    write(killed, [1, 2, 3, 4])
    wait_until(lambda: read_json(tmp_path / "trackers/tensorboard.json")["step"] == 4)

    copy_lines_up_to(tmp_path / "metrics.jsonl", tmp_path / "metrics.jsonl", step=2)
    resumed = start_run()
    write(resumed, [3, 4, 5])
    resumed.close(exit_code=0)
    killed.close(exit_code=0)  # only now, to end its thread

    losses = tensorboard_losses(tmp_path / "tensorboard")
    assert losses == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.25)]
    assert not (tmp_path / "something").exists()
    assert len([*tmp_path.rglob("hparams.yml")]) == 1
