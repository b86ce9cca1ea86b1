import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from llmtrain.files import drop_lines_after
from llmtrain.parallel.ranks import Ranks
from llmtrain.record import tracking
from llmtrain.record.trackers.tracker import Position, TrackedRun, Tracker
from llmtrain.record.tracking import Metrics
from tests.launching import read_json
from tests.waiting import wait_until


class Fake(Tracker):
    """Stands for a tracker; ``behave`` is called with each step that it gets."""

    def __init__(self, name: str, behave: Callable[[int], Any] = lambda step: None) -> None:
        super().__init__(name, TrackedRun(Path(), "run", "abcd1234"))
        self.behave = behave
        self.inner = self
        self.told: list[dict[str, float]] = []
        self.samples: list[tuple[int, int]] = []
        self.checkpoints: list[str] = []
        self.finished = threading.Event()

    def open(self) -> None: ...

    def log(self, numbers: dict[str, float]) -> None:
        self.behave(int(numbers["step"]))
        self.told.append({name: value for name, value in numbers.items() if name != "hours"})

    def log_samples(self, samples: list[dict[str, Any]], step: int) -> None:
        self.samples.append((len(samples), step))

    def log_checkpoint(self, path: Path) -> None:
        self.behave(-1)
        self.checkpoints.append(path.name)

    def finish(self, exit_code: int, model: Path | None) -> None:
        self.exit_code = exit_code
        self.model = model
        self.finished.set()


@pytest.fixture
def opened(accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Metrics in ``tmp_path`` with these trackers, by name."""

    def go(model_seconds: float = 1500, **trackers: Any) -> Metrics:
        monkeypatch.setattr(Metrics, "_tracker", lambda self, name, run: trackers[name])
        metrics = Metrics(Ranks(accelerator), tmp_path, model_seconds)
        metrics.start(list(trackers), TrackedRun(tmp_path, "run", "abcd1234"))
        return metrics

    return go


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """The event that a stalled tracker waits for; set when the test is over, so that its thread ends."""
    event = threading.Event()
    yield event
    event.set()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_trackers_are_told_every_reading_and_how_the_run_ended(opened, tmp_path: Path) -> None:
    wandb, tensorboard = Fake("wandb"), Fake("tensorboard")
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(1000):
        metrics.write({"step": step, "train/loss": step / 3})
    metrics.close(exit_code=1)
    assert wandb.told == tensorboard.told == lines(tmp_path)
    assert wandb.told[-1] == {"step": 999, "train/loss": 333.0}
    assert wandb.exit_code == 1
    assert tensorboard.finished.is_set()


def test_trackers_are_sent_the_largest_value_of_any_rank(opened) -> None:
    """The rank that will run out of memory first, and the one that the others wait for."""
    wandb = Fake("wandb")
    metrics = opened(wandb=wandb)
    metrics.write(
        {
            "step": 1,
            "memory": {"cuda": [10.0, 79.0], "host": [4.0, 2.0]},
            "phases": {"forward": [0.1, 0.5]},
        }
    )
    metrics.close(exit_code=0)

    (sent,) = wandb.told
    assert sent == {"step": 1, "memory/cuda": 79.0, "memory/host": 4.0, "phases/forward": 0.5}


def test_a_tracker_that_stalls_holds_up_neither_the_run_nor_another_tracker(
    opened,
    never: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 2)
    wandb, tensorboard = Fake("wandb", lambda _: never.wait()), Fake("tensorboard")
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(100):  # ends only if no write waits
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=0)
    assert not never.is_set()
    assert len(lines(tmp_path)) == len(tensorboard.told) == 100
    assert tensorboard.finished.is_set()
    assert not wandb.finished.is_set()
    said = capsys.readouterr().err
    assert (
        said == "note: wandb: no answer in 2 s, so it is abandoned; metrics.jsonl has everything.\n"
    )


def test_a_tracker_that_never_finishes_is_left_behind(
    opened, never: threading.Event, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(tracking, "_CLOSE_SECONDS", 1)
    wandb = Fake("wandb")
    monkeypatch.setattr(wandb, "finish", lambda *_: never.wait())
    opened(wandb=wandb).close(exit_code=0)
    assert capsys.readouterr().err.count("abandoned") == 1


def test_a_tracker_that_raises_is_told_nothing_more_and_no_other_notices(
    opened, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    wandb = Fake("wandb", lambda step: 1 / (step - 2))
    tensorboard = Fake("tensorboard")
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    for step in range(5):
        metrics.write({"step": step, "train/loss": 1.0})
    metrics.close(exit_code=0)
    assert [line["step"] for line in wandb.told] == [0, 1]
    assert len(tensorboard.told) == len(lines(tmp_path)) == 5
    assert wandb.finished.is_set()
    said = capsys.readouterr().err
    assert (
        said == "note: wandb: tracking stopped: division by zero; metrics.jsonl is still written.\n"
    )


def test_a_tracker_that_does_not_open_is_left_out(
    opened,
    never: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setattr(tracking, "_START_SECONDS", 1)
    wandb, tensorboard = Fake("wandb"), Fake("tensorboard")
    monkeypatch.setattr(wandb, "open", never.wait)
    metrics = opened(wandb=wandb, tensorboard=tensorboard)
    assert capsys.readouterr().err == (
        "note: wandb: tracking is off: no answer in 1 s; metrics.jsonl has everything.\n"
    )
    metrics.write({"step": 1})
    metrics.close(exit_code=0)
    assert tensorboard.told == [{"step": 1}]
    never.set()  # it opens, too late
    assert wandb.finished.wait(10)
    assert wandb.told == []


def test_a_tracker_is_sent_the_entries_that_it_lacks(opened, tmp_path: Path) -> None:
    """A start may resume a run, or extend another one, whose entries come first."""
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "a": 1}}\n' for step in (0, 0, 1, 2, 3, 3))
    )
    has_some, has_none = Fake("wandb"), Fake("tensorboard")
    has_some.has = lambda position: position <= Position(step=3, number=1)
    metrics = opened(wandb=has_some, tensorboard=has_none)
    metrics.write({"step": 4, "a": float("nan")})
    metrics.close(exit_code=0)
    assert [line["step"] for line in has_some.told] == [3, 4]
    assert has_some.told[-1]["a"] != has_some.told[-1]["a"]
    assert [line["step"] for line in has_none.told] == [0, 0, 1, 2, 3, 3, 4]


def test_samples_are_sent_when_there_are_new_ones(opened, tmp_path: Path) -> None:
    fake = Fake("wandb")
    metrics = opened(wandb=fake)
    path = tmp_path / "samples.jsonl"
    for step in (10, 20):
        metrics.write({"step": step, "eval/loss": 1.0})
        with path.open("a") as file:
            file.write(f'{{"step": {step}, "prompt": "The", "text": "The kernel"}}\n')
        metrics.wake()
        wait_until(lambda step=step: fake.samples[-1:] == [(step // 10, step)])
    metrics.write({"step": 30})
    metrics.close(exit_code=0)
    assert fake.samples == [(1, 10), (2, 20)]


def test_a_checkpoint_that_cannot_be_sent_does_not_stop_the_tracker(
    opened, capsys: pytest.CaptureFixture
) -> None:
    def behave(step: int) -> None:
        if step == -1:
            raise OSError("it was deleted")

    fails, gets = Fake("wandb", behave), Fake("mlflow")
    metrics = opened(wandb=fails, mlflow=gets)
    metrics.send_checkpoint(Path("checkpoints/step-00000010"))
    metrics.write({"step": 11})
    metrics.close(exit_code=0)
    assert gets.checkpoints == ["step-00000010"]
    assert len(fails.told) == len(gets.told) == 1
    assert capsys.readouterr().err == (
        "note: wandb: step-00000010 was not sent: it was deleted; metrics.jsonl has everything.\n"
    )


def test_hours_are_those_of_training(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two starts, at 1000 s and at 9000 s; nothing ran from 2800 s to 9000 s."""
    hours: list[float] = []
    fake = Fake("wandb")
    fake.log = lambda numbers: hours.append(numbers["hours"])
    monkeypatch.setattr(Metrics, "_tracker", lambda self, name, run: fake)
    fake.run = TrackedRun(tmp_path, "run", "abcd1234", start_times=(1000.0, 9000.0))
    metrics = Metrics(Ranks(accelerator), tmp_path)
    metrics.start(["wandb"], fake.run)
    for step, time in enumerate((1000.0, 2800.0, 10800.0)):
        metrics.write({"step": step, "time": time})
    metrics.close(exit_code=0)
    assert hours == [0.0, 0.5, 1.0]


class Recording(GeneralTracker):
    """An Accelerate tracker of any name, which keeps what it gets."""

    name = "any"
    requires_logging_directory = False

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__(_blank=True)
        self.project, self.arguments = project, arguments
        self.calls: list[Any] = []

    @property
    def tracker(self) -> "Recording":
        return self

    def start(self) -> None:
        self.calls.append("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.calls.append(values)

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.calls.append((step, values["train/loss"]))

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("name", ["aim", "clearml", "comet_ml", "dvclive", "swanlab", "my_own"])
def test_any_tracker_of_accelerate_gets_settings_and_entries(
    name: str, accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, Recording)
    metrics = Metrics(Ranks(accelerator), tmp_path)
    run = TrackedRun(tmp_path, "run", "abcd1234", config={"seed": 3, "files": ["a", "b"]})
    metrics.start([name], run)
    [inner] = accelerator.trackers
    metrics.write({"step": 1, "train/loss": 2.5})
    metrics.close(exit_code=0)
    assert inner.project == "llmtrain"
    assert inner.calls == ["start", {"seed": 3, "files": "['a', 'b']"}, (1, 2.5), "finish"]
    assert accelerator.trackers == []


def tensorboard_scalars(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    # Two files of the same second are read in the order of their names, where 10 is before 9.
    return sorted((event.step, event.value) for event in events.Scalars("train/loss"))


def test_tensorboard_has_each_entry_once_after_a_kill_and_a_resume(
    accelerator: Accelerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is killed after step 4 and resumes from step 2, so steps 3 and 4 are made twice."""
    monkeypatch.setenv("WANDB_PROJECT", "something")
    run = TrackedRun(tmp_path, "run", "abcd1234", config={"seed": 3})
    killed = Metrics(Ranks(accelerator), tmp_path)
    killed.start(["tensorboard"], run)
    for step in (1, 2, 3, 4):
        killed.write({"step": step, "train/loss": step / 4})
    # Nothing closes this one.
    wait_until(lambda: read_json(tmp_path / "trackers/tensorboard.json")["step"] == 4)

    drop_lines_after(tmp_path / "metrics.jsonl", 2)
    resumed = Metrics(Ranks(accelerator), tmp_path)
    resumed.start(["tensorboard"], run)
    for step in (3, 4, 5):
        resumed.write({"step": step, "train/loss": step / 4})
    resumed.close(exit_code=0)
    killed.close(exit_code=0)
    assert tensorboard_scalars(tmp_path / "tensorboard") == [
        (step, step / 4) for step in (1, 2, 3, 4, 5)
    ]
    assert not (tmp_path / "something").exists()
    assert len(list(tmp_path.rglob("hparams.yml"))) == 1


def test_a_model_is_sent_for_no_longer_than_the_other_processes_wait(
    opened,
    never: threading.Event,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    wandb = Fake("wandb")
    monkeypatch.setattr(wandb, "finish", lambda *_: never.wait())
    (tmp_path / "model").mkdir()
    opened(model_seconds=1, wandb=wandb).close(exit_code=0, model=tmp_path / "model")
    assert "no answer in 1 s, so it is abandoned" in capsys.readouterr().err


def test_a_model_that_is_to_be_sent_and_is_not_is_told(
    opened, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_LOG_MODEL", "end")
    opened(tensorboard=Fake("tensorboard")).close(exit_code=0)
    assert capsys.readouterr().err == (
        "note: WANDB_LOG_MODEL is set, but the model is not sent: that needs --report_to wandb.\n"
    )


def test_half_a_line_is_not_sent(opened, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, ')
    wandb = Fake("wandb")
    opened(wandb=wandb).close(exit_code=0)
    assert wandb.told == [{"step": 0, "a": 1}]
    assert capsys.readouterr().err == ""
