"""Metrics: ``metrics.jsonl`` is the truth, Accelerate's trackers (Weights & Biases, TensorBoard) mirror it."""

import contextlib
import json
import logging
import math
import netrc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, filter_trackers

from llmtrain.console import note, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import append_json_line
from llmtrain.record.history import read_lines
from llmtrain.secrets import redacted

TRACKERS = ("wandb", "tensorboard")
T = TypeVar("T")

_INIT_SECONDS = 30  # W&B's own, of one attempt
_START_SECONDS = 120  # a tracker with all its attempts
_CLOSE_SECONDS = 60  # all trackers
_MODEL_SECONDS = 1500  # the same, where the model is sent, too; never more than processes wait for each other
_BEST_IS_LOWEST = ("eval/loss", "eval/perplexity", "eval/bits_per_byte")
_OFFLINE = {"mode": "offline", "resume": None}  # holds the whole history: synced, it replaces what is there
_HAS_EVERYTHING = "metrics.jsonl has everything."


def tracker_names(report_to: list[str]) -> list[str]:
    """The trackers that ``--report_to`` asks for; raises :class:`UserError` for one that is unknown or not there."""
    names = [name for name in report_to if name != "none"]
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"--report_to {name}: llmtrain reports to {', '.join(TRACKERS)} or none.")
    if "none" in report_to and names:
        raise UserError(f"--report_to none and {' '.join(names)} contradict each other.")
    if "tensorboard" in names and not filter_trackers(["tensorboard"], "."):
        raise UserError("--report_to tensorboard needs it installed: pip install 'llmtrain[tensorboard]'.")
    return names


class Metrics:
    """Writes a line of ``metrics.jsonl`` a reading; the trackers follow at their own pace. Used on every process."""

    def __init__(self, accelerator: Accelerator, folder: Path, log_model: bool = False) -> None:
        self.accelerator, self.path, self.log_model = accelerator, folder / "metrics.jsonl", log_model
        self.model_seconds = min(_MODEL_SECONDS, accelerator.ddp_handler.config.ddp_timeout)
        self.mirrors: list[_Mirror] = []

    def start(self, names: list[str], settings: dict[str, Any], run_name: str, run_id: str) -> None:
        """Open the trackers, on the main process; one that cannot be opened is left out, with one line."""
        self.accelerator.project_configuration.set_directories(str(self.path.parent))
        if not self.accelerator.is_main_process:
            return
        logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
        plain = {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in redacted(settings).items()}
        opening = {
            "wandb": lambda: self._open_wandb(plain, run_name, run_id),
            "tensorboard": lambda: self._open("tensorboard", plain, {}),
        }
        for name in names:
            try:
                self.mirrors.append(_Mirror(_within(_START_SECONDS, opening[name]), self.path))
            except Exception as error:  # a tracker's trouble is not the run's
                _note(f"{name}: tracking is off: {first_line(error)}; {_HAS_EVERYTHING}")
        self.accelerator.trackers = [mirror.tracker for mirror in self.mirrors]

    def _open(self, name: str, settings: dict[str, Any], init: dict[str, Any]) -> GeneralTracker:
        self.accelerator.log_with, self.accelerator.trackers = filter_trackers([name], str(self.path.parent)), []
        project = os.environ.get("WANDB_PROJECT", "llmtrain")
        self.accelerator.init_trackers(project, config=settings, init_kwargs={name: init})
        return self.accelerator.trackers[0]

    def _open_wandb(self, settings: dict[str, Any], run_name: str, run_id: str) -> GeneralTracker:
        patience = self.model_seconds if self.log_model else _CLOSE_SECONDS
        init = _wandb_settings(self.path.parent, run_name, run_id, patience)
        with _command_line(redacted(sys.argv)):  # W&B sends it
            try:
                tracker = self._open("wandb", settings, init)
            except Exception as error:
                if init["mode"] == "offline":
                    raise
                _note(f"W&B does not answer ({first_line(error)}); logging offline.")
                init |= _OFFLINE
                _forget_wandb()
                tracker = self._open("wandb", settings, init)
        for key in _BEST_IS_LOWEST:
            tracker.tracker.define_metric(key, summary="min")
        _say_where(tracker.tracker, init["mode"])
        return tracker

    def write(self, reading: dict[str, Any]) -> None:
        """One reading; ``step`` is part of it. Only the main process writes. Waits for no tracker."""
        if not self.accelerator.is_main_process:
            return
        append_json_line(self.path, reading)
        for mirror in self.mirrors:
            mirror.news.set()

    def close(self, exit_code: int, model: Path | None = None) -> None:
        """Send what is left, and the finished ``model`` where that was asked for, and finish the trackers' runs; one
        that does not get there in time is left behind."""
        model = model if self.log_model else None
        patience = _CLOSE_SECONDS if model is None else self.model_seconds
        for mirror in self.mirrors:
            mirror.end(exit_code, model)
        until = time.monotonic() + patience
        for mirror in self.mirrors:
            mirror.thread.join(max(0.0, until - time.monotonic()))
            if mirror.thread.is_alive():
                _note(f"{mirror.tracker.name}: no answer in {patience} s, left behind; {_HAS_EVERYTHING}")
        self.mirrors, self.accelerator.trackers = [], []


class _Mirror:
    """One tracker and the thread that feeds it. The queue between the run and the tracker is ``metrics.jsonl`` itself:
    a tracker that stalls costs no memory, and W&B, which comes back to a run, is sent what it lacks."""

    def __init__(self, tracker: GeneralTracker, path: Path) -> None:
        self.tracker, self.path = tracker, path
        self.at, self.first_step = 0, 0  # the byte to read next; the first step that the tracker does not have
        if tracker.name == "wandb":
            self.first_step = tracker.tracker.starting_step  # 0 offline, where every start has a file of its own
        elif path.exists():
            self.at = path.stat().st_size  # an earlier start's event files lie in the same folder
        self.news, self.ending, self.exit_code = threading.Event(), threading.Event(), 0
        self.model: Path | None = None  # that is sent at the end
        self.news.set()
        self.thread = threading.Thread(target=self._live, name=f"llmtrain-{tracker.name}", daemon=True)
        self.thread.start()

    def end(self, exit_code: int, model: Path | None) -> None:
        """Have it send what is left and finish; waits for nothing."""
        self.exit_code, self.model = exit_code, model
        self.ending.set()
        self.news.set()

    def _live(self) -> None:
        try:
            self._follow()
        except Exception as error:
            _note(f"{self.tracker.name}: tracking stopped: {first_line(error)}; metrics.jsonl goes on.")
        self.ending.wait()
        try:
            if self.tracker.name == "wandb":
                self._send_what_was_made()
                self.tracker.tracker.finish(exit_code=self.exit_code)
                _forget_wandb()  # which waits until its file is whole; finish does not
            else:
                self.tracker.finish()
        except Exception as error:
            _note(f"closing {self.tracker.name}: {first_line(error)}; {_HAS_EVERYTHING}")

    def _send_what_was_made(self) -> None:
        try:
            _send_samples(self.tracker.tracker, self.path.with_name("samples.jsonl"))
            if self.model is not None:
                _send_model(self.tracker.tracker, self.model)
        except Exception as error:  # the rest is still to be finished
            _note(f"{self.tracker.name}: {first_line(error)}; the run's folder has everything.")

    def _follow(self) -> None:
        last = False
        while not last:
            self.news.wait()
            self.news.clear()
            last = self.ending.is_set()  # asked before the file is read: all that was written until then is sent
            if self.path.exists():
                self._send_lines()

    def _send_lines(self) -> None:
        with self.path.open("rb") as file:
            file.seek(self.at)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self.at += len(line)
                reading = _as_numbers(json.loads(line))
                if reading["step"] >= self.first_step:
                    self.tracker.log(reading, step=reading["step"])


def _send_samples(run: Any, path: Path) -> None:
    """What the model wrote, as a table."""
    import wandb

    lines = read_lines(path)
    if lines:
        columns: list[str | int] = ["step", "prompt", "text"]
        run.log({"samples": wandb.Table(columns, [[line.get(str(name)) for name in columns] for line in lines])})


def _send_model(run: Any, folder: Path) -> None:
    import wandb

    artifact = wandb.Artifact(f"model-{run.id}", type="model")
    artifact.add_dir(str(folder))
    run.log_artifact(artifact)


def _as_numbers(reading: dict[str, Any]) -> dict[str, float]:
    """What a tracker can plot: of values by rank the mean; and null, where JSON has no word, is not a number."""
    numbers: dict[str, float] = {}
    for key, value in reading.items():
        if isinstance(value, dict):
            numbers |= {f"{key}/{name}": statistics.mean(ranks) for name, ranks in value.items()}
        elif not isinstance(value, str):
            numbers[key] = math.nan if value is None else value
    return numbers


def _within(seconds: float, action: Callable[[], T]) -> T:
    """What ``action`` returns or raises; after so many seconds it is left behind on its thread."""
    future: Future[T] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer in {seconds} s")
    return future.result()


@contextlib.contextmanager
def _command_line(words: list[str]) -> Iterator[None]:
    true, sys.argv = sys.argv, words
    try:
        yield
    finally:
        sys.argv = true


def _note(message: str) -> None:
    note(redacted(message))  # errors quote URLs


def _say_where(run: Any, mode: str | None) -> None:
    if mode == "offline":
        where = Path(run.settings.sync_dir)
        with contextlib.suppress(ValueError):
            where = where.relative_to(Path.cwd())
        why = "offline" if os.environ.get("WANDB_MODE") or _logged_in() else "not logged in, so logging offline"
        say("wandb", f"{why}; later: wandb login && wandb sync {where}")
    elif run.url:
        say("wandb", redacted(run.url))


def _wandb_settings(folder: Path, run_name: str, run_id: str, patience: float) -> dict[str, Any]:
    import wandb

    mode = os.environ.get("WANDB_MODE") or (None if _logged_in() else "offline")
    return {
        "dir": str(folder),
        "name": run_name,
        "id": run_id,
        **(_OFFLINE if mode == "offline" else {"mode": mode, "resume": "allow"}),
        "settings": wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=max(patience - 10, 1),  # what W&B ends itself says more than what is left behind
            finish_timeout_raises=True,
        ),
    }


def _forget_wandb() -> None:
    """End W&B's own service process, which still holds the run id of an init that failed, and wait for it."""
    import wandb

    wandb.teardown()


def _logged_in() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import wandb

    settings = wandb.setup().settings
    if settings.api_key:
        return True
    host = urlparse(settings.base_url).netloc  # with its port, as W&B writes it
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
