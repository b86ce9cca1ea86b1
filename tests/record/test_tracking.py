"""Trackers get all log entries, and none of them can hold up or stop a run."""

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

from llmtrain.files import copy_lines_up_to
from llmtrain.parallel.ranks import Ranks
from llmtrain.record import tracking
from llmtrain.record.trackers.tracker import TrackedRun, Tracker
from llmtrain.record.tracking import Metrics
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

    def start(*trackers: FakeTracker, model_seconds: float = 1500) -> Metrics:
        by_name = {tracker.name: tracker for tracker in trackers}
        monkeypatch.setattr(Metrics, "_tracker", lambda self, name, run: by_name[name])
        metrics = Metrics(Ranks(accelerator), tmp_path, model_seconds)
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

    metrics.write(
        {
            "step": 1,
            "train/loss": math.nan,
            "memory": {"cuda": [10.0, 79.0], "host": [4.0, 2.0]},
            "phases": {"forward": [0.1, 0.5]},
        }
    )
    metrics.close(exit_code=0)

    assert math.isnan(wandb.entries[0].pop("train/loss"))
    assert wandb.entries == [
        {"step": 1, "memory/cuda": 79.0, "memory/host": 4.0, "phases/forward": 0.5}
    ]


def test_a_line_that_is_still_being_written_is_not_sent(
    start, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, ')
    wandb = FakeTracker("wandb")

    start(wandb).close(exit_code=0)

    assert wandb.entries == [{"step": 0, "a": 1}]
    assert capsys.readouterr().err == ""


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


def test_a_tracker_that_stalls_delays_neither_the_run_nor_other_trackers(
    start,
    end_of_test: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 2)
    stalled = FakeTracker("wandb", before_log=lambda step: end_of_test.wait())
    tensorboard = FakeTracker("tensorboard")
    metrics = start(stalled, tensorboard)

    for step in range(100):  # this loop ends only if no write waits for W&B
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=0)

    steps = [*range(100)]
    assert [entry["step"] for entry in entries_in(tmp_path)] == steps
    assert tensorboard.steps == steps
    assert tensorboard.finished.is_set()
    assert not stalled.finished.is_set()
    assert capsys.readouterr().err == (
        "note: wandb: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.\n"
    )


def test_a_tracker_that_raises_an_error_gets_nothing_more(
    start, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    failing = FakeTracker("wandb", before_log=lambda step: 1 / (step - 2))
    tensorboard = FakeTracker("tensorboard")
    metrics = start(failing, tensorboard)

    for step in range(5):
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=1)

    assert failing.steps == [0, 1]
    assert failing.finished.is_set()
    assert tensorboard.steps == [0, 1, 2, 3, 4]
    assert tensorboard.exit_code == 1
    assert len(entries_in(tmp_path)) == 5
    assert capsys.readouterr().err == (
        "note: wandb: tracking stopped: division by zero; metrics.jsonl is still written.\n"
    )


def test_a_tracker_that_does_not_open_in_time_is_left_out(
    start,
    end_of_test: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_START_SECONDS", 1)
    slow = FakeTracker("wandb")
    slow.open = end_of_test.wait
    tensorboard = FakeTracker("tensorboard")

    metrics = start(slow, tensorboard)
    metrics.write({"step": 1})
    metrics.close(exit_code=0)
    end_of_test.set()  # now it opens, too late

    assert slow.finished.wait(10)
    assert slow.entries == []
    assert tensorboard.entries == [{"step": 1}]
    assert capsys.readouterr().err == (
        "note: wandb: tracking is off: no answer in 1 s; metrics.jsonl has everything.\n"
    )


def test_a_tracker_goes_on_after_a_checkpoint_could_not_be_sent(
    start, capsys: pytest.CaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError("it was deleted")

    refusing = FakeTracker("wandb")
    refusing.log_checkpoint = refuse
    mlflow = FakeTracker("mlflow")
    metrics = start(refusing, mlflow)

    metrics.send_checkpoint(Path("checkpoints/step-00000010"))
    metrics.write({"step": 11})
    metrics.close(exit_code=0)

    assert mlflow.checkpoints == ["step-00000010"]
    assert refusing.steps == [11]
    assert mlflow.steps == [11]
    assert capsys.readouterr().err == (
        "note: wandb: step-00000010 was not sent: it was deleted; metrics.jsonl has everything.\n"
    )


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


# --- trackers of Accelerate


class RecordingTracker(GeneralTracker):
    """An Accelerate tracker that keeps the calls it gets."""

    name = "recording"
    requires_logging_directory = False

    def __init__(self, project: str) -> None:
        super().__init__(_blank=True)
        self.project = project
        self.calls: list[Any] = []

    @property
    def tracker(self) -> "RecordingTracker":
        return self

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((step, values["train/loss"]))

    def finish(self) -> None:
        self.calls.append("finish")


def test_any_tracker_of_accelerate_gets_settings_and_entries(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "my_own", RecordingTracker)
    metrics = Metrics(Ranks(accelerator), tmp_path)
    config = {"seed": 3, "files": ["a", "b"]}

    metrics.start(["my_own"], TrackedRun(tmp_path, "run", "abcd1234", config=config))
    (tracker,) = accelerator.trackers
    metrics.write({"step": 1, "train/loss": 2.5})
    metrics.close(exit_code=0)

    assert tracker.project == "llmtrain"
    assert tracker.calls == ["start", {"seed": 3, "files": "['a', 'b']"}, (1, 2.5), "finish"]
    assert accelerator.trackers == []


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

    def start_run() -> Metrics:
        metrics = Metrics(Ranks(accelerator), tmp_path)
        metrics.start(["tensorboard"], run)
        return metrics

    def write(metrics: Metrics, steps: list[int]) -> None:
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
