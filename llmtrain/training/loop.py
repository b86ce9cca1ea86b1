"""The training loop: read a batch, set the learning rate, make a step, and call the callbacks.

Evaluations, log entries and checkpoints are callbacks.
"""

import contextlib
import math
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.errors import DamagedRowsError, UserError, short_repr
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StopVote
from llmtrain.interfaces.part import name_of
from llmtrain.launching.process import restore_garbage_collection
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.engine import Engine, check_denominator
from llmtrain.record.history import as_numbers
from llmtrain.seeds import seed_of
from llmtrain.training.read_ahead import read_batches
from llmtrain.training.run import Run
from llmtrain.training.run_state import write_model
from llmtrain.training.step import train_step


class Loop:
    """The training loop of a run. Callbacks get it in :meth:`Callback.setup`.

    The host is at most one step ahead of the device: it reads the numbers of a step after it has
    launched the next one, or at once if something needs them. A step is *settled* when its numbers
    are counted in the run, and all callbacks have them.

    Args:
        run: the open run.
        engine: how this process computes, with the model and the objective.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: the loader of training batches that ``accelerator.prepare`` returned.

    Attributes:
        throughput: counts tokens between two log entries.
        callbacks: all callbacks in the order in which they are called: the user's, then those of
            the loop.
        is_damaged: whether the run stops because a rank cannot read its next batch. The reason to
            stop is then the error.
        loaders: the prepared loaders of the training batches, one after the other.
    """

    def __init__(
        self,
        run: Run,
        engine: Engine,
        optimizer: AcceleratedOptimizer,
        batches: DataLoaderShard,
    ) -> None:
        self.run = run
        self.engine = engine
        self.throughput = Throughput(engine.accelerator, engine.unwrapped)
        self.callbacks: list[Callback] = []
        self.is_damaged = False
        self._allowed_skips = run.settings.optim.skip_nonfinite
        self.loaders: Iterable[DataLoaderShard] = [batches]
        self._prepared_optimizer = optimizer
        self._rows: torch.Tensor  # the numbers of this rank's rows in the last step
        self._stop: StopVote = False  # how any rank wanted to stop, at the last settled step
        self._finish_reason = ""  # why a callback of this rank wants to finish the run
        self._damage = ""  # why this rank cannot read the batch after its last readable step
        self._last_readable_step = 0

    # --- what callbacks of the user may use

    @property
    def model(self) -> nn.Module:
        """The unwrapped model. Under FSDP2, its parameters are DTensors."""
        return self.engine.unwrapped

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, without the wrapper of Accelerate."""
        return self.run.parts.optimizer

    @property
    def step(self) -> int:
        """Steps made so far."""
        return self.run.step

    @property
    def max_steps(self) -> int:
        """Steps of the run."""
        return self.run.settings.optim.max_steps

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.run.folder

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.engine.ranks.is_main

    @property
    def is_last(self) -> bool:
        """Whether the run is over: all steps are made, or something has ended it early."""
        return self.step == self.max_steps or bool(self.run.early_end)

    def write_model(self, folder: Path) -> None:
        """Write the model with its present weights, as Hugging Face loads it; all ranks call it."""
        write_model(self.run, self.engine, folder)

    # --- the loop

    def steps(self) -> Generator[None]:
        """Make all steps. Return to the caller before the first one and after each.

        A caller can run several loops in turns, as the benchmarks do. Closing the generator ends
        the training early, and writes no model.
        """
        run = self.run
        with contextlib.ExitStack() as contexts:
            contexts.callback(run.rates.restore_peaks)
            contexts.enter_context(self.engine.phases.watching(run.step))
            for callback in self.callbacks:
                contexts.enter_context(callback.context())
            restore_garbage_collection()
            for callback in self.in_turn("on_train_begin"):
                callback.on_train_begin()

            self.engine.model.train()
            yield
            # If a run has already ended early, starting it again makes no more steps.
            if not run.early_end:
                yield from self._make_steps()

            for callback in self.in_turn("on_train_end"):
                callback.on_train_end()

    def _make_steps(self) -> Generator[None]:
        """Make a step of each batch, until the run should stop. The loaders end at the last one."""
        batches = self._batches()
        with contextlib.closing(batches):  # ends the reader's thread, also after an exception
            try:
                for batch in batches:
                    info = self._make_step(batch)
                    yield
                    if info.should_stop or self.run.early_end:
                        return
            except (Exception, KeyboardInterrupt):
                # The last step belongs in the log, too. If it is one too many that was skipped,
                # that is the reason of the error. Other ranks may wait elsewhere.
                if self.engine.ranks.world_size == 1:
                    try:
                        self.settle()
                    except UserError:
                        raise
                    except Exception:  # the first error is the one to show
                        pass
                raise

    def _batches(self) -> Generator[LocalBatch]:
        """Yield the batches of all loaders."""
        for loader in self.loaders:
            yield from read_batches(loader, self.engine, self._note_damage)

    def _note_damage(self, error: DamagedRowsError, good_batches: int) -> None:
        """Vote to save, because this rank cannot read the batch after ``good_batches`` more."""
        self._damage = str(error)
        self._last_readable_step = self.step + good_batches

    def _make_step(self, batch: LocalBatch) -> StepInfo:
        """Make one step, and call the callbacks before and after it."""
        run = self.run
        phases = self.engine.phases
        optim = run.settings.optim
        start = time.monotonic()

        phases.begin("other")
        for callback in self.in_turn("on_step_begin"):
            callback.on_step_begin(batch)
        _seed_dropout(self.engine, seed=optim.seed, step=run.step)
        run.rates.set(run.step)

        vote = self._vote()
        result = train_step(
            self.engine,
            self._prepared_optimizer,
            batch.batches,
            max_grad_norm=optim.max_grad_norm,
            stop_requested=vote,  # which the step carries to the other ranks
        )
        # The device computes this step while the host reads the numbers of the step before.
        self.settle()
        run.status.step += 1
        run.status.pending = result
        self._rows = batch.rows
        info = self._agree_to_stop(vote)

        # Other ranks learn of a vote to stop one step later, and a GPU may still compute the step
        # before. The first step of a start takes longer.
        if phases.has_dropped_first_step:
            run.deadline.reserve("step", time.monotonic() - start)

        phases.begin("other", run.step)
        for callback in self.in_turn("on_step_end"):
            callback.on_step_end(batch, result, info)
        if result.is_read or self._is_needed_now(info):
            self.settle()
        else:
            result.free_batches()
        return info

    def _agree_to_stop(self, vote: StopVote) -> StepInfo:
        """Decide how far the run is after the step that was just launched; all ranks agree on it.

        Args:
            vote: of this rank. The other ranks learn of it with the numbers of the step.
        """
        status = self.run.status
        stop = vote if self.engine.ranks.world_size == 1 else self._stop
        is_last = self.step == self.max_steps
        if stop and not is_last:
            # Without the next batch, the run cannot go on. If a later one is damaged, it can.
            damage = self._damage if self.step == self._last_readable_step else ""
            # The reason may be that of another rank.
            reasons = self.run.ranks.on_all(
                lambda: (status.stop_reason, self._finish_reason, damage)
            )
            stop_reasons, finish_reasons, damages = zip(*reasons, strict=True)
            if stop == "finish":
                status.finish_reason = next(filter(None, finish_reasons))
                is_last = True
            else:
                # A signal ends the run as usual. The next start finds the damage.
                all_reasons = (*stop_reasons, *damages)
                status.stop_reason = next(filter(None, all_reasons), "asked to stop")
                self.is_damaged = status.stop_reason in damages
        return StepInfo(step=self.step, is_last=is_last, should_stop=stop is not False)

    def _is_needed_now(self, info: StepInfo) -> bool:
        """Return whether a callback takes the result of a step before the next one."""
        is_logged = info.is_due(self.run.settings.log.logging_steps)
        return any(
            _has_own(callback, "on_step_result") or (is_logged and _has_own(callback, "on_log"))
            for callback in self.callbacks
            if not callback.takes_late_results
        )

    def settle(self) -> None:
        """Count the numbers of the last step, and pass its result to all callbacks.

        This happens before anything reads or stores the state of the run: callbacks that do so call
        it first. All ranks call it at the same places. Calling it again does nothing.

        Raises:
            UserError: if the step was skipped, and no more steps may be.
        """
        status = self.run.status
        result = status.pending
        if result is None:
            return
        self.engine.phases.begin("norm")
        check_denominator(self.engine.objective, result.denominator)

        # With fp16, a loss scale that is too large makes gradients overflow. Skipping such steps
        # while the scale is lowered is normal. A scale below 1 is not too large, so the gradient is
        # at fault.
        scaler = self.engine.accelerator.scaler
        is_scaling = scaler is not None and scaler.get_scale() >= 1
        if not math.isfinite(result.grad_norm) and not is_scaling:
            self._count_skipped(result.grad_norm)
        status.tokens += result.target_tokens
        status.pending = None
        # A vote holds until the run stops. One to save outweighs one to finish.
        if self._stop != "save":
            self._stop = result.stop or self._stop

        self.engine.phases.begin("other")
        for callback in self.in_turn("on_step_result"):
            callback.on_step_result(self.step, result)

    def _count_skipped(self, grad_norm: float) -> None:
        """Count a step that changed nothing; all ranks call this.

        Raises:
            UserError: on every rank, if ``--skip_nonfinite`` allows no more skipped steps.
        """
        status = self.run.status
        rows = [row for row in self.engine.ranks.gather_rows(self._rows).tolist() if row >= 0]
        event = (
            f"step {self.step} was skipped: its gradient norm is {grad_norm}; its rows are {rows}"
        )
        if status.skipped >= self._allowed_skips:
            raise UserError(
                f"{event}. Lower --learning_rate, or allow some skipped steps with "
                "--skip_nonfinite. The newest checkpoint is untouched."
            )
        status.skipped += 1
        count = f"{status.skipped} of --skip_nonfinite {self._allowed_skips}"
        self.run.record_event("skipped", f"{event} ({count})")

    def _vote(self) -> StopVote:
        """Return how this rank wants to stop after the step that begins now, if at all.

        The run and all callbacks are asked, even if one wants to stop: each records its own reason.

        Raises:
            UserError: if a callback returns another text than the two that it may.
        """
        votes: set[StopVote] = {self.run.wants_to_stop()}
        for callback in self.in_turn("wants_to_stop"):
            vote = callback.wants_to_stop()
            if isinstance(vote, str) and vote not in ("", "save", "finish"):
                raise UserError(
                    f"{name_of(callback)}.wants_to_stop returned {short_repr(vote)}; return False, "
                    '"save" or "finish".'
                )
            if vote == "finish":
                self._finish_reason = f"{name_of(callback)} has finished the run"
            votes.add(vote if isinstance(vote, str) else bool(vote))
        if votes & {True, "save"}:
            return "save"
        return "finish" if "finish" in votes else bool(self._damage)

    # --- for the callbacks of the loop

    def in_turn(self, method: str) -> Iterator[Callback]:
        """Yield each callback that has a method, which is called then.

        If it hangs, the heartbeat names it. Callbacks of the loop are known by their phases.
        """
        phases = self.engine.phases
        for callback in self.callbacks:
            if not _has_own(callback, method):
                continue
            is_own = isinstance(callback, LoopCallback)
            phases.enter_callback("" if is_own else f"{name_of(callback)}.{method}")
            yield callback
        phases.enter_callback("")

    def log(self, metrics: JsonObject) -> None:
        """Write a log entry, and pass its numbers to all callbacks."""
        numbers = as_numbers(self.run.log(metrics))
        for callback in self.in_turn("on_log"):
            callback.on_log(self.step, numbers)


class LoopCallback(Callback):
    """A callback of the loop's own. One that uses the model settles the step before."""

    takes_late_results = True

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.run = loop.run
        self.engine = loop.engine


def _has_own(callback: Callback, method: str) -> bool:
    """Return whether a callback has a method of its own, instead of the one that does nothing."""
    is_of_class = getattr(type(callback), method) is not getattr(Callback, method)
    return is_of_class or method in vars(callback)


def _seed_dropout(engine: Engine, seed: int, step: int) -> None:
    """Seed torch's generators, from which dropout draws.

    The seed depends only on the run's seed, the step and the rank. A model that takes
    ``dropout_keys`` computes its dropout from these instead, and draws nothing.
    """
    count = step * engine.ranks.world_size + engine.ranks.rank
    seed_of_rank = seed_of(seed, count)

    # `torch.manual_seed` would look for devices of every kind, which takes 0.3 ms.
    torch.default_generator.manual_seed(seed_of_rank)
    if engine.device.type != "cpu":
        torch.get_device_module(engine.device).manual_seed(seed_of_rank)
