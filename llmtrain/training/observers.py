"""Everything that watches the loop, or decides when something is done, in the order in which it is called."""

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from llmtrain.contract import (
    Due,
    Facts,
    Forward,
    MeasuresItself,
    Metric,
    Observer,
    SurveysBatches,
    Update,
    Window,
)
from llmtrain.errors import UserError, is_out_of_memory
from llmtrain.models.generation import Sampling
from llmtrain.observe.heartbeat import Heartbeat
from llmtrain.observe.memory import memory_held
from llmtrain.observe.phases import Phases
from llmtrain.observe.progress import Progress
from llmtrain.observe.replicas import check_replicas
from llmtrain.observe.throughput import Throughput
from llmtrain.observe.xray import XRay
from llmtrain.parallel.ddp import GradientSyncs, handler_of, settle_buckets
from llmtrain.parallel.fsdp import is_sharded, weight_norm
from llmtrain.parallel.mesh import gather_rows, is_whole, model_parallel_size
from llmtrain.training.compiling import choose, eager_code
from llmtrain.training.evaluate import evaluate, row_losses, sample
from llmtrain.training.run import Run
from llmtrain.training.step import plain_of, survey

_SAMPLE_TOKENS = 64
_COMPARE_STEPS = (
    100  # updates between two comparisons of the replicas, beside one before each checkpoint
)


class Timing(Observer):
    """Measures where each rank's time goes and how fast it is, and sends its heartbeat."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self.run = run
        self.first = run.step
        self.phases = Phases(run.accelerator, model)
        self.syncs = GradientSyncs(model)
        self.throughput = Throughput(run.accelerator, model)
        self.progress = Progress(run.is_main, run.step, run.settings.optim.max_steps)
        self.heartbeat = Heartbeat(
            run.accelerator,
            self.phases,
            folder=run.folder.path,
            timeout=run.settings.parallel.ddp_timeout,
            failed=run.failed,
        )

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        with self.phases.watching(), self.syncs.counting(), self.heartbeat.beating():
            yield

    def begin(self) -> None:
        self.throughput.restart()

    def enter(self, phase: str) -> None:
        if phase == "data" and not self.phases.is_warm and self.run.step > self.first:
            self.phases.warm_up()
        if phase == "count":
            self.syncs.restart()
        self.phases.at(phase, self.run.step)

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        self.throughput.add(update.tokens, window.positions)
        self.progress.bar.update()

    def end(self) -> None:
        self.progress.bar.close()

    def read(self, metrics: Facts) -> Facts:
        """Add what was measured since the last reading; says who is late."""
        metrics |= {"train/gradient_syncs": self.syncs.count, **self.throughput.read()}
        self.progress.logged(metrics)
        where, held = memory_held(self.run.accelerator.device)
        seconds = self.phases.read(gib=held / 2**30)
        gib = seconds.pop("gib")
        if late := self.phases.late(seconds):
            self.run.incident("late", str(late))
        return {**metrics, "phases": seconds, "memory": {where: [round(size, 4) for size in gib]}}


@dataclass
class Training:
    """All that an observer may look at."""

    run: Run
    model: nn.Module
    optimizer: AcceleratedOptimizer
    held_out: DataLoaderShard | None
    forward: Forward | None  # where it is not the model's own
    metric: Metric | None
    enter: Callable[[str], None]  # begins a phase
    timing: Timing

    def saves(self, due: Due) -> bool:
        """Return whether a checkpoint is made after this update."""
        judged = self.run.patience.allowed > 0 and due.at(self.run.settings.loop.eval_steps)
        return due.stop or due.at(self.run.settings.run.save_steps) or judged


class _Watching(Observer):
    def __init__(self, t: Training) -> None:
        self.t, self.run, self.accelerator = t, t.run, t.run.accelerator
        self.loop = t.run.settings.loop


def observers_of(t: Training) -> list[Observer]:
    """Return the observers of a run, in the order in which they are called."""
    loop = t.run.settings.loop
    # A replayed step is only looked at. Nothing else that the run was asked for is done again.
    is_replay = loop.replay_step is not None
    evaluates = t.held_out is not None and loop.eval_steps > 0
    wanted: list[tuple[type[_Watching], bool]] = [
        (MemoryAdvice, True),
        (GettingReady, True),
        (Replay, is_replay),
        (RowLedger, loop.log_rows),
        (Replicas, True),
        (Readings, True),
        (XRayed, loop.xray_steps is not None and not is_replay),
        (Evaluation, evaluates and not is_replay),
        (Samples, bool(loop.sample_prompts) and not is_replay),
        (Checkpoints, not is_replay),
    ]
    return [t.timing, *(kind(t) for kind, is_wanted in wanted if is_wanted)]


class GettingReady(_Watching):
    """Chooses compiled code, and settles DDP's buckets, with the first window."""

    def before_update(self, window: Window) -> None:
        if self.run.step > self.t.timing.first:
            return
        run, loop, model, batch = self.run, self.loop, self.t.model, window.batches[-1]
        wanted = loop.torch_compile or (
            "auto" if self.accelerator.device.type == "cuda" else "never"
        )
        # times differ between layouts, so with --bitwise they choose nothing; and no stage of a pipeline is tried alone
        wanted = (
            "never"
            if wanted == "auto" and (loop.bitwise or not is_whole(self.accelerator))
            else wanted
        )
        passes = (run.settings.optim.max_steps - run.step) * len(window.batches)
        self.t.enter("getting ready")
        with self.t.timing.throughput.paused():
            run.compiled = choose(run.accelerator, model, batch, passes, wanted, run.compiled)
            if run.step:  # a run that goes on has had its first update
                settle_buckets(run.accelerator, model, batch)


class MemoryAdvice(_Watching):
    """Says how to use less memory after an out-of-memory error: the global batch need not change."""

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rows = self.run.layout.micro_batch
            smaller = (
                "one row at a time is too much; lower --block_size, or make the model smaller."
            )
            if rows > 1:
                smaller = f"--per_device_train_batch_size {rows // 2} computes the same global batch with less."
            if is_sharded(self.accelerator) and not self.run.settings.parallel.sync_each_batch:
                smaller += " Where there are several micro-batches, --sync_each_batch holds less of the gradient."
            raise UserError(f"out of memory with {rows} rows at a time: {smaller}") from None


class RowLedger(_Watching):
    """Writes the rows of every update to ``rows.jsonl``: of each slot its row, -1 where empty, and its trained tokens.

    These are counted in the data: a second count beside the loop's.
    """

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        rows, targets = (
            gather_rows(self.accelerator, column) for column in (window.rows, window.targets)
        )
        self.run.folder.append(
            "rows.jsonl", {"step": due.step, "rows": rows.tolist(), "targets": targets.tolist()}
        )


class Replicas(_Watching):
    """Compares the ranks' weights now and then, and before each checkpoint."""

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        if self.t.saves(due) or due.at(_COMPARE_STEPS):
            check_replicas(self.accelerator, self.t.model)


class Displacement:
    """Notices when both answers become less likely than under the reference model.

    This is common under DPO, where the loss only asks that the rejected answers fall further.
    Rewards are noisy, so one log entry proves nothing. The rule: in each of the last five entries
    the rejected answers have a lower mean reward than the chosen ones, whose own is below zero; and
    over these entries the chosen answers' reward is below -0.05 on average.
    """

    ENTRIES = 5
    MARGIN = 0.05

    def __init__(self) -> None:
        # Rewards of consecutive log entries in which both answers have fallen.
        self.chosen: deque[float] = deque(maxlen=self.ENTRIES)

    def is_lasting(self, chosen: float, rejected: float) -> bool:
        """Take the mean rewards of one log entry; return whether the rule holds now."""
        if not rejected < chosen < 0:
            self.chosen.clear()
            return False
        self.chosen.append(chosen)
        is_full = len(self.chosen) == self.ENTRIES
        return is_full and statistics.fmean(self.chosen) < -self.MARGIN


class Readings(_Watching):
    """Writes the metrics of a step."""

    def __init__(self, t: Training) -> None:
        super().__init__(t)
        self.displacement: Displacement | None = None
        if getattr(plain_of(t.model), "takes_reference", False):
            self.displacement = Displacement()

    def begin(self) -> None:
        if self.run.step == 0:
            self.run.log({"train/weight_norm": float(weight_norm(self.accelerator, self.t.model))})

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        if due.at(self.loop.logging_steps) or due.stop:
            self.run.log(self.t.timing.read(self._metrics(window, update)))

    def _metrics(self, window: Window, update: Update) -> Facts:
        """Return the metrics of a step.

        ``batch`` fingerprints its tokens and labels, so that two runs can be compared.
        """
        accelerator = self.accelerator
        nll = self._sum_over_rows(update.nll)
        content = self._sum_over_rows(window.content.to(accelerator.device))
        more = self._metrics_of_model(update)
        self._notice_displacement(more)
        return {
            "train/loss": float(nll / max(update.units, 1)),
            **{f"train/{name}": value for name, value in more.items()},
            "train/grad_norm": update.grad_norm,
            "train/weight_norm": float(weight_norm(accelerator, self.t.model)),
            "train/learning_rate": self.t.optimizer.param_groups[0]["lr"],
            "batch": "-".join(f"{number:x}" for number in content.tolist()),
        }

    def _metrics_of_model(self, update: Update) -> dict[str, float]:
        """Return what the model measures beside its loss."""
        plain = plain_of(self.t.model)
        metrics: dict[str, float] = {}
        if update.survey is not None and isinstance(plain, SurveysBatches):
            metrics[plain.surveyed_as] = float(update.survey)
        if update.measured is not None and isinstance(plain, MeasuresItself):
            metrics |= plain.readings(self._sum_over_rows(update.measured).tolist())
        return metrics

    def _notice_displacement(self, metrics: dict[str, float]) -> None:
        """Record an event, once, if chosen and rejected answers keep becoming less likely."""
        if self.displacement is None or "rewards/chosen" not in metrics:
            return
        chosen = metrics["rewards/chosen"]
        rejected = metrics["rewards/rejected"]
        if self.displacement.is_lasting(chosen, rejected):
            self.displacement = None
            self.run.incident(
                "chosen",
                "chosen answers have become less likely than under the first weights, "
                "rejected ones still more: see docs/preference.md",
            )

    def _sum_over_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, counting ranks with the same rows once."""
        total: torch.Tensor = self.accelerator.reduce(tensor, reduction="sum")
        same = model_parallel_size(self.accelerator)
        return total / same if total.is_floating_point() else total // same


class XRayed(_Watching):
    """Records some steps as a timeline."""

    def __init__(self, t: Training) -> None:
        super().__init__(t)
        assert self.loop.xray_range is not None
        folder = self.run.folder.path / "xray"
        self.xray = XRay(self.accelerator, t.timing.phases, t.model, self.loop.xray_range, folder)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        handler = handler_of(self.accelerator)
        handler.watch(self.t.model, self.xray.bucket)
        try:
            yield
        finally:
            handler.watch(self.t.model, None)

    def begin(self) -> None:
        self.xray.between(self.run.step)

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        self.xray.between(due.step)


class Evaluation(_Watching):
    """Measures the loss on held-out text."""

    def begin(self) -> None:
        if self.run.step == 0:
            self._evaluate()

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        judged = self.run.patience.allowed > 0  # a resumed run has to know all of them
        if due.finished or (due.at(self.loop.eval_steps) and (judged or not due.stop)):
            with self.t.timing.throughput.paused():
                self._evaluate()

    def _evaluate(self) -> None:
        t, run, began = self.t, self.run, time.monotonic()
        with eager_code(t.model):
            what = run.rows.facts.eval_bytes, t.forward, t.metric, run.rows.held_out_sources
            results = evaluate(run.accelerator, t.model, self._windows(), *what, self._load())
        run.deadline.reserve("evaluation", time.monotonic() - began)
        run.log(results)
        if run.patience.allowed:
            run.patience.judge(run.step, results)
        self.t.timing.progress.evaluated(run.step, results)

    def _windows(self) -> Iterator[Window]:
        assert self.t.held_out is not None
        return self.t.timing.heartbeat.through(self.t.held_out, "an evaluation")

    def _load(self) -> dict[str, torch.Tensor]:
        """Return what a loss of its own depends on over all held-out rows, where it does: that takes a pass more."""
        if not isinstance(plain_of(self.t.model), MeasuresItself):
            return {}
        batches = (batch for window in self._windows() for batch in window.batches)
        self.t.model.eval()
        return survey(
            self.accelerator, self.t.model, batches, torch.zeros((), device=self.accelerator.device)
        )[0]


class Samples(_Watching):
    """Keeps what the model writes, at every evaluation."""

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        run, loop = self.run, self.loop
        if not due.at(loop.eval_steps):
            return
        self.t.enter("a sample")
        how = Sampling(max_new_tokens=_SAMPLE_TOKENS, seed=loop.seed)
        with self.t.timing.throughput.paused(), eager_code(self.t.model):
            texts = sample(
                run.accelerator, self.t.model, run.rows.tokenizer, loop.sample_prompts, how
            )
        for prompt, text in zip(loop.sample_prompts, texts, strict=True):
            run.folder.append("samples.jsonl", {"step": due.step, "prompt": prompt, "text": text})


class Replay(_Watching):
    """Writes the rows of one update, each with its loss, and stops the run after it."""

    def before_update(self, window: Window) -> None:
        run = self.run
        if self.wants_to_stop():
            with eager_code(self.t.model):
                rows = row_losses(run.accelerator, self.t.model, window, self.t.forward)
            run.folder.write("replay.json", {"step": run.step + 1, "rows": rows})

    def wants_to_stop(self) -> bool:
        return self.run.step + 1 == self.loop.replay_step


class Checkpoints(_Watching):
    """Saves."""

    def after_update(self, window: Window, update: Update, due: Due) -> None:
        if self.t.saves(due):
            self.t.enter("a save")
            with self.t.timing.throughput.paused():
                self.run.save(self.t.model, self.t.optimizer)
