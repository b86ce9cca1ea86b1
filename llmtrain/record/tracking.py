"""Writes metrics to ``metrics.jsonl``, and mirrors them to Accelerate's trackers.

The file is complete. The trackers (Weights & Biases, TensorBoard) get a copy of its entries, and
may fail.
"""

import contextlib
import functools
import json
import logging
import math
import netrc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from urllib.parse import urlparse

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, filter_trackers

from llmtrain.console import note, say
from llmtrain.errors import first_line
from llmtrain.files import append_json_line
from llmtrain.parallel.ranks import Ranks
from llmtrain.record.history import read_lines
from llmtrain.secrets import redacted
from llmtrain.types import JsonObject

_INIT_SECONDS = 30  # for one attempt of W&B to start
_START_SECONDS = 120  # for a tracker to start, with all its attempts
_CLOSE_SECONDS = 60  # for all trackers to end
_MODEL_SECONDS = 1500  # for all trackers to end, if W&B is also sent the model
_EVENT_FILES = "events.out.tfevents.*"  # the files of TensorBoard
_BEST_IS_LOWEST = ("eval/loss", "eval/perplexity", "eval/bits_per_byte")


def wants_model() -> bool:
    """Return whether W&B is to be sent the finished model, as ``WANDB_LOG_MODEL`` says."""
    return os.environ.get("WANDB_LOG_MODEL", "false").lower() in ("end", "checkpoint", "true")


class Metrics:
    """Writes ``metrics.jsonl``, a line for each log entry. Every rank uses it; rank 0 writes.

    The trackers follow the file at their own pace, each on a separate thread. Training never waits
    for them.

    Args:
        accelerator: the Accelerator of this run.
        folder: the run folder.
        model_seconds: the longest time for sending the model, while the other ranks wait.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, model_seconds: float = _MODEL_SECONDS
    ) -> None:
        self.accelerator = accelerator
        self.ranks = Ranks(accelerator)
        self.path = folder / "metrics.jsonl"
        self.model_seconds = min(_MODEL_SECONDS, model_seconds)
        self.mirrors: list[_Mirror] = []
        self.ending = threading.Event()
        self.exit_code = 0
        self.model: Path | None = None  # the model to send at the end

    def start(self, names: list[str], settings: JsonObject, run_name: str, run_id: str) -> None:
        """Open the trackers, on rank 0. A tracker that cannot be opened is left out, with a note.

        Args:
            names: the names of the trackers, such as ``wandb``.
            settings: the settings of the run, for the trackers to show.
            run_name: the name that W&B shows.
            run_id: the id of the run, by which W&B continues it.
        """
        folders = self.accelerator.project_configuration
        folders.logging_dir = None  # otherwise it stays that of an earlier run of this process
        folders.set_directories(str(self.path.parent))
        if not self.ranks.is_main:
            return
        if wants_model() and "wandb" not in names:
            note("WANDB_LOG_MODEL is set, but the model is not sent: that needs --report_to wandb.")
        logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)

        plain_settings = {}
        for setting, value in redacted(settings).items():
            is_plain = isinstance(value, int | float | str | bool)
            plain_settings[setting] = value if is_plain else str(value)

        for name in names:
            # Opening TensorBoard makes an event file.
            has_event_files = any(self.path.parent.rglob(_EVENT_FILES))
            if name == "wandb":
                opening = functools.partial(self._open_wandb, plain_settings, run_name, run_id)
            else:
                opening = functools.partial(self._open, name, plain_settings, {})
            with _errors_as_notes(f"{name}: tracking is off"):
                tracker = _within(_START_SECONDS, opening)
                self.mirrors.append(_Mirror(tracker, self, has_event_files))
        self.accelerator.trackers = [mirror.tracker for mirror in self.mirrors]

    def _open(self, name: str, settings: JsonObject, init: JsonObject) -> GeneralTracker:
        """Open one of Accelerate's trackers.

        Args:
            name: the name of the tracker.
            settings: the settings of the run.
            init: further arguments of the tracker's own ``init``.
        """
        self.accelerator.log_with = filter_trackers([name], str(self.path.parent))
        self.accelerator.trackers = []
        project = os.environ.get("WANDB_PROJECT", "llmtrain")
        self.accelerator.init_trackers(project, config=settings, init_kwargs={name: init})
        return self.accelerator.trackers[0]

    def _open_wandb(self, settings: JsonObject, run_name: str, run_id: str) -> GeneralTracker:
        """Open a run of W&B: offline if there is no login, or if its server does not answer."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or None
        needs_login = mode is None and not _is_logged_in()
        if needs_login:
            mode = "offline"
        online_init = self._wandb_init(run_name, run_id) | {"mode": mode, "resume": "allow"}
        # Offline, every start logs the whole history: if it is synced, it replaces what W&B has.
        offline_init = online_init | {"mode": "offline", "resume": None}

        with _redacted_command():
            if mode == "offline":
                tracker = self._open("wandb", settings, offline_init)
            else:
                try:
                    tracker = self._open("wandb", settings, online_init)
                except Exception as error:
                    note(f"W&B does not answer ({first_line(error)}); logging offline.")
                    wandb.teardown()  # ends its service process, which still holds the run id
                    tracker = self._open("wandb", settings, offline_init)
                    mode = "offline"

        run: wandb.Run = tracker.tracker
        for key in _BEST_IS_LOWEST:
            run.define_metric(key, summary="min")

        if mode == "offline":
            reason = "not logged in, so logging offline" if needs_login else "offline"
            folder = os.path.relpath(run.settings.sync_dir)
            say("wandb", f"{reason}; to upload it later: wandb login && wandb sync {folder}")
        elif run.url:
            say("wandb", redacted(run.url))
        return tracker

    def _wandb_init(self, run_name: str, run_id: str) -> JsonObject:
        """Return the arguments of ``wandb.init`` that do not depend on the mode."""
        import wandb

        # W&B gives up ten seconds before `close` does, because its error message says more.
        close_seconds = self.model_seconds if wants_model() else _CLOSE_SECONDS
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=max(close_seconds - 10, 1),
            finish_timeout_raises=True,
        )
        return {
            "dir": str(self.path.parent),
            "name": run_name,
            "id": run_id,
            "settings": settings,
        }

    def write(self, entry: JsonObject) -> None:
        """Write a log entry, on rank 0. This waits for no tracker.

        Args:
            entry: the metrics of the entry, and its ``step``.
        """
        if self.ranks.is_main:
            append_json_line(self.path, entry)
        for mirror in self.mirrors:
            mirror.news.set()

    def close(self, exit_code: int, model: Path | None = None) -> None:
        """Send the rest of the entries, and end the trackers' runs.

        A tracker that takes too long is abandoned, with a note.

        Args:
            exit_code: the exit code of the run, for W&B to show.
            model: the finished model. It is sent to W&B if :func:`wants_model` says so.
        """
        self.exit_code = exit_code
        self.model = model if wants_model() else None
        timeout = _CLOSE_SECONDS if self.model is None else self.model_seconds

        self.ending.set()
        for mirror in self.mirrors:
            mirror.news.set()

        deadline = time.monotonic() + timeout
        for mirror in self.mirrors:
            mirror.thread.join(max(0.0, deadline - time.monotonic()))
            if mirror.thread.is_alive():
                note(
                    f"{mirror.tracker.name}: no answer in {timeout} s, so it is abandoned; "
                    "metrics.jsonl has everything."
                )
        self.mirrors = []
        self.accelerator.trackers = []


class _Mirror:
    """A tracker, and the thread that feeds it.

    ``metrics.jsonl`` is the queue between the run and the tracker. So a tracker that stalls costs
    no memory, and a tracker can be sent what it lacks when a run goes on, or extends another one.

    Args:
        tracker: the tracker.
        metrics: writes the file.
        has_event_files: whether TensorBoard has event files of earlier starts.
    """

    def __init__(self, tracker: GeneralTracker, metrics: Metrics, has_event_files: bool) -> None:
        self.tracker = tracker
        self.metrics = metrics
        self.is_wandb = tracker.name == "wandb"
        metrics.path.touch()
        if self.is_wandb:
            # W&B has the steps before `starting_step`. Offline, it has none: every start writes a
            # new file.
            self.first_step = tracker.tracker.starting_step
            self.first_byte = 0
        else:
            # TensorBoard reads the event files of all starts in one folder. So it lacks only what
            # is written from now on. Without such a file it lacks everything.
            self.first_step = 0
            self.first_byte = metrics.path.stat().st_size if has_event_files else 0

        self.news = threading.Event()  # there are new lines, or the run ends
        self.thread = threading.Thread(
            target=self._run, name=f"llmtrain-{tracker.name}", daemon=True
        )
        self.thread.start()

    def _run(self) -> None:
        """Feed the tracker until the run ends, then end the tracker's run."""
        name = self.tracker.name
        with _errors_as_notes(f"{name}: tracking stopped", "metrics.jsonl is still written"):
            self._follow()
        self.metrics.ending.wait()
        with _errors_as_notes(f"closing {name}"):
            if self.is_wandb:
                self._finish_wandb()
            else:
                self.tracker.finish()

    def _follow(self) -> None:
        """Send the entries of ``metrics.jsonl`` until the run ends."""
        with self.metrics.path.open("rb") as file:
            file.seek(self.first_byte)
            while True:
                # Check this before reading: then everything written until now is sent.
                is_ending = self.metrics.ending.is_set()

                line = file.readline()
                while line.endswith(b"\n"):
                    self._send(json.loads(line))
                    line = file.readline()
                # A last line without an end is being written: read it again later.
                file.seek(-len(line), os.SEEK_CUR)

                if is_ending:
                    return
                self.news.wait()
                self.news.clear()

    def _send(self, entry: JsonObject) -> None:
        numbers = as_numbers(entry)
        if numbers["step"] >= self.first_step:
            self.tracker.log(numbers, step=int(numbers["step"]))

    def _finish_wandb(self) -> None:
        """Send samples and, if wanted, the model; then end W&B's run."""
        import wandb

        run: wandb.Run = self.tracker.tracker
        with _errors_as_notes("wandb", "the run folder has everything"):
            columns = ("step", "prompt", "text")
            samples = read_lines(self.metrics.path.with_name("samples.jsonl"))
            rows = [[sample.get(name) for name in columns] for sample in samples]
            if rows:
                run.log({"samples": wandb.Table(list(columns), rows)})
            if self.metrics.model is not None:
                artifact = wandb.Artifact(f"model-{run.id}", type="model")
                artifact.add_dir(str(self.metrics.model))
                run.log_artifact(artifact)

        run.finish(exit_code=self.metrics.exit_code)
        wandb.teardown()  # this waits until W&B's file is complete; `finish` does not


def as_numbers(entry: JsonObject) -> dict[str, float]:
    """Return the numbers of a log entry, by a flat name.

    If there is a value for each rank, the largest one is returned: the rank that holds most memory
    runs out of it first, and the slowest rank holds up the others. JSON's null becomes NaN, and
    text is left out.
    """
    numbers: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            for name, by_rank in value.items():
                numbers[f"{key}/{name}"] = max(by_rank)
        elif value is None:
            numbers[key] = math.nan
        elif not isinstance(value, str):
            numbers[key] = value
    return numbers


@contextlib.contextmanager
def _errors_as_notes(
    failure: str, assurance: str = "metrics.jsonl has everything"
) -> Iterator[None]:
    """Print a note if the block raises an error. A tracker must not stop the run.

    Args:
        failure: what has failed, the beginning of the note.
        assurance: what is not affected, the end of the note.
    """
    try:
        yield
    except Exception as error:
        note(f"{failure}: {first_line(error)}; {assurance}.")


@contextlib.contextmanager
def _redacted_command() -> Iterator[None]:
    """Hide secrets in the command line, which W&B uploads, while the block runs."""
    command = sys.argv
    sys.argv = redacted(command)
    try:
        yield
    finally:
        sys.argv = command


def _within(seconds: float, action: Callable[[], GeneralTracker]) -> GeneralTracker:
    """Call a function, and wait at most some seconds for its result.

    If it takes longer, it is left running on its thread.

    Raises:
        TimeoutError: if it takes longer. Errors of the function are raised, too.
    """
    future: Future[GeneralTracker] = Future()

    def act() -> None:
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=act, daemon=True).start()
    if not wait([future], seconds).done:
        raise TimeoutError(f"no answer in {seconds} s")
    return future.result()


def _is_logged_in() -> bool:
    """Return whether W&B has credentials for its server, in its settings or in a netrc file."""
    import wandb

    settings = wandb.setup().settings
    if settings.api_key or settings.identity_token_file:
        return True
    try:
        host = urlparse(settings.base_url).netloc  # with its port, as W&B writes it
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
