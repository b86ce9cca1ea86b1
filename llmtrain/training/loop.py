"""The training loop. Its only state is the step; everything around a step is an observer."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from dataclasses import asdict, fields

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import say
from llmtrain.contract import Due, Forward, ForwardBackward, Metric, Observer, Update, Window
from llmtrain.data.order import key_of
from llmtrain.errors import UserError
from llmtrain.launching.process import settle
from llmtrain.observe.preview import preview
from llmtrain.parallel.bitwise import BitwiseGradients
from llmtrain.parallel.ddp import handler_of
from llmtrain.parallel.fsdp import is_sharded
from llmtrain.parallel.mesh import data_parallel_rank, data_parallel_size, gather_rows, is_whole
from llmtrain.parallel.pipeline import Pipeline
from llmtrain.training.observers import Timing, Training, observers_of
from llmtrain.training.optim import lr_at
from llmtrain.training.run import Run
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import Accumulation, plain_of, train_step

_READER_SECONDS = 5.0  # to wait for the thread that reads ahead, when training ends


def train(
    run: Run,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    held_out: DataLoaderShard | None = None,
    metric: Metric | None = None,
) -> None:
    """Train from ``run.step`` to ``--max_steps``, after restoring the checkpoint to resume from.

    With ``--dry_run`` it only shows the rows that it would train on.

    Args:
        run: the open run.
        model: what ``accelerator.prepare`` returned.
        optimizer: what ``accelerator.prepare`` returned.
        batches: the loader of training batches, as ``accelerator.prepare`` returned it.
        held_out: the loader of eval batches, likewise.
        metric: a metric of your own, computed in every evaluation.

    Raises:
        UserError: if the model or the settings do not allow training.
    """
    settings = run.settings
    check_can_train(run, model, metric)
    if settings.loop.dry_run:
        preview(run.rows.train, run.rows.tokenizer)
        return

    run.restore(model, optimizer)
    _say_what_changed(run)

    observers: list[Observer] = []

    def enter(phase: str) -> None:
        for observer in observers:
            observer.enter(phase)

    forward_backward, forward = _passes(run, model, enter)
    training = Training(
        run=run,
        model=model,
        optimizer=optimizer,
        held_out=held_out,
        forward=forward,
        metric=metric,
        enter=enter,
        timing=Timing(run, model),
    )
    observers += observers_of(training)

    with contextlib.ExitStack() as around:
        for observer in observers:
            around.enter_context(observer.around())
        settle()
        for observer in observers:
            observer.begin()
        model.train()
        windows = _windows(run.accelerator, batches, enter)
        around.enter_context(contextlib.closing(windows))  # also when an exception passes
        for window in () if run.patience.over else windows:
            due = _step(training, observers, window, forward_backward)
            if due.stop or run.patience.over:
                break
        for observer in observers:
            observer.end()
        run.end(model)


def _step(
    training: Training,
    observers: Sequence[Observer],
    window: Window,
    forward_backward: ForwardBackward,
) -> Due:
    """Make one step with a window, and call the observers before and after it."""
    run = training.run
    accelerator = run.accelerator
    settings = run.settings

    for observer in observers:
        observer.before_update(window)
    _seed_dropout(run)
    for group in training.optimizer.param_groups:
        group["lr"] = lr_at(run.step, settings.optim)
    # Ask all of them, even after the first that wants to stop: each notes its own reason.
    votes = [run.wants_to_stop(), *(observer.wants_to_stop() for observer in observers)]

    update = train_step(
        accelerator,
        training.model,
        training.optimizer,
        window.batches,
        max_grad_norm=settings.optim.max_grad_norm,
        forward_backward=forward_backward,
        stop=any(votes),
        enter=training.enter,
    )
    _count_skipped(run, window, update)
    run.step += 1
    run.tokens += update.tokens

    training.enter("other")
    due = Due(
        step=run.step,
        finished=run.step == settings.optim.max_steps,
        stop=update.stop,
    )
    for observer in observers:
        observer.after_update(window, update, due)
    return due


def _windows(
    accelerator: Accelerator, loader: DataLoaderShard, set_phase: Callable[[str], None]
) -> Generator[Window]:
    """Yield the windows of a prepared loader, on its device; waiting for one is the phase ``data``.

    Another thread reads and collates the windows to come. Everything else that Accelerate's loader
    does stays on this thread: the transfer to the device, and the gradient state, which an
    evaluation changes as well and which is not safe to use from two threads.
    """
    choose_device = None
    if accelerator.device.type == "cuda":  # each thread has its own current device
        choose_device = functools.partial(torch.cuda.set_device, torch.cuda.current_device())
    reader = futures.ThreadPoolExecutor(1, thread_name_prefix="windows", initializer=choose_device)

    loader.set_epoch(loader.iteration)
    on_host = iter(loader.base_dataloader)
    read_next = functools.partial(reader.submit, next, on_host, None)

    set_phase("data")
    reading = read_next()
    loader.begin()
    try:
        window = reading.result()
        reading = read_next()
        while window is not None:
            # Like Accelerate, look one window ahead to know whether this one is the last.
            following = reading.result()
            if following is None:
                loader.end_of_dataloader = True
            else:
                reading = read_next()

            if loader.device is not None:
                window = window.to(loader.device, non_blocking=accelerator.non_blocking)
            yield window

            set_phase("data")
            window = following
        loader.iteration += 1
    finally:
        # If an error passes, a read that hangs must not keep this rank from reporting the error.
        futures.wait([reading], timeout=_READER_SECONDS)
        reader.shutdown(wait=reading.done(), cancel_futures=True)
        loader.end()


def _seed_dropout(run: Run) -> None:
    """Seed the dropout of models that take no keys, by seed, step and data-parallel rank.

    ``torch.manual_seed`` would look for devices of every kind, which takes 0.3 ms.
    """
    accelerator = run.accelerator
    share = run.step * data_parallel_size(accelerator) + data_parallel_rank(accelerator)
    seed = key_of(run.settings.loop.seed, share) >> 1
    torch.default_generator.manual_seed(seed)
    if accelerator.device.type != "cpu":
        torch.get_device_module(accelerator.device).manual_seed(seed)


def _count_skipped(run: Run, window: Window, update: Update) -> None:
    """Count a step that was skipped because its gradient is not finite.

    Raises:
        UserError: on every rank, if ``--skip_nonfinite`` allows no more of them.
    """
    number = run.step + 1
    allowed = run.settings.loop.skip_nonfinite
    if math.isfinite(update.grad_norm) or number == run.settings.loop.replay_step:
        return

    # fp16 finds its loss scale by such steps, but never goes below 1.
    scaler = run.accelerator.scaler
    if scaler is not None and scaler.get_scale() >= 1:
        return

    rows = [row for row in gather_rows(run.accelerator, window.rows).tolist() if row >= 0]
    event = (
        f"update {number} has a gradient norm of {update.grad_norm} and was not made; "
        f"its rows are {rows}"
    )
    if run.skipped == allowed:
        raise UserError(
            f"{event}. Lower --learning_rate, or allow some with --skip_nonfinite. "
            "The newest checkpoint is untouched."
        )
    run.skipped += 1
    run.incident("skipped", f"{event} ({run.skipped} of --skip_nonfinite {allowed})")


def _passes(
    run: Run, model: nn.Module, enter: Callable[[str], None]
) -> tuple[ForwardBackward, Forward | None]:
    """Return what computes the gradients of a step, and what computes an eval loss.

    The second is ``None`` if the model's own forward does that.
    """
    accelerator = run.accelerator
    parallel = run.settings.parallel
    if not is_whole(accelerator):
        pipeline = Pipeline(accelerator, model)
        return pipeline, pipeline.forward
    if run.settings.loop.bitwise:
        return BitwiseGradients(accelerator, model, lambda: enter("exchange")), None
    if parallel.sync_each_batch:
        return Accumulation(accelerator, model, reduce="each"), None
    if is_sharded(accelerator) and run.layout.accumulation > 1:
        numbers = sum(p.numel() for p in model.parameters() if p.requires_grad)
        say(
            "gradients",
            f"of {run.layout.accumulation} micro-batches are held whole, "
            f"{4 * numbers / 2**20:.1f} MiB a process, and reduced once; "
            "--sync_each_batch holds this process's shard",
        )
    return Accumulation(accelerator, model, reduce="once"), None


def check_wrapping(accelerator: Accelerator, model: nn.Module) -> None:
    """Check that a model is wrapped in a way that this loop supports.

    Raises:
        UserError: if it is not.
    """
    handler_of(accelerator)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "the model is wrapped in nn.DataParallel, which this loop does not support: wrap it in nothing, "
            "accelerator.prepare makes it DDP; start one process a GPU with accelerate launch."
        )


def check_can_train(run: Run, model: nn.Module, metric: Metric | None) -> None:
    """Check that the model and the settings meet the loop's requirements.

    Raises:
        UserError: if they do not.
    """
    check_wrapping(run.accelerator, model)
    _check_steps(run)
    if not is_whole(run.accelerator):
        _check_pipeline(run, metric)
    labels = inspect.signature(plain_of(model).forward).parameters.get("labels")
    needs_labels = labels is not None and labels.default is labels.empty
    if needs_labels and run.settings.loop.sample_prompts:
        raise UserError(
            "--sample_prompts: this model gives a loss alone; give labels of its forward a default of None, for logits."
        )


def _check_steps(run: Run) -> None:
    """Raise :class:`UserError` if a flag names steps that this run does not make."""
    loop = run.settings.loop
    last = run.settings.optim.max_steps
    if run.step > last:
        raise UserError(
            f"--max_steps {last}: this run goes on from step {run.step}, which is past it."
        )
    if loop.replay_step is not None and not run.step < loop.replay_step <= last:
        raise UserError(
            f"--replay_step {loop.replay_step}: there are updates {run.step + 1} to {last} to make."
        )
    if loop.xray_range is not None and loop.xray_range[-1] > last:
        raise UserError(f"--xray_steps {loop.xray_steps}: the last update is --max_steps {last}.")


def _check_pipeline(run: Run, metric: Metric | None) -> None:
    """Raise :class:`UserError` for what needs the whole model, of which each stage has a part."""
    loop = run.settings.loop
    if loop.torch_compile == "always":
        raise UserError(
            "--torch_compile always: stages of a pipeline are not compiled; leave it out."
        )
    if loop.sample_prompts:
        raise UserError("--sample_prompts: no process can run the whole model; leave it out.")
    if metric is not None:
        raise UserError(
            "a metric of one's own needs the whole model, which no process can run here."
        )


def _say_what_changed(run: Run) -> None:
    """Print which optimizer settings differ from those of the checkpoint this run resumes from."""
    wanted = run.settings.loop.xray_range
    if wanted is not None and run.step >= wanted.start:
        say("x-ray", f"none: this run goes on with update {run.step + 1}, after {wanted.start}")

    before = (run.choice.before or {}).get("update")
    now = asdict(run.settings.optim)
    if before is None or before == now:
        return
    changed = ", ".join(
        f"{key} {before.get(key)} -> {value}"
        for key, value in now.items()
        if before.get(key) != value
    )
    # A recipe with optimizer settings of its own may have recorded fields that are not known here.
    known = {field.name for field in fields(OptimConfig)}
    earlier = OptimConfig(**{name: value for name, value in before.items() if name in known})
    last_rate = lr_at(run.step - 1, earlier)
    next_rate = lr_at(run.step, run.settings.optim)
    say(
        "changed",
        f"{changed}; the learning rate goes from {last_rate:.3g} in update {run.step} "
        f"to {next_rate:.3g} next",
    )
