"""Notices a run that diverges: its train loss stays above its start."""

from collections.abc import Mapping

_FIRST_ENTRIES = 5  # whose highest loss is the start, without evaluations: one batch may be easy
_MARGIN = 1.0  # by which the loss must exceed the start, or by a quarter of it
_ENTRIES = 5  # in a row that must exceed it
_SHARE = 0.2  # of the run's steps, over which they must: a spike is shorter


class RisingLoss:
    """Tells once if the train loss stays above its start.

    The start is the eval loss before the first step. A run without evaluations starts with the
    highest of its first five train losses.

    Args:
        max_steps: steps of the run.
    """

    def __init__(self, max_steps: int) -> None:
        self._steps_above = _SHARE * max_steps
        self._eval_loss: float | None = None
        self._first_losses: list[float] = []
        self._risen_entries: list[int] = []  # the steps of the last entries in a row
        self._is_told = False

    def add_entry(self, step: int, metrics: Mapping[str, float]) -> str:
        """Return what a log entry shows, when that is news; otherwise an empty text.

        Args:
            step: steps made.
            metrics: the numbers of the entry by name.
        """
        if step == 0 and "eval/loss" in metrics:
            self._eval_loss = metrics["eval/loss"]
        loss = metrics.get("train/loss")
        if loss is None or self._is_told:
            return ""
        if self._eval_loss is None and len(self._first_losses) < _FIRST_ENTRIES:
            self._first_losses.append(loss)
            return ""

        start = max(self._first_losses) if self._eval_loss is None else self._eval_loss
        if not loss > start + max(_MARGIN, abs(start) / 4):  # also for NaN
            self._risen_entries.clear()
            return ""

        self._risen_entries.append(step)
        since = self._risen_entries[0]
        if len(self._risen_entries) < _ENTRIES or step - since < self._steps_above:
            return ""
        self._is_told = True
        return (
            f"the train loss is {loss:.4g} and has stayed above its start, {start:.4g}, "
            f"since step {since}; lower --learning_rate, or raise --warmup_steps"
        )
