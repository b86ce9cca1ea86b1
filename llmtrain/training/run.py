"""An open run: what it is made of, how far it is, what it logs, and how it looks when printed."""

import contextlib
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from accelerate import Accelerator

from llmtrain.console import say
from llmtrain.data.tokenized import Tokenized
from llmtrain.files import JsonObject, read_object
from llmtrain.interfaces.callback import StepResult
from llmtrain.interfaces.model import ModelBundle
from llmtrain.parallel.ranks import Ranks
from llmtrain.record.folder import RunFolder
from llmtrain.record.history import as_numbers, read_lines
from llmtrain.record.resume import ResumePoint
from llmtrain.record.saver import Saver
from llmtrain.record.stopping import Deadline, Patience
from llmtrain.record.tracking import MetricsLog
from llmtrain.training.layout import Layout, steps_per_epoch
from llmtrain.training.learning_rates import LearningRates
from llmtrain.training.parts import Parts
from llmtrain.training.settings import Settings
from llmtrain.training.summary import show_result

if TYPE_CHECKING:
    import pandas


# What `state.json` of a checkpoint stores of a `RunStatus`.
_STORED = ("step", "tokens", "skipped", "compiled", "finish_reason")


class RunSummary(NamedTuple):
    """A picklable summary of a run.

    Attributes:
        folder: the path of the run folder.
        state: how the run has ended: ``finished``, ``preempted`` or ``failed``.
        step: steps made.
        eval_loss: the loss of the last evaluation, if there was one.
    """

    folder: Path
    state: str
    step: int
    eval_loss: float | None


@dataclass
class RunStatus:
    """How far a run is, why it should stop, and how it has ended.

    Attributes:
        step: steps made so far. The device may still compute the last one.
        tokens: target tokens of the steps that are settled.
        pending: the result of the last step, until it is settled; see
            :class:`llmtrain.training.loop.Loop`. The host may not have read its numbers yet.
        skipped: steps that were skipped because their gradient was not finite.
        compiled: whether the model's blocks are compiled; ``None`` until the warm-up chooses.
        eval_step: the step after which the last evaluation was made.
        eval_loss: its loss, if there was one.
        stop_reason: why this rank wants to stop; empty if it does not.
        stop_signal: the signal that asked this rank to stop, if there was one.
        finish_reason: why a callback has finished the run before its last step; empty if none has.
        state: how the run has ended: ``finished``, ``preempted`` or ``failed``.
        reason: why it has ended.
        sample: a text by the finished model, if it wrote one.
    """

    step: int = 0
    tokens: int = 0
    pending: StepResult | None = None
    skipped: int = 0
    compiled: bool | None = None
    eval_step: int | None = None
    eval_loss: float | None = None
    stop_reason: str = ""
    stop_signal: signal.Signals | None = None
    finish_reason: str = ""
    state: str = "failed"
    reason: str = "llmtrain.train() was not called"
    sample: str | None = None

    def ask_to_stop(self, reason: str, stop_signal: signal.Signals | None = None) -> None:
        """Let all ranks save and stop; see :meth:`Callback.wants_to_stop`."""
        self.stop_reason = reason
        self.stop_signal = stop_signal

    def for_checkpoint(self) -> JsonObject:
        """Return the part that ``state.json`` of a checkpoint stores."""
        assert self.pending is None, f"step {self.step} is not settled"
        return {key: getattr(self, key) for key in _STORED}

    @classmethod
    def of(cls, state: JsonObject) -> "RunStatus":
        """Return the status that ``state.json`` of a checkpoint stores; a new run has none."""
        return cls(**{key: state[key] for key in _STORED if key in state})


@dataclass(frozen=True)
class Run:
    """An open run.

    Pickling a run keeps only a :class:`RunSummary`, because its model and its open files cannot be
    pickled. Accelerate's ``notebook_launcher`` pickles the result of ``main``.

    All of it is decided when the run is opened, except for :attr:`status`, and what the objects
    behind the other attributes keep for themselves.

    Attributes:
        accelerator: the Accelerator of this run.
        ranks: the ranks of the run, and where this process is among them.
        settings: all settings of the recipe.
        layout: how a global batch is divided among the ranks.
        rows: the rows to train and evaluate on.
        bundle: the model, with everything that belongs to it.
        parts: what the recipe brings besides: the objective, the optimizer, callbacks and metrics.
        rates: sets the learning rates of the optimizer's parameter groups.
        fingerprint: the fingerprint of the run. A resumed run must have the same.
        resume_point: the folder of the run, and the checkpoint of this start, if there is one.
        writer: writes the run folder.
        saver: writes the checkpoints.
        metrics_log: writes ``metrics.jsonl`` and feeds the trackers.
        deadline: when the run has to stop.
        patience: chooses the best evaluation, and decides about early stopping.
        status: how far the run is, and how it has ended.
    """

    accelerator: Accelerator
    ranks: Ranks
    settings: Settings
    layout: Layout
    rows: Tokenized
    bundle: ModelBundle
    parts: Parts
    rates: LearningRates
    fingerprint: JsonObject
    resume_point: ResumePoint
    writer: RunFolder
    saver: Saver
    metrics_log: MetricsLog
    deadline: Deadline
    patience: Patience
    status: RunStatus

    @property
    def folder(self) -> Path:
        """The path of the run folder."""
        return self.resume_point.folder

    @property
    def step(self) -> int:
        """Steps made so far."""
        return self.status.step

    @property
    def early_end(self) -> str:
        """Why the run is over before its last step; empty if it is not."""
        return self.patience.reason if self.patience.is_over else self.status.finish_reason

    @property
    def is_finished(self) -> bool:
        """Whether the run has made all its steps, or has ended early, with a finished model."""
        return self.status.state == "finished"

    @property
    def exit_status(self) -> int:
        """The exit status of a process that Python started directly.

        It is 0, or 128 plus the number of the signal that ended the run early, as in a shell.
        SIGUSR1 is a batch system's announcement of its time limit, and leaves 0.
        """
        stop_signal = self.status.stop_signal
        if stop_signal in (None, signal.SIGUSR1) or self.status.state != "preempted":
            return 0
        return 128 + int(stop_signal)

    def __repr__(self) -> str:
        """Describe the run in one line: its folder, its state, its step and the last eval loss."""
        if self.settings.run.dry_run:
            return f"Run('{self.folder}', dry run)"
        state = read_object(self.folder / "status.json").get("state", "not started")
        parts = [f"'{self.folder}'", state, f"step {self.step}"]
        if self.status.eval_loss is not None:
            parts.append(f"eval loss {self.status.eval_loss:.4f}")
        return f"Run({', '.join(parts)})"

    def __reduce__(self) -> tuple[type[RunSummary], tuple[object, ...]]:
        status = self.status
        return RunSummary, (self.folder, status.state, status.step, status.eval_loss)

    def history(self) -> "pandas.DataFrame":
        """Return the metrics of the run, with a row for each log entry.

        The columns are ``step``, ``epoch``, ``tokens``, ``tokens_seen``, ``time`` and metrics like
        ``train/loss``.
        An entry of a step and the entry of the evaluation after it are two rows, and a metric that
        an entry lacks is NaN. If there is a value for each rank, such as ``phases/forward``, it is
        the largest one.
        """
        import pandas

        entries = read_lines(self.folder / "metrics.jsonl")
        return pandas.DataFrame([as_numbers(entry) for entry in entries])

    def log(self, metrics: JsonObject) -> JsonObject:
        """Write a log entry to ``metrics.jsonl`` and to the trackers, and return it."""
        epoch = float(self.step / steps_per_epoch(self.settings, self.rows))
        entry = {
            "step": self.step,
            "epoch": round(epoch, 4),
            "tokens": self.status.tokens,
            "tokens_seen": self.step * self.settings.data.global_batch_size * self.rows.positions,
            **metrics,
            "time": round(time.time(), 3),
        }
        self.metrics_log.write(entry)
        if "eval/loss" in metrics:
            self.status.eval_step = self.step
            self.status.eval_loss = metrics["eval/loss"]
        return entry

    def record_event(self, kind: str, text: str) -> None:
        """Print an event, and record it in the run folder."""
        say(kind, text)
        self.writer.record_event(self.step, kind, text)

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all ranks to save and stop."""
        if not self.status.stop_reason and self.deadline.is_near():
            self.status.ask_to_stop(self.deadline.reason)
        return bool(self.status.stop_reason) or self.saver.failed

    def show(self) -> None:
        """Print the loss curve, a text by the model, and how to load it, if the run is finished."""
        if self.is_finished:
            show_result(self.folder, self.rows, self.status.sample)

    def record_failure(self, reason: str, step: int | None = None) -> None:
        """Record in ``status.json`` why this process ends, unless the run is finished already.

        Args:
            reason: the reason.
            step: steps made, if the reason names them. By default, those that are settled, to which
                all counts belong.
        """
        if self.is_finished:
            return
        if step is None:
            step = self.step if self.status.pending is None else self.step - 1
        with contextlib.suppress(Exception):  # the error of the run is the one to show
            self.writer.set_status("failed", step, reason)
