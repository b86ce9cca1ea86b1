"""What the training loop tells its callbacks: the result of each step, and what is due."""

from __future__ import annotations  # so that annotations do not import torch

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.objective import FINISH_VOTE, SAVE_VOTE, LossSums
from llmtrain.interfaces.part import Part

if TYPE_CHECKING:
    import torch

    from llmtrain.device_numbers import DeviceScalars

# Whether the run goes on, is saved to go on later, or ends as finished. True is "save".
StopVote: TypeAlias = bool | Literal["save", "finish"]


class StepResult:
    """The result of one step.

    Tensors stay on the device. Reading a number makes the host wait until the device has computed
    it, for the first time.

    Args:
        sums: see the attribute.
        extra: see the attribute.
        is_skipped: see the attribute.
        numbers: ``grad_norm``, ``target_tokens``, ``divisor`` and ``stop_votes``, on their way to
            the host.

    Attributes:
        sums: this rank's sums over its micro-batches.
        extra: what the objective's ``prepass`` returned. In :meth:`Callback.on_step_result`, it may
            have scalars only.
        is_skipped: bool scalar on the device: whether the step changed nothing, because its
            gradient is not finite.
    """

    def __init__(
        self,
        sums: LossSums,
        extra: Batch,
        is_skipped: torch.Tensor,
        numbers: DeviceScalars,
    ) -> None:
        self.sums = sums
        self.extra = extra
        self.is_skipped = is_skipped
        self._numbers = numbers

    @property
    def is_read(self) -> bool:
        """Whether the host has read the numbers."""
        return self._numbers.is_read

    @property
    def grad_norm(self) -> float:
        """The norm of the gradient of the global batch's mean loss, before clipping."""
        return self._numbers.read()["grad_norm"]

    @property
    def target_tokens(self) -> int:
        """Target tokens of the global batch."""
        return int(self._numbers.read()["target_tokens"])

    @property
    def denominator(self) -> float:
        """What the summed loss of the global batch is divided by; 1 if nothing is counted."""
        return self._numbers.read()["divisor"]

    @property
    def stop(self) -> StopVote:
        """How the ranks want to stop, given the votes of all of them."""
        votes = self._numbers.read()["stop_votes"]
        if votes >= SAVE_VOTE:
            return "save"
        return "finish" if votes >= FINISH_VOTE else False

    def free_batches(self) -> None:
        """Keep only the scalars of ``extra``, so that the next step has the memory of the rest."""
        self.extra = {
            name: value for name, value in self.extra.items() if getattr(value, "ndim", 0) == 0
        }


class StepInfo(NamedTuple):
    """How far the loop is after a step, and which periodic actions are due."""

    step: int  # steps made so far
    is_last: bool  # whether all steps of the run are made, or a callback finishes it
    should_stop: bool  # whether the run stops after this step

    def is_due(self, every: float) -> bool:
        """Return whether an action that happens every ``every`` steps is due.

        The last step makes every action due, whatever its period. 0 means never.
        """
        if every == 0:
            return False
        return self.is_last or self.step % every == 0


class Callback(Part):
    """Watches the training loop, or decides when something is done.

    All ranks call the same methods at the same places of the loop. A callback of the user is called
    before those of the loop: what it does at the end of a step is in the log entry, the evaluation
    and the checkpoint of that step.

    Attributes:
        takes_late_results: whether :meth:`on_step_result` and :meth:`on_log` may be called during
            the next step, which may already have changed the weights. By default, a callback that
            has one of these methods is called before the next step, and a GPU waits for it.
    """

    takes_late_results = False

    def setup(self, training: Any) -> None:
        """Called once, when the model is in its place and before a checkpoint is restored.

        Args:
            training: the loop, a :class:`llmtrain.training.loop.Loop`. A callback may keep it, and
                use its ``model``, ``optimizer``, ``step``, ``max_steps``, ``folder``, ``is_main``,
                ``is_last`` and ``write_model``.
        """

    def context(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is open while the loop runs, and closed even after an error."""
        return contextlib.nullcontext()

    def on_train_begin(self) -> None:
        """Called before the first step of this start, after a checkpoint was restored."""

    def on_step_begin(self, batch: LocalBatch) -> None:
        """Called when the batch of a step has been read, before anything is computed."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        """Called directly after the optimizer's step, or after the step was skipped.

        This is before the next batch is computed, and before the evaluation and the checkpoint of
        this step. Reading a number of ``result`` may make the host wait for the device. A step that
        was skipped changed no weights; ``result.is_skipped`` tells without waiting.
        """

    def on_step_result(self, step: int, result: StepResult) -> None:
        """Called when the numbers of a step are on the host, so that reading them does not wait.

        This is after :meth:`on_step_end`, and before the evaluation, the checkpoint and the next
        step. If the callback has :attr:`takes_late_results`, it may be during the next step.

        Args:
            step: steps made, including the step of the result.
            result: the result of that step.
        """

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        """Return further metrics of an evaluation, by name.

        Called in each evaluation. The log entry has them as ``eval/NAME``.

        Args:
            evaluate: evaluates the model with its present weights, and returns metrics such as
                ``loss`` by name. All ranks call it.
        """
        return {}

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a log entry was written, of the train loss or of an evaluation.

        Args:
            step: steps made so far.
            metrics: the numbers of the entry by the names that trackers show, such as
                ``train/loss`` and ``epoch``. They are those of the whole global batch, and the same
                on all ranks, except for times and rates.
        """

    def wants_to_stop(self) -> StopVote:
        """Return ``"save"`` or ``"finish"`` if this rank wants all ranks to stop, or ``False``.

        After ``"save"``, or ``True``, the same command goes on with the run. ``"finish"`` ends it
        as its last step would: the run is evaluated, and its finished model is written. One rank's
        vote is enough. If others vote ``"save"`` in the same step, the run is only saved.

        The ranks stop after the step that begins now. With several ranks this is one step later,
        because the others learn of it with the numbers of this step.
        """
        return False

    def on_train_end(self) -> None:
        """Called after the last step of this start, before the finished model is written."""
