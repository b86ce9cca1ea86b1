"""Reasons to stop a run before its last step: a signal, a time limit, or early stopping.

Early stopping also chooses the best evaluation, whose weights the finished model may get.
"""

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from llmtrain.console import pluralize
from llmtrain.errors import UserError
from llmtrain.files import JsonObject

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
_REPEAT_SECONDS = 3.0  # a second signal within this time after the first one is ignored
# The most time that is reserved for the current step, and for the processes to end.
_MAX_MARGIN_SECONDS = 30.0
# Seconds since 1970, set in every job; see "output environment variables" in sbatch(1).
_SLURM_END = "SLURM_JOB_END_TIME"


@dataclass
class Deadline:
    """The time by which a run must have ended.

    Attributes:
        at: the time on the monotonic clock, in seconds.
        reason: why the run must end then.
        reserved: seconds to keep free before the deadline, by purpose.
    """

    at: float = math.inf
    reason: str = ""
    reserved: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, max_hours: float | None, seconds_since_start: float = 0.0) -> "Deadline":
        """Return the deadline of a run: its time limit, or the end of its Slurm job.

        If there are both, the earlier one counts.

        Args:
            max_hours: the time limit, counted from the start of the process.
            seconds_since_start: how long ago that was.
        """
        limits = [(math.inf, "")]
        if max_hours is not None:
            seconds_left = max_hours * 3600 - seconds_since_start
            limits.append((seconds_left, f"--max_hours {max_hours:g} have passed"))
        slurm_end = os.environ.get(_SLURM_END, "")
        if slurm_end.isdigit():
            limits.append((float(slurm_end) - time.time(), "the Slurm job is about to end"))

        seconds_left, reason = min(limits)
        margin = min(_MAX_MARGIN_SECONDS, max(0.0, seconds_left) / 10)
        return cls(
            at=time.monotonic() + seconds_left,
            reason=reason,
            reserved={"margin": margin},
        )

    def reserve(self, purpose: str, seconds: float) -> None:
        """Keep time free before the deadline.

        If more was reserved for this purpose before, that stays.
        """
        self.reserved[purpose] = max(self.reserved.get(purpose, 0.0), seconds)

    def is_near(self) -> bool:
        """Return whether only the reserved time is left."""
        return time.monotonic() > self.at - sum(self.reserved.values())


@dataclass
class Patience:
    """Chooses the best evaluation, and ends a run when its evaluations no longer improve.

    Attributes:
        allowed: the number of evaluations in a row without an improvement that ends the run; 0
            disables early stopping.
        metric: the metric that should improve, such as ``eval/loss``. Lower is better if its name
            contains loss, perplexity or bits. Otherwise higher is better.
        keeps_best: whether the checkpoint of the best evaluation is kept, and the finished model
            gets its weights. True with early stopping.
        best: the best value so far, negated if higher is better.
        best_step: the step of the best value; 0 if there is none yet.
        worse: the number of evaluations since then.
    """

    allowed: int
    metric: str
    keeps_best: bool = False
    best: float = math.inf
    best_step: int = 0
    worse: int = 0

    @property
    def is_over(self) -> bool:
        """Whether the run ends early."""
        return self.allowed > 0 and self.worse >= self.allowed

    @property
    def reason(self) -> str:
        """Why the run ends early."""
        evaluations = pluralize(self.worse, "evaluation")
        if not self.best_step:
            return f"{self.metric} was not a number in {evaluations}"
        return f"{self.metric} has not improved in {evaluations} since step {self.best_step}"

    @property
    def state(self) -> JsonObject:
        """The part that a checkpoint stores as JSON, in which infinity becomes null."""
        return {"value": self.best, "step": self.best_step, "worse": self.worse}

    def restore(self, state: JsonObject | None) -> None:
        """Restore a :attr:`state` from a checkpoint, which may have none."""
        if not state:
            return
        self.best = math.inf if state["value"] is None else state["value"]
        self.best_step = state["step"]
        self.worse = state["worse"]

    def record(self, step: int, metrics: JsonObject) -> None:
        """Record an evaluation.

        The evaluation before the first step is never the best, because no checkpoint has the
        initial weights. It must have the metric, too.

        Args:
            step: steps made so far.
            metrics: the metrics of the evaluation.

        Raises:
            UserError: if the evaluation does not have the metric.
        """
        if self.metric not in metrics:
            names = ", ".join(name for name in metrics if name.startswith("eval/"))
            raise UserError(
                f"--metric_for_best_model {self.metric} is not measured; choose one of {names}."
            )
        if step == 0:
            return
        sign = 1 if is_lower_better(self.metric) else -1
        value = sign * float(metrics[self.metric])
        if value < self.best:
            self.best = value
            self.best_step = step
            self.worse = 0
        else:  # not better, or not a number
            self.worse += 1


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, as its name says."""
    words = re.split("[/_]", metric)
    return not {"loss", "perplexity", "bits", "kl", "error"}.isdisjoint(words)


@contextlib.contextmanager
def stop_signals(on_stop: Callable[[str, signal.Signals], None]) -> Iterator[None]:
    """Call a function on SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGXCPU, while the block runs.

    A second signal raises KeyboardInterrupt, but only if it comes some seconds after the first one:
    launchers and batch systems repeat their signals. SIGHUP stays ignored under ``nohup``. Outside
    the main thread, signal handlers cannot be set and stay unchanged, for example in a thread of a
    notebook.

    Args:
        on_stop: called with a reason and the signal, at the first signal.
    """
    times: list[float] = []

    def on_signal(number: int, _: object) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            received = signal.Signals(number)
            on_stop(f"asked to stop by {received.name}", received)
        # Linux repeats SIGXCPU after each second of the CPU, until the hard limit.
        elif times[-1] - times[0] > _REPEAT_SECONDS and number != signal.SIGXCPU:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as restoring:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in _SIGNALS:
                if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                    continue
                previous_handler = signal.signal(number, on_signal)
                restoring.callback(signal.signal, number, previous_handler)
        yield
