"""The loop: windows of micro-batches in, updates out. The step is its only state; the rest are observers."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from typing import Literal

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.console import say
from llmtrain.contract import Due, Forward, ForwardBackward, Metric, Observer, Update, Window
from llmtrain.data.order import key_of
from llmtrain.errors import UserError, require
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


def train(
    run: Run,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: DataLoaderShard,
    held_out: DataLoaderShard | None = None,
    metric: Metric | None = None,
) -> None:
    """Train from ``run.step`` to ``--max_steps``, after restoring the checkpoint that the run goes on from.

    Takes what ``accelerator.prepare`` returned. A ``metric`` of one's own is taken in every evaluation. A dry run shows
    the rows that would be trained on. Raises :class:`UserError` where this cannot be trained.
    """
    accelerator, s = run.accelerator, run.settings
    check_can_train(run, model, metric)
    if s.loop.dry_run:
        preview(run.rows.train, run.rows.tokenizer)
        return
    run.restore(model, optimizer)
    _say_what_changed(run)
    alone, rank = s.parallel.sync_every, data_parallel_rank(accelerator)
    observers: list[Observer] = []

    def enter(phase: str) -> None:
        for observer in observers:
            observer.enter(phase)

    forward_backward, forward = _passes(run, model, enter)
    observers += observers_of(
        Training(run, model, optimizer, held_out, forward, metric, enter, Timing(run, model))
    )
    # each rank has a gradient of its own: what is not finite on one is not finite on all
    agree = functools.partial(accelerator.reduce, reduction="mean") if alone > 1 else None
    with contextlib.ExitStack() as around:
        for observer in observers:
            around.enter_context(observer.around())
        settle()
        for observer in observers:
            observer.begin()
        model.train()
        windows = _windows(accelerator, batches, enter)
        around.enter_context(contextlib.closing(windows))  # also when an exception passes
        for window in () if run.patience.over else windows:
            for observer in observers:
                observer.before_update(window)
            share = run.step * data_parallel_size(accelerator) + rank
            _seed(accelerator.device, key_of(s.loop.seed, share) >> 1)
            for group in optimizer.param_groups:
                group["lr"] = lr_at(run.step, s.optim)
            stop = any([run.wants_to_stop(), *(observer.wants_to_stop() for observer in observers)])
            how = s.optim.max_grad_norm, forward_backward, stop, agree, enter
            update = train_step(accelerator, model, optimizer, window.batches, *how)
            _count_skipped(run, window, update)
            run.step += 1
            run.tokens += update.tokens
            enter("other")
            due = Due(run.step, run.step == s.optim.max_steps, alone, update.stop)
            for observer in observers:
                observer.after_update(window, update, due)
            if due.stop or run.patience.over:
                break
        for observer in observers:
            observer.end()
        run.end(model)


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
    reader = ThreadPoolExecutor(1, thread_name_prefix="windows", initializer=choose_device)

    loader.begin()
    try:
        loader.set_epoch(loader.iteration)
        on_host = iter(loader.base_dataloader)
        read_next = functools.partial(reader.submit, next, on_host, None)

        set_phase("data")
        window = read_next().result()
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
        reader.shutdown(cancel_futures=True)
        loader.end()


def _seed(device: torch.device, seed: int) -> None:
    """Seed the dropout of models that take no keys. ``torch.manual_seed`` looks for devices of every kind: 0.3 ms."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def _count_skipped(run: Run, window: Window, update: Update) -> None:
    """Count an update that was skipped because its gradient is not finite.

    Raises :class:`UserError`, on every rank, where no more may be skipped.
    """
    loop, scaler, number = run.settings.loop, run.accelerator.scaler, run.step + 1
    allowed = loop.skip_nonfinite
    if math.isfinite(update.grad_norm) or number == loop.replay_step:
        return
    if (
        scaler is not None and scaler.get_scale() >= 1
    ):  # fp16 finds its scale by such updates, but never below 1
        return
    rows = [row for row in gather_rows(run.accelerator, window.rows).tolist() if row >= 0]
    told = f"update {number} has a gradient norm of {update.grad_norm} and was not made; its rows are {rows}"
    if run.skipped == allowed:
        raise UserError(
            f"{told}. Lower --learning_rate, or allow some with --skip_nonfinite. The newest checkpoint is untouched."
        )
    run.skipped += 1
    run.incident("skipped", f"{told} ({run.skipped} of --skip_nonfinite {allowed})")


def _passes(
    run: Run, model: nn.Module, enter: Callable[[str], None]
) -> tuple[ForwardBackward, Forward | None]:
    """Return what computes the gradients of a window; and the forward pass alone, where it is not the model's."""
    accelerator, parallel = run.accelerator, run.settings.parallel
    if not is_whole(accelerator):
        pipeline = Pipeline(accelerator, model)
        return pipeline, pipeline.forward
    if run.settings.loop.bitwise:
        return BitwiseGradients(accelerator, model, lambda: enter("exchange")), None
    if is_sharded(accelerator) and not parallel.sync_each_batch and run.layout.accumulation > 1:
        size = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**20
        held = f"of {run.layout.accumulation} micro-batches are held whole, {size:.1f} MiB a process, and reduced once"
        say("gradients", f"{held}; --sync_each_batch holds this process's shard")
    reduce: Literal["never", "each", "once"] = "each" if parallel.sync_each_batch else "once"
    return Accumulation(accelerator, model, "never" if parallel.sync_every > 1 else reduce), None


def check_wrapping(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError` where a model is wrapped in a way that this loop does not support."""
    handler_of(accelerator)
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "the model is wrapped in nn.DataParallel, which this loop does not support: wrap it in nothing, "
            "accelerator.prepare makes it DDP; start one process a GPU with accelerate launch."
        )


def check_can_train(run: Run, model: nn.Module, metric: Metric | None) -> None:
    """Raise :class:`UserError` where the model or the settings do not meet the loop's requirements."""
    s, accelerator, last = run.settings, run.accelerator, run.settings.optim.max_steps
    check_wrapping(accelerator, model)
    require(
        run.step <= last,
        f"--max_steps {last}: this run goes on from step {run.step}, which is past it.",
    )
    looked_at, wanted = s.loop.replay_step, s.loop.xray_range
    reached = looked_at is None or run.step < looked_at <= last
    require(
        reached, f"--replay_step {looked_at}: there are updates {run.step + 1} to {last} to make."
    )
    inside = wanted is None or wanted[-1] <= last
    require(inside, f"--xray_steps {s.loop.xray_steps}: the last update is --max_steps {last}.")
    whole = is_whole(accelerator)
    compiles = s.loop.torch_compile == "always"
    require(
        whole or not compiles,
        "--torch_compile always: stages of a pipeline are not compiled; leave it out.",
    )
    require(
        whole or not s.loop.sample_prompts,
        "--sample_prompts: no process can run the whole model; leave it out.",
    )
    require(
        whole or metric is None,
        "a metric of one's own needs the whole model, which no process can run here.",
    )
    labels = inspect.signature(plain_of(model).forward).parameters.get("labels")
    require(
        labels is None or labels.default is not labels.empty or not s.loop.sample_prompts,
        "--sample_prompts: this model gives a loss alone; give labels of its forward a default of None, for logits.",
    )


def _say_what_changed(run: Run) -> None:
    """Say which settings of the update differ from those of the named checkpoint that the run goes on from."""
    wanted = run.settings.loop.xray_range
    if wanted is not None and run.step >= wanted.start:
        say("x-ray", f"none: this run goes on with update {run.step + 1}, after {wanted.start}")
    before, now = (run.choice.before or {}).get("update"), asdict(run.settings.optim)
    if before is None or before == now:
        return
    changed = ", ".join(
        f"{key} {before.get(key)} -> {value}"
        for key, value in now.items()
        if before.get(key) != value
    )
    known = {
        field.name for field in fields(OptimConfig)
    }  # another version, or a recipe that notes more, had others
    earlier = OptimConfig(**{name: value for name, value in before.items() if name in known})
    last, following = lr_at(run.step - 1, earlier), lr_at(run.step, run.settings.optim)
    say(
        "changed",
        f"{changed}; the learning rate goes from {last:.3g} in update {run.step} to {following:.3g} next",
    )
