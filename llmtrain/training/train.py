"""Train an open run, after restoring the checkpoint to resume from."""

from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import say
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.placement import engine_for
from llmtrain.training.callbacks import loop_callbacks
from llmtrain.training.checks import (
    check_model,
    check_steps,
    check_wrapping,
    say_changed_settings,
)
from llmtrain.training.loop import Loop
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run import Run
from llmtrain.training.run_state import restore


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
    check_model(run, engine.unwrapped)
    if run.settings.run.dry_run:
        say(
            "dry run",
            "nothing was trained or written; to see rows and their targets: "
            "llmtrain rows RECIPE with the same flags",
        )
        return

    for _ in make_loop(run, engine, optimizer, batches, eval_batches).steps():
        pass


def make_engine(run: Run, model: nn.Module) -> Engine:
    """Return how this process computes the steps of a run.

    Raises:
        UserError: if the loop does not support the wrapping of the model.
    """
    check_wrapping(model)
    return engine_for(
        run.ranks,
        model,
        objective=run.parts.objective,
        config=run.settings.parallel,
    )


def make_loop(
    run: Run,
    engine: Engine,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    eval_batches: DataLoaderShard | None = None,
) -> Loop:
    """Return the loop of a run whose checkpoint is restored; see :func:`train`."""
    loop = Loop(run, engine, optimizer, batches)
    for callback in run.parts.callbacks:
        callback.setup(loop)
    optimizer_state = OptimizerState(engine.unwrapped, optimizer.optimizer)
    restore(run, engine, optimizer_state)
    say_changed_settings(run)

    own_callbacks = loop_callbacks(loop, optimizer_state, eval_batches)
    loop.callbacks = [*run.parts.callbacks, *own_callbacks]
    return loop
