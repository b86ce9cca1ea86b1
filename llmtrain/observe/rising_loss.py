"""Notices a run that diverges: its train loss stays above its start."""

import math

_FIRST_STEPS = 5  # whose highest loss is the start: one batch may be an easy one
_MARGIN = 1.0  # by which the loss must exceed the start, or by a quarter of it
_ENTRIES = 5  # in a row that must exceed it
_SHARE = 0.2  # of the run's steps, over which they must: a spike is shorter


class RisingLoss:
    """Tells once if the train loss stays above its start.

    Args:
        max_steps: steps of the run; infinite to tell nothing.
    """

    def __init__(self, max_steps: float) -> None:
        self._steps_above = _SHARE * max_steps
        self._start: float | None = None
        self._risen_entries: list[int] = []  # the steps of the last entries in a row
        self._is_told = False

    def needs_loss_of(self, step: int) -> bool:
        """Return whether the start of the run needs the loss of a step, counted from 1."""
        return step <= _FIRST_STEPS

    def add_first_loss(self, loss: float) -> None:
        """Add the loss of one of the first steps."""
        if math.isfinite(loss):
            self._start = loss if self._start is None else max(self._start, loss)

    def find_new(self, step: int, loss: float) -> str:
        """Return what a log entry shows, when that is news; otherwise an empty text.

        Args:
            step: steps made.
            loss: the train loss of the entry.
        """
        if self._start is None or self._is_told:
            return ""
        if not loss > self._start + max(_MARGIN, abs(self._start) / 4):  # also for NaN
            self._risen_entries.clear()
            return ""

        self._risen_entries.append(step)
        since = self._risen_entries[0]
        if len(self._risen_entries) < _ENTRIES or step - since < self._steps_above:
            return ""
        self._is_told = True
        return (
            f"the train loss is {loss:.4g} and has stayed above its start, {self._start:.4g}, "
            f"since step {since}; lower --learning_rate, or raise --warmup_steps"
        )
