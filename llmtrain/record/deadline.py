"""When a run has to be over: its own budget, or the end of the batch job that it runs in."""

import os
import time
from dataclasses import dataclass

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
