"""The learning rate over a run, as a share of its peak."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from llmtrain.interfaces.part import Part

# A schedule as a plain function: see `Schedule.share`.
ScheduleFunction: TypeAlias = Callable[[int, int], float]


class Schedule(Part):
    """The learning rate over a run. It has no state: it depends on the step alone."""

    def share(self, step: int, max_steps: int) -> float:
        """Return the learning rate of a step as a share of the peak rate, at least 0.

        Args:
            step: steps made before this one, from 0 to ``max_steps - 1``.
            max_steps: steps of the run.
        """
        raise NotImplementedError
