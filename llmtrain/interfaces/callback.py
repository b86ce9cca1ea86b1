"""What the training loop tells its callbacks: the result of each step, and what is due."""

from __future__ import annotations  # so that annotations do not import torch

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.objective import LossSums


class StepResult(NamedTuple):
    """The result of one step."""

    sums: LossSums  # this rank's sums over its micro-batches
    extra: Batch  # what the objective's `prepass` returned
    target_tokens: int  # of the global batch
    denominator: int  # divides the summed loss of the global batch
    grad_norm: float  # of the global batch's mean loss, before clipping
    should_stop: bool  # whether any rank was asked to stop


class StepInfo(NamedTuple):
    """How far the loop is after a step, and which periodic actions are due."""

    step: int  # steps made so far
    is_last: bool  # whether all steps of the run are made
    should_stop: bool  # whether the run stops after this step

    def is_due(self, every: float) -> bool:
        """Return whether an action that happens every ``every`` steps is due.

        The last step makes every action due, whatever its period. 0 means never.
        """
        if every == 0:
            return False
        return self.is_last or self.step % every == 0


class Callback:
    """Watches the training loop, or decides when something is done.

    All ranks call the same methods at the same places of the loop.
    """

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is open while the loop runs, and closed even after an error."""
        return contextlib.nullcontext()

    def on_train_begin(self) -> None:
        """Called before the first step of this start."""

    def on_step_begin(self, batch: LocalBatch) -> None:
        """Called when the batch of a step has been read, before anything is computed."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Called when a step was made, or skipped."""

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a log entry was written, of the train loss or of an evaluation.

        Args:
            step: steps made so far.
            metrics: the numbers of the entry by the names that trackers show, such as
                ``train/loss`` and ``epoch``. They are those of the whole global batch, and the same
                on all ranks, except for times and rates.
        """

    def wants_to_stop(self) -> bool:
        """Return whether this rank wants all ranks to save and stop after the current step."""
        return False

    def on_train_end(self) -> None:
        """Called after the last step of this start."""
