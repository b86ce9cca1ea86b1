"""Why a run stops before its last update: a signal, its own budget, the end of the batch job that it runs in."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PATIENCE_SECONDS = 3.0  # between a first signal, which saves, and one that does not wait
_MARGIN_SECONDS = 30.0  # at most, for the step at hand and for processes to end
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, set in every job (sbatch(1), output environment variables)


@dataclass
class Deadline:
    """``at`` is in seconds since 1970; ``None`` is never."""

    at: float | None = None
    why: str = ""
    margin: float = 0.0
    longest_save: float = 0.0

    @classmethod
    def of(cls, max_hours: float | None) -> "Deadline":
        """The earlier of ``max_hours`` from now and the end of the Slurm job that this process is part of."""
        now, ends = time.time(), []
        if max_hours is not None:
            ends.append((now + max_hours * 3600, f"--max_hours {max_hours:g} are over"))
        if os.environ.get(_SLURM_END, "").isdigit():
            ends.append((float(os.environ[_SLURM_END]), "the Slurm job is about to end"))
        if not ends:
            return cls()
        at, why = min(ends)
        return cls(at, why, min(_MARGIN_SECONDS, max(0.0, at - now) / 10))

    def saving_took(self, seconds: float) -> None:
        self.longest_save = max(self.longest_save, seconds)

    def is_near(self) -> bool:
        """Whether what is left is the margin and twice the longest save so far."""
        return self.at is not None and time.time() > self.at - self.margin - 2 * self.longest_save


@contextlib.contextmanager
def stop_signals(asked: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM, SIGINT and SIGUSR1 call ``asked`` with a reason. A second one is obeyed at once, as KeyboardInterrupt;
    but launchers and batch systems repeat themselves: only where it comes some seconds after the first."""
    asked_at: float | None = None

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            asked(f"asked to stop by {signal.Signals(number).name}")
        elif now - asked_at > _PATIENCE_SECONDS:
            raise KeyboardInterrupt

    try:
        before = {number: signal.signal(number, ask) for number in _SIGNALS}
    except ValueError:  # not the main thread, as in a notebook's helper: signals stay the host's
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
