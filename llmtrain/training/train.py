"""Train an open run, after restoring the checkpoint to resume from."""

from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.config.flags import value_of
from llmtrain.console import note, say
from llmtrain.errors import UserError
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.placement import engine_for
from llmtrain.training.callbacks import loop_callbacks
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
    engine = engine_for(
        run.ranks,
        model,
        run.parts.objective,
        run.settings.parallel,
        frozen=run.bundle.frozen,
    )
    check_model(run, engine.unwrapped)
    if run.settings.run.dry_run:
        say(
            "dry run",
            "nothing was trained, and the rows are in the cache; to see rows and their targets: "
            "llmtrain rows RECIPE with the same flags",
        )
        return

    for _ in make_loop(run, engine, optimizer, batches, eval_batches).steps():
        pass


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

    if value_of(run.settings, "rounds", default=0):
        from llmtrain.training.rounds import Rounds  # it imports transformers

        loop.loaders = Rounds(loop, optimizer_state).loaders()
    own_callbacks = loop_callbacks(loop, optimizer_state, eval_batches)
    loop.callbacks = [*run.parts.callbacks, *own_callbacks]
    return loop


def check_steps(run: Run) -> None:
    """Raise :class:`UserError` if a flag names steps that this run does not make."""
    log = run.settings.log
    last_step = run.settings.optim.max_steps
    if run.step > last_step:
        raise UserError(
            f"--max_steps {last_step} is below step {run.step}, from which this run resumes; "
            "raise it."
        )
    if log.xray_range is None:
        return
    if log.xray_range[-1] > last_step:
        raise UserError(
            f"--xray_steps {log.xray_steps} goes past the last step, --max_steps {last_step}; "
            "name earlier steps."
        )
    if log.xray_range[0] <= run.step < last_step:
        note(
            f"--xray_steps {log.xray_steps} records nothing, because this run resumes from step "
            f"{run.step}; name later steps"
        )


def check_model(run: Run, model: Any) -> None:
    """Raise :class:`UserError` if the model or its rows lack what the settings need."""
    sample_prompts = run.settings.eval.sample_prompts
    if sample_prompts and run.rows.tokenizer is None:
        raise UserError(
            "--sample_prompts needs a tokenizer, and the rows were made without one; leave it out."
        )
    if sample_prompts and not model.gives_outputs:
        raise UserError(
            "--sample_prompts: this model only returns a loss; give the parameter `labels` of its "
            "forward the default None, and return logits if it is None."
        )


def say_changed_settings(run: Run) -> None:
    """Print which optimizer settings differ from those of the checkpoint to resume from."""
    recorded = run.resume_point.state.get("fingerprint")
    if recorded is None or run.step == run.settings.optim.max_steps:
        return
    before = recorded["optimizer"] | recorded["learning_rates"]
    now = run.fingerprint["optimizer"] | run.fingerprint["learning_rates"]
    changed_keys = [key for key in now if before.get(key) != now[key]]
    # Most settings of the groups are flags, too, which are shorter to read.
    changes = [f"{key} {before.get(key)} -> {now[key]}" for key in changed_keys if key != "groups"]
    if changed_keys == ["groups"]:
        changes = ["settings of the optimizer's parameter groups"]
    if changes:
        say("changed", ", ".join(changes))
