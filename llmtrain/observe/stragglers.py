"""Which process keeps the others waiting.

Processes wait for each other at two places of a step: to count its tokens, and to add their
gradients. If one is late, the others wait, so waiting shows up on the processes where nothing is
wrong. The time that a process spends in its own phases shows which one is late.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from llmtrain.phase_names import OWN_PHASES, PHASES

# A process is late if it takes longer than the others by more than this share of a step.
_LATE_SHARE = 0.2


class Straggler(NamedTuple):
    """A process that the others wait for."""

    rank: int
    phase: str  # in which it is furthest behind the others
    seconds: float  # per step, by which its own phases exceed the median of the others
    share: float  # of the time of a step

    def __str__(self) -> str:
        return (
            f"rank {self.rank} takes {1000 * self.seconds:.1f} ms longer per step than the others, "
            f"most of it in {PHASES[self.phase]}; they wait for {self.share:.0%} of each step"
        )


class Stragglers:
    """Names each process that keeps the others waiting, once for each phase."""

    def __init__(self) -> None:
        # Rank and phase of the straggler in the last log entry, and those that were reported.
        self._suspect: tuple[int, str] | None = None
        self._reported: set[tuple[int, str]] = set()

    def find_new(self, phase_seconds: dict[str, list[float]]) -> Straggler | None:
        """Return the process that keeps the others waiting, when that is news.

        It must be the straggler of two log entries in a row, in the same phase, because one may be
        chance.

        Args:
            phase_seconds: mean seconds of a step by phase, with a number for each rank.
        """
        straggler = find_straggler(phase_seconds)
        suspect = None if straggler is None else (straggler.rank, straggler.phase)
        is_confirmed = suspect == self._suspect
        self._suspect = suspect
        if suspect is None or not is_confirmed or suspect in self._reported:
            return None
        self._reported.add(suspect)
        return straggler


def find_straggler(phase_seconds: dict[str, list[float]]) -> Straggler | None:
    """Return the process whose own phases take longest, with the phase in which it lags most.

    Args:
        phase_seconds: mean seconds of a step by phase, with a number for each rank.

    Returns:
        ``None`` unless the process takes longer than the median of the others, by more than a fifth
        of a step.
    """
    own_phases = [phase_seconds[phase] for phase in OWN_PHASES]
    own_seconds = [sum(rank_seconds) for rank_seconds in zip(*own_phases, strict=True)]
    if len(own_seconds) < 2:
        return None

    rank = max(range(len(own_seconds)), key=own_seconds.__getitem__)
    lag = _lag(own_seconds, rank)
    step_seconds = sum(phase_seconds[phase][rank] for phase in PHASES)
    if lag <= _LATE_SHARE * step_seconds:
        return None
    return Straggler(
        rank=rank,
        phase=max(OWN_PHASES, key=lambda phase: _lag(phase_seconds[phase], rank)),
        seconds=lag,
        share=lag / step_seconds,
    )


def _lag(seconds: Sequence[float], rank: int) -> float:
    """Return how much longer one rank takes than the median of the others."""
    others = [*seconds[:rank], *seconds[rank + 1 :]]
    return seconds[rank] - statistics.median(others)
