"""Why a run stops before its last update: a signal, its own budget, the end of its batch job, or no more progress."""

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from llmtrain.errors import UserError
from llmtrain.types import Facts

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PATIENCE_SECONDS = 3.0  # between a first signal, which saves, and one that does not wait
_MARGIN_SECONDS = 30.0  # at most, for the step at hand and for processes to end
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, set in every job (sbatch(1), output environment variables)


@dataclass
class Deadline:
    """The moment by which a run must have ended: ``at`` on the monotonic clock, in seconds."""

    at: float = math.inf
    why: str = ""
    reserved: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, max_hours: float | None) -> "Deadline":
        """Return the earlier of ``max_hours`` from now and the end of the Slurm job that this process is part of."""
        left = [(math.inf, "")]
        if max_hours is not None:
            left.append((max_hours * 3600, f"--max_hours {max_hours:g} are over"))
        if os.environ.get(_SLURM_END, "").isdigit():
            left.append(
                (float(os.environ[_SLURM_END]) - time.time(), "the Slurm job is about to end")
            )
        seconds, why = min(left)
        return cls(
            time.monotonic() + seconds,
            why,
            {"margin": min(_MARGIN_SECONDS, max(0.0, seconds) / 10)},
        )

    def reserve(self, purpose: str, seconds: float) -> None:
        """Keep so many seconds free before the end, or more where more were reserved for this purpose before."""
        self.reserved[purpose] = max(self.reserved.get(purpose, 0.0), seconds)

    def is_near(self) -> bool:
        """Return whether nothing is left but what is reserved."""
        return time.monotonic() > self.at - sum(self.reserved.values())


@dataclass
class Patience:
    """Early stopping: how many evaluations in a row may be no better than the best, in which ``metric``.

    ``allowed`` 0 never stops. ``best`` is the value, or its negative where higher is better: where the name has no
    loss, perplexity or bits in it.
    """

    allowed: int
    metric: str
    best: float = math.inf
    best_step: int = 0  # 0: none yet
    worse: int = 0  # evaluations since

    @property
    def over(self) -> bool:
        """True where the run ends early."""
        return bool(self.allowed) and self.worse >= self.allowed

    @property
    def why(self) -> str:
        """The reason for that."""
        if not self.best_step:
            return f"{self.worse} evaluations gave no number for {self.metric}"
        return f"{self.worse} evaluations were no better in {self.metric} than that after step {self.best_step}"

    @property
    def state(self) -> list[float | None]:
        """The part of it that a checkpoint keeps, as JSON has it."""
        return [self.best if self.best_step else None, self.best_step, self.worse]

    def restore(self, state: list[Any]) -> None:
        """Take what a checkpoint has kept."""
        best, self.best_step, self.worse = state
        self.best = math.inf if best is None else best

    def judge(self, step: int, reading: Facts) -> None:
        """Take an evaluation; that before the first update is no candidate, but must have the metric.

        Raises :class:`UserError` where it has none of this name.
        """
        if self.metric not in reading:
            known = ", ".join(name for name in reading if name.startswith("eval/"))
            raise UserError(f"--metric_for_best_model {self.metric}: evaluations have {known}.")
        if not step:
            return
        lower = re.search("loss|perplexity|bits", self.metric) is not None
        value = float(reading[self.metric]) * (1 if lower else -1)
        if value < self.best:
            self.best, self.best_step, self.worse = value, step, 0
        else:  # also where it is no number
            self.worse += 1


@contextlib.contextmanager
def stop_signals(asked: Callable[[str], None]) -> Iterator[None]:
    """Call ``asked`` with a reason at SIGTERM, SIGINT or SIGUSR1.

    A second one is obeyed at once, as KeyboardInterrupt; but launchers and batch systems repeat themselves: only where
    it comes some seconds after the first. Outside the main thread, as in a notebook's helper, signals stay the host's.
    """
    times: list[float] = []

    def ask(number: int, _: object) -> None:
        times.append(time.monotonic())
        if len(times) == 1:
            asked(f"asked to stop by {signal.Signals(number).name}")
        elif times[-1] - times[0] > _PATIENCE_SECONDS:
            raise KeyboardInterrupt

    with contextlib.ExitStack() as restoring:
        with contextlib.suppress(ValueError):  # not the main thread
            for number in _SIGNALS:
                restoring.callback(signal.signal, number, signal.signal(number, ask))
        yield
