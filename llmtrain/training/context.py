"""What the callbacks of the training loop work with, and their base class."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult, StopVote
from llmtrain.interfaces.part import name_of
from llmtrain.json_types import JsonObject
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.engine import Engine, check_denominator
from llmtrain.record.history import as_numbers
from llmtrain.training.evaluate import eval_extra, evaluate
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run import Run
from llmtrain.training.run_state import write_model
from llmtrain.training.skipped_steps import count_if_skipped


class LaunchedStep(NamedTuple):
    """The last step, whose numbers the host may not have read yet.

    Attributes:
        step: steps made, including this one.
        rows: int64 [rows], the rows of this rank; see :class:`LocalBatch`.
        result: the result of the step.
    """

    step: int
    rows: torch.Tensor
    result: StepResult


@dataclass
class LoopContext:
    """The objects that a training loop and its callbacks work with.

    Attributes:
        run: the open run.
        engine: how this process computes, with the model and the objective.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: the loader of training batches that ``accelerator.prepare`` returned.
        eval_batches: the loader of eval batches, if there are any.
        throughput: counts tokens between two log entries.
        callbacks: all callbacks in the order in which they are called: the user's, then those of
            the loop. The loop sets them when it begins.
        launched: the last step, until it is settled.
        stop: how any rank wanted to stop, at the last step that is counted.
        finish_reason: why a callback of this rank wants to finish the run.
    """

    run: Run
    engine: Engine
    optimizer: AcceleratedOptimizer
    batches: DataLoaderShard
    eval_batches: DataLoaderShard | None
    throughput: Throughput
    callbacks: list[Callback] = field(default_factory=list)
    launched: LaunchedStep | None = None
    stop: StopVote = False
    finish_reason: str = ""

    @functools.cached_property
    def optimizer_state(self) -> OptimizerState:
        """The state of the optimizer. First use it before a checkpoint is restored."""
        return OptimizerState(self.engine.unwrapped, self.optimizer.optimizer)

    def in_turn(self, method: str) -> Iterator[Callback]:
        """Yield each callback, whose ``method`` is called then.

        If it hangs, the heartbeat names it. Callbacks of the loop are known by their phases.
        """
        phases = self.engine.phases
        for callback in self.callbacks:
            is_own = isinstance(callback, LoopCallback)
            phases.enter_callback("" if is_own else f"{name_of(callback)}.{method}")
            yield callback
        phases.enter_callback("")

    def add_step(self, rows: torch.Tensor, result: StepResult) -> None:
        """Settle the step before, and count a step that was launched.

        Args:
            rows: the rows of this rank; see :class:`LaunchedStep`.
            result: the result of the step.

        Raises:
            UserError: if the step before was skipped, and no more steps may be.
        """
        self.settle()
        self.run.status.count_step()
        self.launched = LaunchedStep(step=self.run.step, rows=rows, result=result)

    def count_numbers(self) -> None:
        """Wait for the numbers of the last step, and count them in the run.

        Raises:
            UserError: if the step was skipped, and no more steps may be.
        """
        launched = self.launched
        if launched is None or self.run.status.is_counted:
            return
        self.engine.phases.begin("norm")
        numbers = launched.result.numbers
        check_denominator(self.engine.objective, numbers.denominator)
        count_if_skipped(
            self.run,
            self.engine,
            step=launched.step,
            rows=launched.rows,
            grad_norm=numbers.grad_norm,
        )
        self.run.status.count_numbers(numbers.target_tokens)
        # A vote holds until the run stops. One to save outweighs one to finish.
        if self.stop != "save":
            self.stop = numbers.stop or self.stop
        self.engine.phases.begin("other")

    def settle(self) -> None:
        """Count the last step, and pass its result to all callbacks.

        Call this before anything reads or stores the state of the run, such as the weights. All
        ranks call it at the same places. Calling it again does nothing.

        Raises:
            UserError: if the step was skipped, and no more steps may be.
        """
        launched = self.launched
        if launched is None:
            return
        self.count_numbers()
        self.launched = None
        for callback in self.in_turn("on_step_result"):
            callback.on_step_result(launched.step, launched.result)

    def settle_after_failure(self) -> None:
        """Settle the last step if it was made, although something has failed since.

        Other ranks may be gone, so this waits for none of them and asks them nothing.

        Raises:
            UserError: if the step was skipped, and no more steps may be. That is the reason to
                show, rather than what has failed since.
        """
        if self.launched is None or not self._can_settle_alone(self.launched.result):
            return

        if self.engine.ranks.world_size > 1:
            # The other callbacks may ask the other ranks something.
            self.callbacks = [item for item in self.callbacks if item.takes_late_results]
        try:
            self.settle()
        except UserError:
            raise
        except Exception:  # the first error is the one to show
            return

    def _can_settle_alone(self, result: StepResult) -> bool:
        """Return whether this rank can settle a step without other ranks.

        On a GPU, numbers of other ranks may still be missing in the log entry. If the step was
        skipped, its rows are gathered from all ranks.
        """
        if self.engine.ranks.world_size == 1:
            return True
        return self.engine.device.type == "cpu" and math.isfinite(result.grad_norm)

    def needs_result_of(self, info: StepInfo) -> bool:
        """Return whether something needs the result of a step before the next one."""
        if self.evaluates_after(info) or self.saves_after(info):
            return True
        is_logged = info.is_due(self.run.settings.log.logging_steps)
        return any(
            _has_own(callback, "on_step_result") or (is_logged and _has_own(callback, "on_log"))
            for callback in self.callbacks
            if not callback.takes_late_results
        )

    def log(self, metrics: JsonObject) -> None:
        """Write a log entry, and pass its numbers to all callbacks."""
        numbers = as_numbers(self.run.log(metrics))
        for callback in self.in_turn("on_log"):
            callback.on_log(self.run.step, numbers)

    @property
    def evaluates(self) -> bool:
        """Whether the run makes evaluations."""
        return self.eval_batches is not None and self.run.settings.eval.eval_steps > 0

    def measure(self) -> dict[str, float]:
        """Return the eval metrics of the model with its present weights, by name."""
        # Some objectives need a pass over all eval batches before the loss, such as KTO for its
        # baseline. For the others this makes no pass and returns nothing.
        extra = eval_extra(self.engine, self._read_eval_batches)
        return evaluate(
            self.engine,
            self._read_eval_batches(),
            text_bytes=self.run.rows.metadata.eval_bytes,
            metrics=self.run.parts.metrics,
            sources=self.run.rows.eval_sources,
            extra=extra,
        )

    def _read_eval_batches(self) -> Iterator[LocalBatch]:
        assert self.eval_batches is not None
        for batch in self.eval_batches:
            # A long phase could be taken for a hang, so it begins again with each batch.
            self.engine.phases.begin("an evaluation")
            yield batch

    def evaluates_after(self, info: StepInfo) -> bool:
        """Return whether the model is evaluated after a step.

        After the last step it always is. A run that is about to stop skips an evaluation, to stop
        sooner, unless evaluations choose its best checkpoint. A resume does not make up for it.
        """
        if info.is_last:
            return True
        may_skip = info.should_stop and not self.run.patience.keeps_best
        return info.is_due(self.run.settings.eval.eval_steps) and not may_skip

    def saves_after(self, info: StepInfo) -> bool:
        """Return whether a checkpoint is made after a step.

        That is the case when ``--save_steps`` is due, which the last step always is; after any step
        if the run was asked to stop; and at each evaluation that may choose the best checkpoint.
        """
        settings = self.run.settings
        may_become_best = self.run.patience.keeps_best and info.is_due(settings.eval.eval_steps)
        return info.should_stop or info.is_due(settings.run.save_steps) or may_become_best


def _has_own(callback: Callback, method: str) -> bool:
    """Return whether a callback has a method of its own, instead of the one that does nothing."""
    return getattr(type(callback), method) is not getattr(Callback, method)


class TrainingView:
    """What a callback of the user may use: see :class:`llmtrain.interfaces.callback.Training`."""

    def __init__(self, context: LoopContext) -> None:
        self._context = context

    @property
    def model(self) -> nn.Module:
        return self._context.engine.unwrapped

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._context.run.parts.optimizer

    @property
    def step(self) -> int:
        return self._context.run.step

    @property
    def max_steps(self) -> int:
        return self._context.run.settings.optim.max_steps

    @property
    def folder(self) -> Path:
        return self._context.run.folder

    @property
    def is_main(self) -> bool:
        return self._context.engine.ranks.is_main

    @property
    def is_last(self) -> bool:
        run = self._context.run
        return run.step == run.settings.optim.max_steps or bool(run.early_end)

    def write_model(self, folder: Path) -> None:
        self._context.count_numbers()
        write_model(self._context.run, self._context.engine, folder)


class LoopCallback(Callback):
    """A callback of the loop's own, which works with its context."""

    takes_late_results = True

    def __init__(self, context: LoopContext) -> None:
        self.loop_context = context
        self.run = context.run
        self.engine = context.engine
        self.settings = context.run.settings
