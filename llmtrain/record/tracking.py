"""Metrics: ``metrics.jsonl`` is the truth, Accelerate's trackers (Weights & Biases, TensorBoard) mirror it."""

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
from llmtrain.types import Facts

_INIT_SECONDS = 30  # W&B's own, of one attempt
_START_SECONDS = 120  # a tracker with all its attempts
_CLOSE_SECONDS = 60  # all trackers
_MODEL_SECONDS = 1500  # all trackers, where the model is sent, too
_BEST_IS_LOWEST = ("eval/loss", "eval/perplexity", "eval/bits_per_byte")


def wants_model() -> bool:
    """Return whether the finished model is to be sent to W&B: ``WANDB_LOG_MODEL`` is end, checkpoint or true."""
    return os.environ.get("WANDB_LOG_MODEL", "false").lower() in ("end", "checkpoint", "true")


class Metrics:
    """Writes a line of ``metrics.jsonl`` a reading; the trackers follow at their own pace. Used on every rank.

    A model is sent for at most ``model_seconds``, for which the other ranks wait.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, model_seconds: float = _MODEL_SECONDS
    ) -> None:
        self.accelerator = accelerator
        self.ranks = Ranks(accelerator)
        self.path = folder / "metrics.jsonl"
        self.model_seconds = min(_MODEL_SECONDS, model_seconds)
        self.mirrors: list[_Mirror] = []
        self.ending, self.exit_code = threading.Event(), 0
        self.model: Path | None = None  # to be sent at the end

    def start(self, names: list[str], settings: Facts, run_name: str, run_id: str) -> None:
        """Open the trackers, on rank 0; one that cannot be opened is left out, with one line."""
        self.accelerator.project_configuration.set_directories(str(self.path.parent))
        if not self.ranks.is_main:
            return
        if wants_model() and "wandb" not in names:
            note("WANDB_LOG_MODEL is set and the model is not sent: that needs --report_to wandb.")
        logging.getLogger("accelerate.tracking").setLevel(logging.ERROR)
        plain = {
            k: v if isinstance(v, int | float | str | bool) else str(v)
            for k, v in redacted(settings).items()
        }
        for name in names:
            to_wandb = functools.partial(self._open_wandb, plain, run_name, run_id)
            opening = (
                to_wandb if name == "wandb" else functools.partial(self._open, name, plain, {})
            )
            with _noting(f"{name}: tracking is off"):
                self.mirrors.append(_Mirror(_within(_START_SECONDS, opening), self))
        self.accelerator.trackers = [mirror.tracker for mirror in self.mirrors]

    def _open(self, name: str, settings: Facts, init: Facts) -> GeneralTracker:
        self.accelerator.log_with, self.accelerator.trackers = (
            filter_trackers([name], str(self.path.parent)),
            [],
        )
        self.accelerator.init_trackers(
            os.environ.get("WANDB_PROJECT", "llmtrain"), settings, {name: init}
        )
        return self.accelerator.trackers[0]

    def _open_wandb(self, settings: Facts, run_name: str, run_id: str) -> GeneralTracker:
        import wandb

        known = bool(os.environ.get("WANDB_MODE")) or _logged_in()
        mode = os.environ.get("WANDB_MODE") or (None if known else "offline")
        limit = max(
            (self.model_seconds if wants_model() else _CLOSE_SECONDS) - 10, 1
        )  # W&B's own end says more
        own = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=limit,
            finish_timeout_raises=True,
        )
        init = {"dir": str(self.path.parent), "name": run_name, "id": run_id, "settings": own}
        init |= {"mode": mode, "resume": "allow"}
        # Offline a start holds the whole history: synced, it replaces what is there.
        offline = init | {"mode": "offline", "resume": None}
        command, sys.argv = sys.argv, redacted(sys.argv)  # W&B sends it
        try:
            tracker = self._open("wandb", settings, offline if mode == "offline" else init)
        except Exception as error:
            if mode == "offline":
                raise
            note(f"W&B does not answer ({first_line(error)}); logging offline.")
            wandb.teardown()  # its service process, which still holds the run id
            mode, tracker = "offline", self._open("wandb", settings, offline)
        finally:
            sys.argv = command
        run: wandb.Run = tracker.tracker
        for key in _BEST_IS_LOWEST:
            run.define_metric(key, summary="min")
        if mode == "offline":
            why = "offline" if known else "not logged in, so logging offline"
            say(
                "wandb",
                f"{why}; later: wandb login && wandb sync {os.path.relpath(run.settings.sync_dir)}",
            )
        elif run.url:
            say("wandb", redacted(run.url))
        return tracker

    def write(self, reading: Facts) -> None:
        """Write one reading, of which ``step`` is part, on rank 0. Waits for no tracker."""
        if self.ranks.is_main:
            append_json_line(self.path, reading)
        for mirror in self.mirrors:
            mirror.news.set()

    def close(self, exit_code: int, model: Path | None = None) -> None:
        """Send the rest, and the finished ``model`` where that was asked for, and finish the trackers' runs.

        One that does not get there in time is left behind.
        """
        self.exit_code, self.model = exit_code, model if wants_model() else None
        patience = _CLOSE_SECONDS if self.model is None else self.model_seconds
        self.ending.set()
        for mirror in self.mirrors:
            mirror.news.set()
        until = time.monotonic() + patience
        for mirror in self.mirrors:
            mirror.thread.join(max(0.0, until - time.monotonic()))
            if mirror.thread.is_alive():
                note(
                    f"{mirror.tracker.name}: no answer in {patience} s, left behind; metrics.jsonl has everything."
                )
        self.mirrors, self.accelerator.trackers = [], []


class _Mirror:
    """One tracker and the thread that feeds it.

    The queue between the run and the tracker is ``metrics.jsonl`` itself: a tracker that stalls costs no memory, and
    W&B, which comes back to a run, is sent what it lacks.
    """

    def __init__(self, tracker: GeneralTracker, metrics: Metrics) -> None:
        self.tracker, self.metrics, self.is_wandb = tracker, metrics, tracker.name == "wandb"
        metrics.path.touch()
        # W&B lacks what comes from its first step on, all of it offline, where every start has a file of its own.
        # The event files of earlier starts lie in one folder: TensorBoard lacks what is written from now on.
        self.first_step = tracker.tracker.starting_step if self.is_wandb else 0
        self.first_byte = 0 if self.is_wandb else metrics.path.stat().st_size
        self.news = threading.Event()
        self.thread = threading.Thread(
            target=self._live, name=f"llmtrain-{tracker.name}", daemon=True
        )
        self.thread.start()

    def _live(self) -> None:
        with _noting(f"{self.tracker.name}: tracking stopped", "metrics.jsonl goes on"):
            self._follow()
        self.metrics.ending.wait()
        with _noting(f"closing {self.tracker.name}"):
            self._finish_wandb() if self.is_wandb else self.tracker.finish()

    def _follow(self) -> None:
        with self.metrics.path.open("rb") as file:
            file.seek(self.first_byte)
            while True:
                last = (
                    self.metrics.ending.is_set()
                )  # before the file is read: all that was written until then is sent
                while (line := file.readline()).endswith(b"\n"):
                    reading = _as_numbers(json.loads(line))
                    if reading["step"] >= self.first_step:
                        self.tracker.log(reading, step=int(reading["step"]))
                file.seek(-len(line), os.SEEK_CUR)  # a line that is being written
                if last:
                    return
                self.news.wait()
                self.news.clear()

    def _finish_wandb(self) -> None:
        """Send the texts that the model wrote, as a table, and the model where that was asked for; end W&B's run."""
        import wandb

        run: wandb.Run = self.tracker.tracker
        with _noting("wandb", "the run's folder has everything"):
            lines = read_lines(self.metrics.path.with_name("samples.jsonl"))
            rows = [[line.get(name) for name in ("step", "prompt", "text")] for line in lines]
            if rows:
                run.log({"samples": wandb.Table(["step", "prompt", "text"], rows)})
            if self.metrics.model is not None:
                artifact = wandb.Artifact(f"model-{run.id}", type="model")
                artifact.add_dir(str(self.metrics.model))
                run.log_artifact(artifact)
        run.finish(exit_code=self.metrics.exit_code)
        wandb.teardown()  # waits until its file is whole; finish does not


def _as_numbers(reading: Facts) -> dict[str, float]:
    """Return the numbers of a log entry that a tracker can plot.

    Of values by rank it is the largest: the rank that holds most memory runs out of it first, and
    the slowest one holds up the others. JSON's null is NaN, and text is left out.
    """
    numbers: dict[str, float] = {}
    for key, value in reading.items():
        if isinstance(value, dict):
            for name, by_rank in value.items():
                numbers[f"{key}/{name}"] = max(by_rank)
        elif value is None:
            numbers[key] = math.nan
        elif not isinstance(value, str):
            numbers[key] = value
    return numbers


@contextlib.contextmanager
def _noting(what: str, rest: str = "metrics.jsonl has everything") -> Iterator[None]:
    """Turn an error into a note: a tracker's trouble is not the run's."""
    try:
        yield
    except Exception as error:
        note(f"{what}: {first_line(error)}; {rest}.")


def _within(seconds: float, action: Callable[[], GeneralTracker]) -> GeneralTracker:
    """Return or raise what ``action`` does; after so many seconds it is left behind on its thread."""
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


def _logged_in() -> bool:
    """Return whether W&B has credentials for its server, looked for where it does that itself."""
    import wandb

    settings = wandb.setup().settings
    known = bool(settings.api_key or settings.identity_token_file)
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        host = urlparse(settings.base_url).netloc  # with its port, as W&B writes it
        known = known or netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return known
