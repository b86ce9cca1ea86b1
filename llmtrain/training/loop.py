"""The training loop: read a batch, set the learning rate, make a step, and call the callbacks.

Evaluations, log entries and checkpoints are callbacks. The steps made so far are counted in the
run.
"""

import contextlib
import time
from collections.abc import Generator

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError, short_repr
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StopVote
from llmtrain.interfaces.part import name_of
from llmtrain.launching.process import restore_garbage_collection
from llmtrain.observe.throughput import Throughput
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.team import Team
from llmtrain.seeds import seed_of
from llmtrain.training.callbacks import loop_callbacks
from llmtrain.training.checks import (
    check_engine,
    check_steps,
    check_wrapping,
    say_changed_settings,
    say_if_xray_is_missed,
    say_rates,
)
from llmtrain.training.context import LoopContext, TrainingView
from llmtrain.training.read_ahead import read_batches
from llmtrain.training.run import Run
from llmtrain.training.run_state import restore
from llmtrain.training.step import train_step


def train(
    run: Run,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    eval_batches: DataLoaderShard | None = None,
) -> None:
    """Train from ``run.step`` to ``--max_steps``, after restoring the checkpoint to resume from.

    ``run.step`` is already the step of that checkpoint, or 0. With ``--dry_run`` this only checks
    that the run can train.

    Args:
        run: the open run.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: the loader of training batches that ``accelerator.prepare`` returned.
        eval_batches: the loader of eval batches, if there is one, from ``accelerator.prepare``.

    Raises:
        UserError: if the model or the settings do not allow training.
    """
    check_steps(run)
    engine = make_engine(run, model)
    check_engine(run, engine)
    if run.settings.run.dry_run:
        say(
            "dry run",
            "nothing was trained or written; to see rows and their targets: "
            "llmtrain rows RECIPE with the same flags",
        )
        return

    context = LoopContext(
        run=run,
        engine=engine,
        optimizer=optimizer,
        batches=batches,
        eval_batches=eval_batches,
        throughput=Throughput(engine.accelerator, engine.unwrapped),
    )
    for _ in training_steps(context):
        pass


def make_engine(run: Run, model: nn.Module) -> Engine:
    """Return how this process computes the steps of a run.

    Raises:
        UserError: if the loop does not support the accelerator or the wrapping of the model.
    """
    check_wrapping(run.accelerator, model)
    return engine_for(
        run.ranks,
        model,
        objective=run.parts.objective,
        config=run.settings.parallel,
        accumulation=run.layout.accumulation,
    )


def training_steps(context: LoopContext) -> Generator[None]:
    """Train as :func:`train` does, and return to the caller before the first step and after each.

    A caller can run several loops in turns, as the benchmarks do. Closing the generator ends the
    training early, and writes no model.
    """
    run = context.run
    engine = context.engine
    training = TrainingView(context)
    for callback in run.parts.callbacks:
        callback.setup(training)
    restore(run, engine, context.optimizer_state)
    say_if_xray_is_missed(run)
    say_rates(run.rates)
    say_changed_settings(run)

    context.callbacks = [*run.parts.callbacks, *loop_callbacks(context)]
    with contextlib.ExitStack() as contexts:
        contexts.callback(run.rates.restore_peaks)
        contexts.enter_context(engine.phases.watching(run.step))
        for callback in context.callbacks:
            contexts.enter_context(callback.context())
        restore_garbage_collection()
        for callback in context.in_turn("on_train_begin"):
            callback.on_train_begin()

        engine.model.train()
        yield
        # If a run has already ended early, starting it again makes no more steps.
        if not run.early_end:
            yield from _make_steps(context)

        for callback in context.in_turn("on_train_end"):
            callback.on_train_end()


def _make_steps(context: LoopContext) -> Generator[None]:
    """Make a step of each batch, until the run should stop. The loader ends at ``--max_steps``."""
    local_batches = read_batches(context.batches, context.engine)
    with contextlib.closing(local_batches):  # ends the reader's thread, also after an exception
        try:
            for local_batch in local_batches:
                info = _make_step(context, local_batch)
                yield
                if info.should_stop or context.run.early_end:
                    return
        except (Exception, KeyboardInterrupt):
            context.settle_after_failure()
            raise


def _make_step(context: LoopContext, local_batch: LocalBatch) -> StepInfo:
    """Make one step, and call the callbacks before and after it.

    The device may still compute the step when this returns. The host is at most one step ahead: it
    reads the numbers of a step after it has launched the next one, or at once if something needs
    them.
    """
    run = context.run
    engine = context.engine
    settings = run.settings

    start = time.monotonic()
    engine.phases.begin("other")
    for callback in context.in_turn("on_step_begin"):
        callback.on_step_begin(local_batch)
    _seed_dropout(engine, seed=settings.optim.seed, step=run.step)
    run.rates.set(run.step)

    # The step carries the vote to the other ranks, and its result says how any rank wants to stop.
    vote = _vote(context)
    result = train_step(
        engine,
        context.optimizer,
        local_batch.batches,
        max_grad_norm=settings.optim.max_grad_norm,
        stop_requested=vote,
    )
    context.add_step(local_batch.rows, result)

    # All ranks decide the same here. Later, a callback may read the numbers on one rank only.
    info = StepInfo(step=run.step, is_last=run.step == settings.optim.max_steps, should_stop=False)
    settles_at_once = result.is_read or context.needs_result_of(info)
    if settles_at_once:
        context.count_numbers()
    # Other ranks learn of a vote from the numbers of its step. If these are read one step late, the
    # run stops one step later.
    stop = vote if engine.ranks.world_size == 1 else context.stop
    if stop == "finish" and not info.is_last:
        reasons = Team.everyone().on_all(lambda: context.finish_reason)
        run.status.finish_reason = next(filter(None, reasons))
        info = info._replace(is_last=True)
    info = info._replace(should_stop=stop is not False)
    _reserve_step(context, time.monotonic() - start)

    engine.phases.begin("other", run.step)
    for callback in context.in_turn("on_step_end"):
        callback.on_step_end(local_batch, result, info)
    if settles_at_once or info.should_stop:
        context.settle()
    else:
        result.free_batches()
    return info


def _vote(context: LoopContext) -> StopVote:
    """Return how this rank wants to stop after the step that begins now, if at all.

    The run and all callbacks are asked, even if one wants to stop: each records its own reason.

    Raises:
        UserError: if a callback returns another text than the two that it may.
    """
    votes: set[StopVote] = {context.run.wants_to_stop()}
    for callback in context.in_turn("wants_to_stop"):
        vote = callback.wants_to_stop()
        if isinstance(vote, str) and vote not in ("", "save", "finish"):
            raise UserError(
                f"{name_of(callback)}.wants_to_stop returned {short_repr(vote)}; return False, "
                '"save" or "finish".'
            )
        if vote == "finish":
            context.finish_reason = f"{name_of(callback)} has finished the run"
        votes.add(vote if isinstance(vote, str) else bool(vote))
    if votes & {True, "save"}:
        return "save"
    return "finish" if "finish" in votes else False


def _reserve_step(context: LoopContext, seconds: float) -> None:
    """Reserve time for one more step after the step in which a rank votes to stop.

    Other ranks learn of the vote one step later, and a GPU may still compute the step before.
    """
    is_late = context.engine.ranks.world_size > 1 or context.engine.device.type != "cpu"
    if is_late and context.engine.phases.has_dropped_first_step:
        context.run.deadline.reserve("step", seconds)


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
