"""Weights & Biases: online, offline and in sweeps."""

import contextlib
import math
import netrc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast
from urllib.parse import urlparse

from accelerate.tracking import GeneralTracker

from llmtrain.console import note, say
from llmtrain.errors import first_line
from llmtrain.json_types import JsonObject
from llmtrain.record.stopping import is_lower_better
from llmtrain.record.trackers.tracker import Position, TrackedRun, Tracker
from llmtrain.redaction import redacted

OUTPUT_FILE = "output.log"  # in the run folder; W&B shows what the run prints under this name

_INIT_SECONDS = 30  # for one attempt to start
_SAMPLE_COLUMNS = ("step", "prompt", "text")
_STEP_METRICS = ("tokens", "epoch", "hours")  # to choose as the x axis of a chart


def wants_model() -> bool:
    """Return whether the finished model is uploaded, as ``WANDB_LOG_MODEL`` says."""
    return _log_model() in ("end", "checkpoint", "true")


def _log_model() -> str:
    return os.environ.get("WANDB_LOG_MODEL", "false").lower()


def sweep_run_id() -> str | None:
    """Return the run id that the agent of a W&B sweep has chosen; ``None`` outside of a sweep."""
    if not os.environ.get("WANDB_SWEEP_ID"):
        return None
    return os.environ.get("WANDB_RUN_ID")


class WeightsAndBiases(Tracker):
    """W&B's copy of a run, which is one run of W&B in all starts: online if possible, else offline.

    Args:
        name: ``wandb``.
        run: the run to report.
        close_seconds: the longest time that the run waits for :meth:`finish`.

    Attributes:
        is_offline: whether W&B only writes to the run folder.
        first_step: the first step that W&B lacks.
        best: the best value of each eval metric so far.
    """

    def __init__(self, name: str, run: TrackedRun, close_seconds: float) -> None:
        super().__init__(name, run)
        self.close_seconds = close_seconds
        self.is_offline = False
        self.first_step = 0
        self.best: dict[str, float] = {}

    def open(self) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or None
        if mode is None and not _is_logged_in():
            mode = "offline"
        self.is_offline = mode == "offline"

        if not self.is_offline:
            try:
                self.inner = self._init(mode=mode, resume="allow")
            except Exception as error:
                note(f"W&B does not answer ({first_line(error)}); logging offline.")
                wandb.teardown()  # ends its service process, which still holds the run id
                self.is_offline = True
        if self.is_offline:
            # Every start logs the whole history: if it is synced, it replaces what W&B has.
            self.inner = self._init(mode="offline")
        self.inner.store_init_configuration(self.run.config)

        if not self.is_offline:
            self.first_step = self.wandb_run.starting_step
        for metric in _STEP_METRICS:
            self.wandb_run.define_metric(metric, hidden=True)

        output = self.run.folder / OUTPUT_FILE
        if output.exists():
            link = Path(self.wandb_run.dir) / OUTPUT_FILE
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(output.absolute())
            self.wandb_run.save(str(link), base_path=str(link.parent), policy="live")
        self._say_where()

    def _init(self, **arguments: object) -> GeneralTracker:
        """Call ``wandb.init``, through Accelerate's tracker."""
        import wandb

        # W&B gives up ten seconds before the run does, because its error message says more.
        settings = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=_INIT_SECONDS,
            finish_timeout=max(self.close_seconds - 10, 1),
            finish_timeout_raises=True,
        )
        if sweep_run_id() is None:
            # The agent of a sweep chooses the project, the id and the name itself.
            arguments = {"id": self.run.run_id, "name": self.run.name, **arguments}
        folder = str(self.run.folder)
        return self._start(self.run.project, dir=folder, settings=settings, **arguments)

    @property
    def wandb_run(self) -> Any:
        """The ``wandb.Run``."""
        return self.inner.tracker

    def _say_where(self) -> None:
        """Print the address of the run's page, or how to upload the run later."""
        if self.is_offline:
            reason = "offline"
            if not _is_logged_in():
                reason = "not logged in, so logging offline"
            folder = os.path.relpath(self.wandb_run.settings.sync_dir)
            say("wandb", f"{reason}; to upload it later: wandb login && wandb sync {folder}")
        elif self.wandb_run.url:
            self.url = redacted(self.wandb_run.url)
            say("wandb", self.url)

    def has(self, position: Position) -> bool:
        return position.step < self.first_step

    def receive(self, position: Position, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            if not name.startswith("eval/"):
                continue
            # The summary has the best value. W&B's own `define_metric(summary="min")` would make it
            # {"min": value}, which Bayesian sweeps do not read.
            if name not in self.best:
                self.wandb_run.define_metric(name, summary="none")
                self.best[name] = math.inf if is_lower_better(name) else -math.inf
            best = self.best[name]
            is_better = value < best if is_lower_better(name) else value > best
            if is_better:
                self.best[name] = value
                self.wandb_run.summary[name] = value
        super().receive(position, numbers)

    def log_samples(self, samples: list[JsonObject], step: int) -> None:
        import wandb

        rows = [[sample.get(column) for column in _SAMPLE_COLUMNS] for sample in samples]
        table = wandb.Table(list(_SAMPLE_COLUMNS), rows)
        self.wandb_run.log({"samples": table}, step=max(step, self.first_step))

    def log_checkpoint(self, path: Path) -> None:
        if _log_model() == "checkpoint":  # otherwise only the finished model, if that
            self._log_artifact("checkpoint", path, alias=path.name)

    def _log_artifact(self, kind: str, folder: Path, alias: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.wandb_run.id}", type="model")
        artifact.add_dir(str(folder))
        self.wandb_run.log_artifact(artifact, aliases=["latest", alias])

    def finish(self, exit_code: int, model: Path | None) -> None:
        """End the run, after the finished model is uploaded if :func:`wants_model` says so."""
        import wandb

        if model is not None and wants_model():
            try:
                self._log_artifact("model", model, alias="finished")
            except Exception as error:
                note(f"wandb: {first_line(error)}; the run folder has everything.")
        self.wandb_run.finish(exit_code=exit_code)
        wandb.teardown()  # this waits until W&B's file is complete; `finish` does not


@contextlib.contextmanager
def copied_output(path: Path) -> Iterator[None]:
    """Append what this process prints to a file, too, while the block runs."""
    with path.open("a") as file:
        out = cast(TextIO, _Copied(sys.stdout, file))
        err = cast(TextIO, _Copied(sys.stderr, file))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


class _Copied:
    """A stream whose text is also written to a file, except for frames of progress bars.

    Args:
        stream: the stream.
        file: the file. If it cannot be written, only the copy is incomplete.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self.stream = stream
        self.file = file

    def write(self, text: str) -> int:
        count = self.stream.write(text)
        if not text.startswith("\r"):
            with contextlib.suppress(OSError, ValueError):  # a full disk, or closed
                self.file.write(redacted(text))
                self.file.flush()
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


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
