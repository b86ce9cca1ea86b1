"""Why a run stops before its last update: a signal, its own budget, the end of the batch job that it runs in."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_PATIENCE_SECONDS = 3.0  # between a first signal, which saves, and one that does not wait
_MARGIN_SECONDS = 30.0  # at most, for the step at hand and for processes to end
_SLURM_END = "SLURM_JOB_END_TIME"  # seconds since 1970, set in every job (sbatch(1), output environment variables)


@dataclass
class Deadline:
    """``at`` is on the monotonic clock, in seconds; ``None`` is never."""

    at: float | None = None
    why: str = ""
    reserved: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, max_hours: float | None) -> "Deadline":
        """The earlier of ``max_hours`` from now and the end of the Slurm job that this process is part of."""
        left = []
        if max_hours is not None:
            left.append((max_hours * 3600, f"--max_hours {max_hours:g} are over"))
        if os.environ.get(_SLURM_END, "").isdigit():
            left.append((float(os.environ[_SLURM_END]) - time.time(), "the Slurm job is about to end"))
        if not left:
            return cls()
        seconds, why = min(left)
        margin = min(_MARGIN_SECONDS, max(0.0, seconds) / 10)
        return cls(time.monotonic() + seconds, why, {"margin": margin})

    def reserve(self, what: str, seconds: float) -> None:
        """So long, or longer if it was said before, ``what`` may take between now and the end."""
        self.reserved[what] = max(self.reserved.get(what, 0.0), seconds)

    def is_near(self) -> bool:
        """Whether nothing is left but what is reserved."""
        return self.at is not None and time.monotonic() > self.at - sum(self.reserved.values())


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
