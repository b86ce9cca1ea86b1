"""The loop: windows of micro-batches in, updates, metrics and checkpoints out. The step is its only state."""

import contextlib
import functools
import inspect
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.config import require
from llmtrain.console import say
from llmtrain.contract import Window
from llmtrain.data.order import key_of
from llmtrain.errors import UserError, is_out_of_memory
from llmtrain.models.generation import Sampling
from llmtrain.models.loss import count_targets
from llmtrain.observe.phases import Phases
from llmtrain.observe.replicas import check_replicas
from llmtrain.parallel.bitwise import BitwiseGradients
from llmtrain.parallel.ddp import DDPHandler, data_parallel_rank, data_parallel_size, settle_buckets
from llmtrain.parallel.exchange import average
from llmtrain.parallel.fsdp import clip_grad_norm, is_sharded, weight_norm
from llmtrain.parallel.mesh import gather_rows, model_parallel_size, sharding_of
from llmtrain.parallel.pipeline import Pipeline
from llmtrain.record.run import Run, RunConfig
from llmtrain.training.compiling import choose, eager_code
from llmtrain.training.evaluate import Metric, evaluate
from llmtrain.training.instruments import Instruments
from llmtrain.training.optim import OptimConfig, lr_at
from llmtrain.training.replay import row_losses
from llmtrain.training.samples import sample

Batches = Sequence[dict[str, torch.Tensor]]
ForwardBackward = Callable[[Accelerator, nn.Module, Batches, torch.Tensor], torch.Tensor]


_SAMPLE_TOKENS = 64


class Update(NamedTuple):
    nll: torch.Tensor  # this process's sum over the window, in nats; float32 scalar
    tokens: torch.Tensor  # trained tokens of the global batch; int64 scalar
    grad_norm: float  # of the global batch's mean loss, before clipping; under sync_every the mean of the processes'
    stop: bool  # whether any process was asked to stop


def train_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    batches: Batches,
    max_grad_norm: float,
    stop_requested: bool = False,
    forward_backward: ForwardBackward | None = None,
    agree: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Update:
    """One update with the gradient of the mean loss over all trained tokens of the global batch; none, and the same
    on every rank, where that gradient is not finite.

    However the batch is split over micro-batches and processes: each backward pass adds the gradient of its *sum*,
    divided by the token count of the whole. Gradients are reduced once, in the last micro-batch. A parallel method
    that owns forward and backward supplies its own ``forward_backward``. Where that sends no gradients, each process
    makes an update of its own, and ``agree`` turns the norm of each into one that is finite only if all are.
    """
    tokens, stop = count_tokens(accelerator, batches, stop_requested)
    nll = (forward_backward or accumulate)(accelerator, model, batches, tokens)
    norm = clip_grad_norm(accelerator, model, max_grad_norm)
    grad_norm = float(agree(norm) if agree is not None else norm)
    if (
        math.isfinite(grad_norm) or accelerator.scaler is not None
    ):  # fp16's scaler skips by itself, and lowers its scale
        optimizer.step()
    optimizer.zero_grad()
    return Update(nll, tokens, grad_norm, stop)


def count_tokens(accelerator: Accelerator, batches: Batches, stop_requested: bool) -> tuple[torch.Tensor, bool]:
    """Trained tokens of the global batch, after the shift; and, on the same all-reduce, who wants to stop."""
    mine = torch.stack([count_targets(batch["labels"]) for batch in batches]).sum()
    tokens, stops = accelerator.reduce(torch.stack([mine, mine.new_tensor(int(stop_requested))]), reduction="sum")
    return tokens // model_parallel_size(accelerator), bool(stops)


def accumulate(
    accelerator: Accelerator,
    model: nn.Module,
    batches: Batches,
    tokens: torch.Tensor,
    reduce: Literal["once", "each", "never"] = "once",
) -> torch.Tensor:
    """Accumulate the gradient of sum(nll) / tokens over the micro-batches; returns their own summed nll.

    It is reduced in the last micro-batch; or in each: where the model is sharded, no process then holds more of the
    gradient than its part and that of one unit; or never: each process has the gradient of its own rows, which stand
    for those of all.
    """
    replicas = data_parallel_size(accelerator)  # DDP and FSDP average over them: undo it
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(batches):
        sync = reduce == "each" or (reduce == "once" and i == len(batches) - 1)
        with contextlib.nullcontext() if sync else accelerator.no_sync(model):
            nll = model(**batch)  # a sum, not a mean
            accelerator.backward(nll * replicas / tokens.clamp(min=1))
        total += nll.detach()
    return total


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: AcceleratedOptimizer,
    train_batches: DataLoaderShard,
    eval_batches: DataLoaderShard | None,
    optim: OptimConfig,
    run: RunConfig,
    record: Run,
    eval_bytes: int = 0,
    metric: Metric | None = None,
) -> None:
    """Train from ``record.step`` to ``optim.max_steps``, evaluating, logging and saving on the way. A ``metric`` of the
    recipe's own is taken in every evaluation."""
    check_can_train(accelerator, model)
    _check_where_it_goes_on(record, optim)
    _check_looks(accelerator, model, run, metric)
    alone = accelerator.ddp_handler.config.sync_every  # updates that each process makes by itself, to the average
    watch = Instruments(accelerator, model, run, record, optim.max_steps)
    gradients = _how_to_accumulate(accelerator, model, train_batches, run, watch.phases)
    forward = gradients.forward if isinstance(gradients, Pipeline) else None
    gradients = watch.phases.before_optimizer(gradients)
    agree = functools.partial(_mean_norm, accelerator, watch.phases) if alone > 1 else None

    measured = forward, metric
    held_out = eval_batches if run.eval_steps else None
    evaluate_now = functools.partial(_evaluate, accelerator, model, held_out, eval_bytes, record, watch, *measured)
    with (
        watch.heartbeat.beating(),
        _memory_explained(train_batches, is_sharded(accelerator) and not run.sync_each_batch),
    ):
        if record.step == 0:
            record.log({"train/weight_norm": float(weight_norm(accelerator, model))})
            evaluate_now()
        model.train()
        watch.begin(record.step)
        for window in _windows(accelerator, model, train_batches, optim, run, record, watch):
            _keep_rows(accelerator, model, window, record, forward)
            watch.before_update(record.step)
            lr = lr_at(record.step, optim)
            for group in optimizer.param_groups:
                group["lr"] = lr
            stop = record.stop_requested
            update = train_step(
                accelerator, model, optimizer, window.batches, optim.max_grad_norm, stop, gradients, agree
            )
            _count_skipped(accelerator, window, update, run, record)
            record.updated(int(update.tokens))
            watch.after_update(record.step, int(update.tokens), window.positions)
            record.log_rows(window.rows, window.targets)
            due = _Due(record.step, record.step == optim.max_steps, alone, update.stop)
            saving = due.stop or due(run.save_steps)
            if alone > 1 and due.together:
                _meet(watch.phases, model, optimizer, with_state=saving)
            if run.check_replicas_steps and (saving or due(run.check_replicas_steps if alone == 1 else alone)):
                check_replicas(accelerator, model)
            if due(run.logging_steps) or due.stop:
                record.log(watch.read(_metrics(accelerator, model, window, update, lr)))
            watch.between_updates(record.step)
            with watch.throughput.paused():
                if due.finished or (due(run.eval_steps) and not due.stop):
                    evaluate_now()
                _sample(accelerator, model, run, record, watch, due)
                if saving and run.replay_step is None:
                    watch.phases.at("a save")
                    record.save(model, optimizer)
            if due.stop:
                break
        watch.progress.close()
        record.end(model, finished=record.step == optim.max_steps)


def _evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    eval_batches: DataLoaderShard | None,
    eval_bytes: int,
    record: Run,
    watch: Instruments,
    forward: Callable[..., torch.Tensor] | None,
    metric: Metric | None,
) -> None:
    if eval_batches is None:
        return
    began = time.monotonic()
    with eager_code(bool(record.compiled)):
        batches = watch.heartbeat.through(eval_batches, "an evaluation")
        results = evaluate(accelerator, model, batches, eval_bytes, forward, metric)
    record.deadline.reserve("evaluation", time.monotonic() - began)
    record.log(results)
    watch.progress.evaluated(record.step, results)


def _keep_rows(
    accelerator: Accelerator,
    model: nn.Module,
    window: Window,
    record: Run,
    forward: Callable[..., torch.Tensor] | None,
) -> None:
    """Where this is the update to be looked at."""
    if record.is_replayed_next:
        with eager_code(bool(record.compiled)):
            record.keep_row_losses(row_losses(accelerator, model, window, forward))


def _sample(
    accelerator: Accelerator, model: nn.Module, run: RunConfig, record: Run, watch: Instruments, due: "_Due"
) -> None:
    if not due(run.sample_steps):
        return
    watch.phases.at("a sample")
    with eager_code(bool(record.compiled)):
        how = Sampling(max_new_tokens=_SAMPLE_TOKENS, seed=run.seed)
        record.keep_samples(sample(accelerator, model, record.files.tokenizer, run.sample_prompts, how))


def _windows(
    accelerator: Accelerator,
    model: nn.Module,
    train_batches: DataLoaderShard,
    optim: OptimConfig,
    run: RunConfig,
    record: Run,
    watch: Instruments,
) -> Iterator[Window]:
    """The windows from ``record.step`` on, the first of which is what code is compiled and buckets are settled with.
    Before each, torch's generator is set for the update and the process, so that the dropout of models that take no
    keys is a function of these as well."""
    start = record.step
    for number, window in enumerate(watch.phases.loading(train_batches), start):
        if number == start:
            watch.phases.at("getting ready", start)
            with watch.throughput.paused():
                record.compiled = _choose_code(accelerator, model, window, optim, run, record)
                if start or accelerator.ddp_handler.config.ddp_static_graph:  # whose first pass must be a synced one
                    settle_buckets(accelerator, model, window.batches[-1])
        share = number * data_parallel_size(accelerator) + data_parallel_rank(accelerator)
        torch.manual_seed(key_of(run.seed, share) >> 1)
        yield window


def _choose_code(
    accelerator: Accelerator, model: nn.Module, window: Window, optim: OptimConfig, run: RunConfig, record: Run
) -> bool:
    """Whether compiled code is used. Times differ between layouts, so with --bitwise they choose nothing."""
    wanted = "never" if run.bitwise and run.torch_compile == "auto" else run.torch_compile
    passes = (optim.max_steps - record.step) * len(window.batches)
    return choose(accelerator, model, window.batches[-1], passes, wanted, record.compiled)


def _count_skipped(accelerator: Accelerator, window: Window, update: Update, run: RunConfig, record: Run) -> None:
    """Where the update was not made: raise :class:`UserError` on every rank, or count it if some may be skipped."""
    scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 0.0
    if (
        math.isfinite(update.grad_norm) or record.is_replayed_next or scale >= 1
    ):  # fp16 finds its scale by such updates, but never below 1
        return
    rows = [row for row in gather_rows(accelerator, window.rows).tolist() if row >= 0]
    what = f"update {record.step + 1} has a gradient norm of {update.grad_norm} and was not made; its rows are {rows}"
    if record.skipped == run.skip_nonfinite:
        raise UserError(
            f"{what}. Lower --learning_rate, or allow some with --skip_nonfinite. The newest checkpoint is untouched."
        )
    record.skipped += 1
    record.incident("skipped", f"{what} ({record.skipped} of --skip_nonfinite {run.skip_nonfinite})")


class _Due(NamedTuple):
    """What is to be done after an update: of all that needs the same weights everywhere, only when there are."""

    step: int
    finished: bool
    alone: int  # updates between two averages of the weights
    stop: bool

    @property
    def together(self) -> bool:
        return self.finished or self.stop or self.step % self.alone == 0

    def __call__(self, every: int) -> bool:
        """Whether a multiple of ``every`` was reached since this could last be done; never of 0."""
        before = (self.step - 1) // self.alone * self.alone
        return every > 0 and (self.finished or (self.together and self.step // every > before // every))


def _meet(phases: Phases, model: nn.Module, optimizer: AcceleratedOptimizer, with_state: bool) -> None:
    """Average what the processes have made alone. A checkpoint holds one optimizer, not one of each process: before it
    their state is averaged, too, and all go on from it, as a run that is resumed does."""
    phases.at("exchange")
    average(parameter for parameter in model.parameters() if parameter.requires_grad)
    if with_state:
        state = optimizer.optimizer.state
        order = [state[p] for group in optimizer.param_groups for p in group["params"] if p in state]
        average(value for entries in order for value in entries.values() if value.is_floating_point() and value.ndim)
    phases.at("other")


def _mean_norm(accelerator: Accelerator, phases: Phases, norm: torch.Tensor) -> torch.Tensor:
    """Of all processes, each with a gradient of its own: not finite on one is not finite on all."""
    phases.at("exchange")
    mean = accelerator.reduce(norm, reduction="mean")
    phases.at("optimizer")
    return mean


def _metrics(accelerator: Accelerator, model: nn.Module, window: Window, update: Update, lr: float) -> dict[str, Any]:
    """Of an update; ``batch`` tells whether that of another run had the same tokens, and the same labels."""
    nll = accelerator.reduce(update.nll, reduction="sum") / model_parallel_size(accelerator)
    content = accelerator.reduce(window.content, reduction="sum") // model_parallel_size(accelerator)
    return {
        "train/loss": float(nll / update.tokens.clamp(min=1)),
        "train/grad_norm": update.grad_norm,
        "train/weight_norm": float(weight_norm(accelerator, model)),
        "train/learning_rate": lr,
        "batch": "-".join(f"{part:x}" for part in content.tolist()),
    }


def _how_to_accumulate(
    accelerator: Accelerator, model: nn.Module, train_batches: DataLoaderShard, run: RunConfig, phases: Phases
) -> ForwardBackward:
    """How they are accumulated; says the price of reducing once where the model is sharded: between its micro-batches
    the gradient is not."""
    if is_sharded(accelerator) and sharding_of(accelerator).stages > 1:
        return Pipeline(accelerator, model)
    if run.bitwise:
        return BitwiseGradients(model, before_exchange=lambda: phases.at("exchange"))
    if accelerator.ddp_handler.config.sync_every > 1:
        return functools.partial(accumulate, reduce="never")
    if is_sharded(accelerator) and not run.sync_each_batch:
        rows = train_batches.batch_sampler.batch_size // data_parallel_size(accelerator)
        count = rows // train_batches.collate_fn.micro_batch
        size = 4 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**20
        if count > 1:
            held = f"of {count} micro-batches are held whole, {size:.1f} MiB a process, and reduced once"
            say("gradients", f"{held}; --sync_each_batch holds this process's part")
    return functools.partial(accumulate, reduce="each") if run.sync_each_batch else accumulate


@contextlib.contextmanager
def _memory_explained(train_batches: DataLoaderShard, holds_gradients: bool) -> Iterator[None]:
    """Say how to do with less memory, where there was too little: the global batch need not change."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        rows = train_batches.collate_fn.micro_batch
        smaller = (
            f"--per_device_train_batch_size {rows // 2} computes the same global batch with less."
            if rows > 1
            else "one row at a time is too much; lower --block_size, or make the model smaller."
        )
        if holds_gradients:
            smaller += " Where there are several micro-batches, --sync_each_batch holds less of the gradient."
        raise UserError(f"out of memory with {rows} rows at a time: {smaller}") from None


def _check_where_it_goes_on(record: Run, optim: OptimConfig) -> None:
    """Where a named checkpoint goes on under other settings, say them, and what becomes of the learning rate."""
    if record.step > optim.max_steps:
        raise UserError(f"--max_steps {optim.max_steps}: this run goes on from step {record.step}, which is past it.")
    looked_at = record.config.replay_step
    if looked_at is not None and not record.step < looked_at <= optim.max_steps:
        raise UserError(f"--replay_step {looked_at}: there are updates {record.step + 1} to {optim.max_steps} to make.")
    wanted = record.config.xray_range
    if wanted is not None and wanted[-1] > optim.max_steps:
        raise UserError(f"--xray_steps {record.config.xray_steps}: the last update is --max_steps {optim.max_steps}.")
    if wanted is not None and record.step >= wanted.start:
        say("x-ray", f"none: this run goes on with update {record.step + 1}, after {wanted.start}")
    before, now = record.update_before, asdict(optim)
    if before is None or before == now:
        return
    changed = ", ".join(f"{key} {before.get(key)} -> {value}" for key, value in now.items() if before.get(key) != value)
    last, following = lr_at(record.step - 1, _optim_of(before)), lr_at(record.step, optim)
    say("changed", f"{changed}; the learning rate goes from {last:.3g} in update {record.step} to {following:.3g} next")


def _optim_of(settings: dict[str, Any]) -> OptimConfig:
    """What a run was begun with, maybe under another version or by a recipe that notes more."""
    known = {field.name for field in fields(OptimConfig)}
    return OptimConfig(**{name: value for name, value in settings.items() if name in known})


def check_can_train(accelerator: Accelerator, model: nn.Module) -> None:
    """Raise :class:`UserError` where one of them is not as this loop needs it."""
    if not isinstance(accelerator.ddp_handler, DDPHandler):
        raise UserError("this loop needs the Accelerator that llmtrain.start_accelerator() makes.")
    if any(isinstance(module, nn.DataParallel) for module in model.modules()):
        raise UserError(
            "the model is wrapped in nn.DataParallel, which this loop does not support: wrap it in nothing, "
            "accelerator.prepare makes it DDP; start one process a GPU with accelerate launch."
        )
    if is_sharded(accelerator) and not all(hasattr(parameter, "stages") for parameter in model.parameters()):
        raise UserError("this recipe does not shard its model: call llmtrain.shard() before prepare, or use DDP.")


def _check_looks(accelerator: Accelerator, model: nn.Module, run: RunConfig, metric: Metric | None) -> None:
    """Raise :class:`UserError` where what is to be looked at on the way cannot be."""
    piped = is_sharded(accelerator) and sharding_of(accelerator).stages > 1
    require(not (piped and run.sample_steps), "--sample_steps: the stages of a pipeline write no text; leave it out.")
    require(not (piped and metric), "a metric of one's own sees the model, of which a stage of a pipeline has a part.")
    labels = inspect.signature(accelerator.unwrap_model(model).forward).parameters.get("labels")
    writes = labels is None or labels.default is not labels.empty
    require(
        writes or not run.sample_steps,
        "--sample_steps: this model gives a loss alone; give labels of its forward a default of None, for logits.",
    )
