"""The training loop. What happens around a step is a callback; the state is that of the run."""

import contextlib
import functools
import math
from collections.abc import Generator, Sequence
from concurrent import futures
from dataclasses import fields

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import say
from llmtrain.data.shuffle import key_of
from llmtrain.errors import UserError
from llmtrain.launching.process import restore_garbage_collection
from llmtrain.observe.preview import preview
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.engine_choice import engine_for
from llmtrain.parallel.mesh import TrainingAccelerator
from llmtrain.training.callbacks import LoopContext, Timing, callbacks_of
from llmtrain.training.optim import lr_at
from llmtrain.training.run import Run
from llmtrain.training.run_state import restore
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step
from llmtrain.types import Callback, LocalBatch, Metric, StepInfo, StepResult

_READER_SECONDS = 5.0  # to wait for the thread that reads ahead, when training ends


def train(
    run: Run,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    eval_batches: DataLoaderShard | None = None,
    metric: Metric | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Train from ``run.step`` to ``--max_steps``, after restoring the checkpoint to resume from.

    ``run.step`` is already the step of that checkpoint, or 0. With ``--dry_run`` this only prints
    the rows that the run would train on.

    Args:
        run: the open run.
        model: the model that ``accelerator.prepare`` returned.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        batches: the loader of training batches that ``accelerator.prepare`` returned.
        eval_batches: the loader of eval batches, if there is one, from ``accelerator.prepare``.
        metric: a custom metric, computed in every evaluation.
        callbacks: custom callbacks, called after those of the loop.

    Raises:
        UserError: if the model or the settings do not allow training.
    """
    steps = training_steps(run, model, optimizer, batches, eval_batches, metric, callbacks)
    for _ in steps:
        pass


def training_steps(
    run: Run,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    eval_batches: DataLoaderShard | None = None,
    metric: Metric | None = None,
    callbacks: Sequence[Callback] = (),
) -> Generator[LoopContext]:
    """Train as :func:`train` does, and return to the caller before the first step and after each.

    A caller can run several loops in turns, as the benchmarks do. Closing the generator ends the
    training early, and writes no model.

    Args:
        run: see :func:`train`, as all others.
    """
    settings = run.settings
    check_wrapping(run.accelerator, model)
    _check_steps(run)
    engine = engine_for(
        run.accelerator,
        model,
        objective=run.bundle.objective,
        config=settings.parallel,
        bitwise=settings.parallel.bitwise,
        accumulation=run.layout.accumulation,
    )
    _check_engine(run, engine)
    if settings.run.dry_run:
        preview(run.rows.train, run.rows.tokenizer)
        return

    restore(run, engine, optimizer)
    _say_if_xray_is_missed(run)
    _say_changed_settings(run)

    context = LoopContext(
        run=run,
        engine=engine,
        optimizer=optimizer,
        eval_batches=eval_batches,
        metric=metric,
        timing=Timing(run, engine),
    )
    all_callbacks = [*callbacks_of(context), *callbacks]
    run.log_listeners = [callback.on_log for callback in callbacks]
    with contextlib.ExitStack() as contexts:
        for callback in all_callbacks:
            contexts.enter_context(callback.context())
        restore_garbage_collection()
        for callback in all_callbacks:
            callback.on_train_begin()

        model.train()
        yield context
        # If a run has already stopped early, starting it again makes no more steps.
        if not run.patience.is_over:
            yield from _make_steps(context, all_callbacks, batches)

        for callback in all_callbacks:
            callback.on_train_end()


def _make_steps(
    context: LoopContext, callbacks: Sequence[Callback], batches: DataLoaderShard
) -> Generator[LoopContext]:
    """Make a step of each batch, until the run should stop. The loader ends at ``--max_steps``."""
    local_batches = _read_ahead(context.engine, batches)
    with contextlib.closing(local_batches):  # ends the reader's thread, also after an exception
        for local_batch in local_batches:
            info = _make_step(context, callbacks, local_batch)
            yield context
            if info.should_stop or context.run.patience.is_over:
                return


def _make_step(
    context: LoopContext, callbacks: Sequence[Callback], local_batch: LocalBatch
) -> StepInfo:
    """Make one step, and call the callbacks before and after it."""
    run = context.run
    engine = context.engine
    settings = run.settings

    for callback in callbacks:
        callback.on_step_begin(local_batch)
    _seed_dropout(engine, seed=settings.optim.seed, step=run.step)
    for group in context.optimizer.param_groups:
        group["lr"] = lr_at(run.step, settings.optim)

    # Ask the run and all callbacks, even if one wants to stop: each records its own reason. The
    # step carries the vote to the other ranks, and its result says whether any rank wants to stop.
    votes = [run.wants_to_stop(), *(callback.wants_to_stop() for callback in callbacks)]
    result = train_step(
        engine,
        context.optimizer,
        local_batch.batches,
        max_grad_norm=settings.optim.max_grad_norm,
        stop_requested=any(votes),
    )
    _count_if_skipped(run, engine, local_batch, result)
    run.step += 1
    run.tokens += result.target_tokens

    engine.set_phase("other")
    info = StepInfo(
        step=run.step,
        is_last=run.step == settings.optim.max_steps,
        should_stop=result.should_stop,
    )
    for callback in callbacks:
        callback.on_step_end(local_batch, result, info)
    return info


def _read_ahead(engine: Engine, loader: DataLoaderShard) -> Generator[LocalBatch]:
    """Yield the batches of a prepared loader, on its device, while another thread reads the next.

    This replaces ``DataLoaderShard.__iter__`` and makes the same calls. Only reading and collating
    move to the other thread. ``begin`` and ``end`` are called on this one: they change Accelerate's
    gradient state, which is not thread-safe, and evaluations on this thread change it too. Waiting
    for a batch is the phase ``data``.
    """
    choose_device = None
    if engine.device.type == "cuda":  # each thread has its own current device
        choose_device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    reader = futures.ThreadPoolExecutor(1, thread_name_prefix="batches", initializer=choose_device)

    loader.set_epoch(loader.iteration)
    batches_on_host = iter(loader.base_dataloader)

    def start_reading() -> futures.Future[LocalBatch | None]:
        """Read the next batch on the other thread; after the last one, the result is ``None``."""
        return reader.submit(next, batches_on_host, None)

    engine.set_phase("data")
    pending_read = start_reading()
    loader.begin()
    try:
        batch = pending_read.result()
        pending_read = start_reading()
        # At the top of the loop, `pending_read` reads the batch after `batch`. It is awaited before
        # `batch` is yielded, because Accelerate must know whether `batch` is the last. Then the
        # next read starts, and continues while the caller trains on `batch`.
        while batch is not None:
            next_batch = pending_read.result()
            if next_batch is None:
                loader.end_of_dataloader = True
            else:
                pending_read = start_reading()

            if loader.device is not None:
                batch = batch.to(loader.device, non_blocking=engine.accelerator.non_blocking)
            yield batch

            engine.set_phase("data")
            batch = next_batch
        loader.iteration += 1
    finally:
        # If an error passes, a read that hangs must not keep this rank from reporting the error.
        _, hanging = futures.wait([pending_read], timeout=_READER_SECONDS)
        reader.shutdown(wait=not hanging, cancel_futures=True)
        loader.end()


def _seed_dropout(engine: Engine, seed: int, step: int) -> None:
    """Seed torch's generators, from which dropout draws.

    The seed depends only on the run's seed, the step and the rank. A model that takes
    ``dropout_keys`` computes its dropout from these instead, and draws nothing.
    """
    count = step * engine.world_size + engine.rank
    seed_of_rank = key_of(seed, count) >> 1  # a key has 64 bits, and a seed 63

    # `torch.manual_seed` would look for devices of every kind, which takes 0.3 ms.
    torch.default_generator.manual_seed(seed_of_rank)
    if engine.device.type != "cpu":
        torch.get_device_module(engine.device).manual_seed(seed_of_rank)


def _count_if_skipped(
    run: Run, engine: Engine, local_batch: LocalBatch, result: StepResult
) -> None:
    """Count the step if it was skipped because its gradient is not finite.

    Raises:
        UserError: on every rank, if ``--skip_nonfinite`` allows no more skipped steps.
    """
    step = run.step + 1
    allowed = run.settings.optim.skip_nonfinite
    if math.isfinite(result.grad_norm):
        return
    if step == run.settings.log.replay_step:  # the user wants to look at this very step
        return
    # With fp16, a loss scale that is too large makes gradients overflow. Skipping such steps while
    # the scale is lowered is normal. A scale below 1 is not too large, so the gradient is at fault.
    scaler = engine.accelerator.scaler
    if scaler is not None and scaler.get_scale() >= 1:
        return

    # Padding has the row -1.
    rows = [row for row in engine.gather_rows(local_batch.rows).tolist() if row >= 0]
    event = f"step {step} was skipped: its gradient norm is {result.grad_norm}; its rows are {rows}"
    if run.skipped == allowed:
        raise UserError(
            f"{event}. Lower --learning_rate, or allow some skipped steps with --skip_nonfinite. "
            "The newest checkpoint is untouched."
        )
    run.skipped += 1
    run.record_event("skipped", f"{event} ({run.skipped} of --skip_nonfinite {allowed})")


def check_wrapping(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that the loop supports the accelerator and the wrapping of the model.

    Raises:
        UserError: if it does not.
    """
    if not isinstance(accelerator, TrainingAccelerator):
        raise UserError("this loop needs the Accelerator that llmtrain.start() makes.")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "the model is wrapped in nn.DataParallel, which this loop does not support. Do not "
            "wrap it (accelerator.prepare wraps it in DDP), and start one process per GPU with "
            "accelerate launch."
        )


def _check_steps(run: Run) -> None:
    """Raise :class:`UserError` if a flag names steps that this run does not make."""
    log = run.settings.log
    last_step = run.settings.optim.max_steps
    if run.step > last_step:
        raise UserError(
            f"--max_steps {last_step} is below step {run.step}, from which this run resumes; "
            "raise it."
        )
    steps_to_make = range(run.step + 1, last_step + 1)
    if log.replay_step is not None and log.replay_step not in steps_to_make:
        raise UserError(
            f"--replay_step {log.replay_step}: this run makes steps {run.step + 1} to "
            f"{last_step}; name one of these."
        )
    if log.xray_range is not None and log.xray_range[-1] > last_step:
        raise UserError(
            f"--xray_steps {log.xray_steps} goes past the last step, --max_steps {last_step}; "
            "name earlier steps."
        )


def _check_engine(run: Run, engine: Engine) -> None:
    """Raise :class:`UserError` if the model or its rows lack what the settings need."""
    sample_prompts = run.settings.eval.sample_prompts
    if sample_prompts and run.rows.tokenizer is None:
        raise UserError(
            "--sample_prompts needs a tokenizer, and the rows were made without one; leave it out."
        )
    if sample_prompts and not engine.unwrapped.gives_outputs:
        raise UserError(
            "--sample_prompts: this model only returns a loss; give the parameter `labels` of its "
            "forward the default None, and return logits if it is None."
        )


def _say_if_xray_is_missed(run: Run) -> None:
    """Print a line if the first step that ``--xray_steps`` records was made before the checkpoint.

    Steps are counted from 1, and ``run.step`` steps are made.
    """
    recorded_steps = run.settings.log.xray_range
    if recorded_steps is not None and run.step >= recorded_steps.start:
        say(
            "x-ray",
            f"none: --xray_steps begins with step {recorded_steps.start}, but this run resumes "
            f"with step {run.step + 1}",
        )


def _say_changed_settings(run: Run) -> None:
    """Print which optimizer settings differ from those of the checkpoint to resume from."""
    recorded = run.resume_point.optim_settings
    current = run.settings.optim.fingerprint
    if recorded is None or recorded == current:
        return
    changes = ", ".join(
        f"{key} {recorded.get(key)} -> {value}"
        for key, value in current.items()
        if recorded.get(key) != value
    )

    # A recipe may have recorded optimizer settings that OptimConfig does not have.
    names = {field.name for field in fields(OptimConfig)}
    recorded_config = OptimConfig(
        **{name: value for name, value in recorded.items() if name in names}
    )
    last_rate = lr_at(run.step - 1, recorded_config)
    next_rate = lr_at(run.step, run.settings.optim)
    say(
        "changed",
        f"{changes}; the learning rate goes from {last_rate:.3g} in step {run.step} "
        f"to {next_rate:.3g} in step {run.step + 1}",
    )
