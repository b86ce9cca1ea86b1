"""What changes while a run is open."""

import signal
from dataclasses import dataclass
from typing import NamedTuple

from llmtrain.json_types import JsonObject


class Outcome(NamedTuple):
    """How a run has ended. ``status.json`` records the state and the reason."""

    state: str  # ``finished``, ``preempted`` or ``failed``
    reason: str


_NOT_TRAINED = Outcome("failed", "llmtrain.train() was not called")


class EvalResult(NamedTuple):
    """The metrics of an evaluation, and the step after which it was made."""

    step: int
    metrics: JsonObject


@dataclass
class RunStatus:
    """How far a run is, why it should stop, and how it has ended.

    Attributes:
        step: steps made so far. The device may still compute the last one.
        tokens: target tokens of the steps that are counted.
        skipped: steps that were skipped because their gradient was not finite.
        compiled: whether the model's blocks are compiled; ``None`` until the warm-up chooses.
        last_eval: the last evaluation.
        stop_reason: why this rank wants to stop; empty if it does not.
        finish_reason: why a callback has finished the run before its last step; empty if none has.
        stop_signal: the signal that asked this rank to stop, if there was one.
        outcome: how the run has ended; set after the last step of this start.
        sample: a text by the finished model, if it wrote one.
        is_counted: whether the host has read the numbers of the last step, and counted them.
    """

    step: int
    tokens: int
    skipped: int = 0
    compiled: bool | None = None
    last_eval: EvalResult | None = None
    stop_reason: str = ""
    finish_reason: str = ""
    stop_signal: signal.Signals | None = None
    outcome: Outcome = _NOT_TRAINED
    sample: str | None = None
    is_counted: bool = True

    @property
    def counted_step(self) -> int:
        """Steps whose numbers the host has read. All other counts belong to these steps."""
        return self.step if self.is_counted else self.step - 1

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation."""
        return None if self.last_eval is None else self.last_eval.metrics["eval/loss"]

    def count_step(self) -> None:
        """Count a step that was made, before its numbers are read."""
        self._check_counted()
        self.step += 1
        self.is_counted = False

    def count_numbers(self, target_tokens: int) -> None:
        """Count the numbers of the last step."""
        self.is_counted = True
        self.tokens += target_tokens

    def count_skipped(self) -> None:
        """Count a step whose gradient was not finite, so that it changed no weights."""
        self.skipped += 1

    def ask_to_stop(self, reason: str, stop_signal: signal.Signals | None = None) -> None:
        """Let all ranks save and stop; see :meth:`Callback.wants_to_stop`."""
        self.stop_reason = reason
        self.stop_signal = stop_signal

    def for_checkpoint(self) -> JsonObject:
        """Return the part that ``state.json`` of a checkpoint stores."""
        self._check_counted()
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "compiled": self.compiled,
            "finish_reason": self.finish_reason,
        }

    def _check_counted(self) -> None:
        """Raise :class:`RuntimeError` if the numbers of the last step are not counted: a bug."""
        if not self.is_counted:
            raise RuntimeError(f"the numbers of step {self.step} are not counted yet")

    def restore(self, stored: JsonObject) -> None:
        """Go on from what ``state.json`` of a checkpoint stores.

        The step and the tokens are known since the run was opened.
        """
        self.skipped = stored["skipped"]
        self.compiled = stored["compiled"]
