"""What changes while a run is open."""

import signal
from dataclasses import dataclass, field
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
        counted_step: steps whose numbers the host has read, which is at most one step less. The
            other counts belong to these steps.
        tokens: target tokens of these steps.
        skipped: steps that were skipped because their gradient was not finite.
        compiled: whether the model's blocks are compiled; ``None`` until the warm-up chooses.
        last_eval: the last evaluation.
        stop_reason: why this rank wants to stop; empty if it does not.
        stop_signal: the signal that asked this rank to stop, if there was one.
        outcome: how the run has ended; set after the last step of this start.
        sample: a text by the finished model, if it wrote one.
    """

    step: int
    tokens: int
    skipped: int = 0
    compiled: bool | None = None
    last_eval: EvalResult | None = None
    stop_reason: str = ""
    stop_signal: signal.Signals | None = None
    outcome: Outcome = _NOT_TRAINED
    sample: str | None = None
    counted_step: int = field(init=False)

    def __post_init__(self) -> None:
        self.counted_step = self.step

    @property
    def eval_loss(self) -> float | None:
        """The loss of the last evaluation."""
        return None if self.last_eval is None else self.last_eval.metrics["eval/loss"]

    def begin_counting_step(self) -> None:
        """Count a step that was made, before its numbers are read."""
        self.step += 1

    def count_step(self, target_tokens: int) -> None:
        """Count the numbers of the last step."""
        self.counted_step += 1
        self.tokens += target_tokens

    def count_skipped(self) -> None:
        """Count a step whose gradient was not finite, so that it changed no weights."""
        self.skipped += 1

    def ask_to_stop(self, reason: str, stop_signal: signal.Signals | None = None) -> None:
        """Let all ranks save and stop; see :meth:`Callback.wants_to_stop`."""
        self.stop_reason = reason
        self.stop_signal = stop_signal

    def for_checkpoint(self) -> JsonObject:
        """Return the part that ``state.json`` of a checkpoint stores.

        Raises:
            RuntimeError: if the numbers of the last step are not counted yet. That is a bug.
        """
        if self.counted_step != self.step:
            raise RuntimeError(f"step {self.step} is saved before its numbers are counted")
        return {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "compiled": self.compiled,
        }

    def restore(self, stored: JsonObject) -> None:
        """Go on from what ``state.json`` of a checkpoint stores.

        The step and the tokens are known since the run was opened.
        """
        self.skipped = stored["skipped"]
        self.compiled = stored["compiled"]
