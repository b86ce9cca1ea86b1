"""Everything that happens around a step, in the order in which it is called."""

import contextlib
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.optimizer import AcceleratedOptimizer

from llmtrain.console import pluralize, say
from llmtrain.data.loader import count_shapes
from llmtrain.errors import UserError, is_out_of_memory
from llmtrain.launching.launcher import has_launcher
from llmtrain.models.config import GPTConfig, ModelConfig
from llmtrain.models.generation import Sampling
from llmtrain.observe.heartbeat import Heartbeat
from llmtrain.observe.memory import memory_used
from llmtrain.observe.phases import Phases
from llmtrain.observe.progress import Progress
from llmtrain.observe.replicas import check_replicas
from llmtrain.observe.throughput import Throughput
from llmtrain.observe.xray import WARM_UP_PHASE, XRay
from llmtrain.parallel.engine import Engine
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.training.compiling import compile_blocks, eager_code, is_worth_compiling
from llmtrain.training.evaluate import eval_extra, evaluate, row_losses, sample
from llmtrain.training.run import Outcome, Run
from llmtrain.training.run_state import load_best, save, wait_for_saves, write_model
from llmtrain.training.summary import final_sample
from llmtrain.types import Callback, LocalBatch, Metric, StepInfo, StepResult

_SAMPLE_TOKENS = 64
_COMPARE_STEPS = 100  # steps between two comparisons of the replicas, besides those at checkpoints


class Timing(Callback):
    """Measures where each rank's time goes and how fast it is, and sends its heartbeat."""

    def __init__(self, run: Run, engine: Engine) -> None:
        self.run = run
        self.engine = engine
        self.first_step = run.step
        self.phases = Phases(engine.device, engine.model)
        self.throughput = Throughput(engine.accelerator, engine.unwrapped)
        self.progress = Progress(
            shown=engine.is_main,
            step=run.step,
            max_steps=run.settings.optim.max_steps,
            every_entry=run.settings.log.is_set("logging_steps"),
        )
        self.heartbeat = Heartbeat(
            engine,
            self.phases,
            folder=run.folder,
            timeout=run.settings.parallel.ddp_timeout,
            on_failure=run.record_failure,
        )
        engine.on_phase(self._set_phase)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        with self.phases.watching(), self.heartbeat.beating():
            yield

    def on_train_begin(self) -> None:
        self.throughput.restart()

    def _set_phase(self, phase: str) -> None:
        """Follow the phases of the step; the engine calls this."""
        # The first step of this start is slow (allocation, compilation), so its times are dropped
        # when the second step begins. Every step begins with the phase `data`.
        has_made_a_step = self.run.step > self.first_step
        if phase == "data" and has_made_a_step and not self.phases.has_dropped_first_step:
            self.phases.drop_first_step()
        self.phases.begin(phase, self.run.step)

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.throughput.add(result.target_tokens, batch.positions)
        self.progress.bar.update()

    def on_train_end(self) -> None:
        self.progress.bar.close()


@dataclass
class LoopContext:
    """The objects that the loop's own callbacks work with.

    Attributes:
        run: the open run.
        engine: how this process computes, with the model and the objective.
        optimizer: the optimizer that ``accelerator.prepare`` returned.
        eval_batches: the loader of eval batches, if there are any.
        metric: a custom metric of the user.
        timing: the clock, the progress bar and the heartbeat.
    """

    run: Run
    engine: Engine
    optimizer: AcceleratedOptimizer
    eval_batches: DataLoaderShard | None
    metric: Metric | None
    timing: Timing

    @property
    def is_replay(self) -> bool:
        """Whether the run only repeats one step to inspect it, and neither evaluates nor saves."""
        return self.run.settings.log.replay_step is not None

    @property
    def keeps_best(self) -> bool:
        """Whether evaluations choose the best checkpoint."""
        return self.run.patience.keeps_best

    def evaluates_after(self, info: StepInfo) -> bool:
        """Return whether the model is evaluated after a step.

        If ``info.is_last``, all steps of the run are made, and the model is evaluated in any case.
        ``info.should_stop`` means that a rank was asked to stop, which may be at any step. The run
        then skips an evaluation that is due, to stop sooner. The resumed run begins with the next
        step, so it does not make up for this evaluation. A run that keeps its best checkpoint
        evaluates all the same, because it could otherwise miss it.
        """
        if info.is_last:
            return True
        may_skip = info.should_stop and not self.keeps_best
        return info.is_due(self.run.settings.eval.eval_steps) and not may_skip

    def saves_after(self, info: StepInfo) -> bool:
        """Return whether a checkpoint is made after a step.

        That is the case when ``--save_steps`` is due, which the last step always is unless it is 0;
        after any step if the run was asked to stop; and at each evaluation of a run that keeps its
        best checkpoint.
        """
        settings = self.run.settings
        may_become_best = self.keeps_best and info.is_due(settings.eval.eval_steps)
        return info.should_stop or info.is_due(settings.run.save_steps) or may_become_best


class LoopCallback(Callback):
    """A callback of this package's own loop."""

    def __init__(self, context: LoopContext) -> None:
        self.loop_context = context
        self.run = context.run
        self.engine = context.engine
        self.timing = context.timing
        self.settings = context.run.settings

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        """Return whether the settings of the run ask for this callback."""
        return True


class MemoryAdvice(LoopCallback):
    """Tells how to use less memory after an out-of-memory error, with the same global batch."""

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rows = self.run.layout.micro_batch
            raise UserError(
                f"out of memory with {pluralize(rows, 'row')} at a time: {self._advice(rows)}"
            ) from None

    def _advice(self, rows: int) -> str:
        if rows > 1:
            advice = (
                f"--per_device_train_batch_size {rows // 2} computes the same global batch with "
                "less memory."
            )
        else:
            advice = f"one row is too much. {self._shorter_rows()}, or make the model smaller."
        if self.engine.is_sharded and not self.engine.sync_each_batch:
            advice += (
                " With several micro-batches per step, --sync_each_batch also saves memory for "
                "gradients."
            )
        return advice

    def _shorter_rows(self) -> str:
        """Return how to make rows shorter: with a flag, if the recipe has one."""
        model = self.run.settings.model
        if isinstance(model, ModelConfig):
            return "Lower --max_length"
        if isinstance(model, GPTConfig):
            return "Lower --block_size"
        return "Make the rows shorter"


class WarmUp(LoopCallback):
    """Compiles the model, if the run does, with the first batch of this start."""

    def on_step_begin(self, batch: LocalBatch) -> None:
        if self.run.step > self.timing.first_step:
            return
        micro_batch = batch.batches[-1]  # any would do
        shapes = count_shapes(self.run.rows.train)

        self.engine.set_phase(WARM_UP_PHASE)
        with self.timing.throughput.paused():
            self.run.compiled = self._should_compile(shapes)
            if self.run.compiled:
                compile_blocks(self.engine, micro_batch, shapes)
            # DDP rebuilds its buckets once, after the first step of a run. Buckets decide in which
            # order gradients are added over the ranks. A run that resumes at a later step rebuilds
            # them here, before its first step, so that it adds them like a run without a break.
            if self.run.step:
                self.engine.rebuild_buckets(micro_batch)

    def _should_compile(self, shapes: int) -> bool:
        mode = self.settings.parallel.torch_compile
        if mode != "auto":
            return mode == "always"
        if self.run.compiled is not None:
            return self.run.compiled  # compiled code rounds differently, so a run keeps its choice
        if self.settings.parallel.bitwise:
            return False
        steps = self.settings.optim.max_steps
        return is_worth_compiling(self.engine.device, steps=steps, shapes=shapes)


class Replay(LoopCallback):
    """Writes the rows of one step, each with its loss, and stops the run after it."""

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        return context.is_replay

    @property
    def _is_next_step_replayed(self) -> bool:
        """Whether the next step is the one to repeat; ``run.step`` counts the steps made so far."""
        return self.run.step + 1 == self.settings.log.replay_step

    def on_step_begin(self, batch: LocalBatch) -> None:
        if not self._is_next_step_replayed:
            return
        with eager_code(self.engine.model):
            rows = row_losses(self.engine, batch, self.run.bundle.prepare_batch)
        self.run.writer.write("replay.json", {"step": self.run.step + 1, "rows": rows})

    def wants_to_stop(self) -> bool:
        # The loop asks before it makes the step, and stops after it.
        return self._is_next_step_replayed


class RowLedger(LoopCallback):
    """Writes to ``rows.jsonl`` which rows every step has, and how many target tokens each row has.

    Padding has the row -1. The loader counted the target tokens, independently of the loop.
    """

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        return context.run.settings.log.log_rows

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        rows = self.engine.gather_rows(batch.rows)
        targets = self.engine.gather_rows(batch.targets)
        self.run.writer.append(
            "rows.jsonl", {"step": info.step, "rows": rows.tolist(), "targets": targets.tolist()}
        )


class CompareReplicas(LoopCallback):
    """Compares the ranks' weights every 100 steps, and before each checkpoint."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if self.loop_context.saves_after(info) or info.is_due(_COMPARE_STEPS):
            check_replicas(self.engine.accelerator, self.engine.model)


class Logging(LoopCallback):
    """Writes the metrics of a step."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        self.syncs = GradientSyncs(self.engine.model)

    def context(self) -> contextlib.AbstractContextManager[None]:
        return self.syncs.counting() if self.settings.log.log_rows else contextlib.nullcontext()

    def on_step_begin(self, batch: LocalBatch) -> None:
        self.syncs.restart()

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self.run.log({"train/weight_norm": float(self.engine.weight_norm())})

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if not (info.is_due(self.settings.log.logging_steps) or info.should_stop):
            return

        loss, metrics = self._loss_and_metrics(result)
        by_rank = self._gather_by_rank(batch)

        late_rank = self.timing.phases.new_straggler(by_rank.phase_seconds)
        if late_rank is not None:
            self.run.record_event("late", str(late_rank))

        entry = {
            "train/loss": loss,
            **{f"train/{name}": value for name, value in metrics.items()},
            "train/grad_norm": result.grad_norm,
            "train/weight_norm": float(self.engine.weight_norm()),
            "train/learning_rate": self.loop_context.optimizer.param_groups[0]["lr"],
            **self.timing.throughput.read(by_rank.mean_positions),
            "batch": by_rank.batch_fingerprint,
            "phases": by_rank.phase_seconds,
            "memory": {by_rank.memory_kind: by_rank.gib},
        }
        if self.settings.log.log_rows:
            entry["train/gradient_syncs"] = self.syncs.count
        self.timing.progress.show_entry(info.step, entry)
        self.run.log(entry)

    def _loss_and_metrics(self, result: StepResult) -> tuple[float, dict[str, float]]:
        """Return the mean loss of the global batch, and the objective's further metrics.

        One all-reduce carries all sums.
        """
        loss, metrics = result.sums
        local_sums = torch.stack([loss, *(value.to(loss.dtype) for value in metrics.values())])
        loss_sum, *totals = self.engine.sum_over_ranks(local_sums)
        metric_sums = {name: float(total) for name, total in zip(metrics, totals, strict=True)}
        mean_loss = float(loss_sum / max(result.denominator, 1))
        # `extra` is what the loss depended on besides the micro-batch, such as KTO's baseline.
        return mean_loss, self.engine.objective.metrics(metric_sums, result.extra)

    def _gather_by_rank(self, batch: LocalBatch) -> "_ByRank":
        """Gather what every rank has measured since the last log entry."""
        phase_seconds = self.timing.phases.read()
        memory_kind, bytes_held = memory_used(self.engine.device)
        gathered = self.engine.gather_numbers(
            {
                **phase_seconds,
                "gib": bytes_held / 2**30,
                "positions": self.timing.throughput.positions,
                "token_fingerprint": batch.token_fingerprint,
                "label_fingerprint": batch.label_fingerprint,
            }
        )
        # The fingerprint of the global batch is the sum over the ranks. A fingerprint is a sum with
        # an integer below 2^31 for each row, and float64 holds that of a rank exactly.
        token_fingerprint = sum(map(int, gathered["token_fingerprint"]))
        label_fingerprint = sum(map(int, gathered["label_fingerprint"]))
        return _ByRank(
            phase_seconds={
                phase: [round(seconds, 6) for seconds in gathered[phase]] for phase in phase_seconds
            },
            memory_kind=memory_kind,
            gib=[round(size, 4) for size in gathered["gib"]],
            mean_positions=statistics.fmean(gathered["positions"]),
            batch_fingerprint=f"{token_fingerprint:x}-{label_fingerprint:x}",
        )


class _ByRank(NamedTuple):
    """Measurements of all ranks; lists have a number for each rank."""

    phase_seconds: dict[str, list[float]]  # mean seconds of a step in each phase
    memory_kind: str  # ``gpu`` or ``host``
    gib: list[float]
    mean_positions: float  # that a rank has computed since the last log entry
    batch_fingerprint: str  # of the global batch's tokens and labels, to compare two runs by


class XRayRecording(LoopCallback):
    """Records the steps of ``--xray_steps`` as a timeline."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        assert self.settings.log.xray_range is not None
        self.xray = XRay(
            self.engine,
            self.timing.phases,
            self.engine.model,
            self.settings.log.xray_range,
            self.run.folder / "xray",
        )

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        return context.run.settings.log.xray_steps is not None and not context.is_replay

    def context(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.watching_buckets(self.xray.on_bucket)

    def on_train_begin(self) -> None:
        self.xray.at_step_boundary(self.run.step)

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.xray.at_step_boundary(info.step)


class Evaluation(LoopCallback):
    """Measures the eval loss."""

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        evaluates = context.eval_batches is not None and context.run.settings.eval.eval_steps > 0
        return evaluates and not context.is_replay

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self._evaluate()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if self.loop_context.evaluates_after(info):
            self._evaluate()

    def _evaluate(self) -> None:
        run = self.run
        start = time.monotonic()
        with self.timing.throughput.paused(), eager_code(self.engine.model):
            # Some objectives need a pass over all eval batches before the loss, such as KTO for its
            # baseline. For the others this makes no pass and returns nothing.
            extra = eval_extra(self.engine, self._batches)
            results = evaluate(
                self.engine,
                self._batches(),
                text_bytes=run.rows.metadata.eval_bytes,
                metric=self.loop_context.metric,
                sources=run.rows.eval_sources,
                extra=extra,
            )
            # A run with a time limit stops early enough to make another evaluation.
            run.deadline.reserve("evaluation", time.monotonic() - start)
            run.log(results)
        if run.patience.keeps_best:
            run.patience.record(run.step, results)
        self.timing.progress.write_evaluation(run.step, results)

    def _batches(self) -> Iterator[LocalBatch]:
        eval_batches = self.loop_context.eval_batches
        assert eval_batches is not None
        return self.timing.heartbeat.beat_while_reading(eval_batches, "an evaluation")


class Samples(LoopCallback):
    """Writes samples of the model's text to ``samples.jsonl``, every ``--eval_steps`` steps."""

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        return bool(context.run.settings.eval.sample_prompts) and not context.is_replay

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        # A run that was asked to stop makes no samples, to stop sooner.
        if info.should_stop and not info.is_last:
            return
        if not info.is_due(self.settings.eval.eval_steps):
            return
        start = time.monotonic()
        prompts = self.settings.eval.sample_prompts
        sampling = Sampling(max_new_tokens=_SAMPLE_TOKENS, seed=self.settings.optim.seed)

        self.engine.set_phase("a sample")
        with self.timing.throughput.paused(), eager_code(self.engine.model):
            texts = sample(
                self.engine,
                self.run.rows.tokenizer,
                prompts,
                sampling,
                stop_token_ids=self.run.rows.stop_token_ids,
            )
        # A run with a time limit stops early enough to make samples once more.
        self.run.deadline.reserve("samples", time.monotonic() - start)
        pairs = zip(prompts, texts, strict=True)
        self.run.log_samples([{"prompt": prompt, "text": text} for prompt, text in pairs])


class Checkpoints(LoopCallback):
    """Saves checkpoints."""

    @classmethod
    def is_wanted(cls, context: LoopContext) -> bool:
        return not context.is_replay

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if not self.loop_context.saves_after(info):
            return
        self.engine.set_phase("a save")
        with self.timing.throughput.paused():
            save(self.run, self.engine, self.loop_context.optimizer)


class Finish(LoopCallback):
    """Records how the run has ended, and writes the model if it is finished."""

    def on_train_end(self) -> None:
        run = self.run
        if self.loop_context.is_replay:
            # The run has more steps to make, so it is not finished.
            run.outcome = Outcome("preempted", f"step {run.step} was repeated for llmtrain replay")
            return

        wait_for_saves(run)
        if run.patience.is_over:
            self._finish(run.patience.reason)
        elif run.step == run.settings.optim.max_steps:
            self._finish("all steps are done")
        else:
            reason = run.stop_reason or "asked to stop"
            run.outcome = Outcome("preempted", f"{reason}; step {run.step} is saved")
            self._say_how_to_resume(reason)

    def _finish(self, reason: str) -> None:
        """Write the best weights if the run keeps them, and the last ones otherwise."""
        run = self.run
        load_best(run, self.engine)
        write_model(run, self.engine)
        self.engine.set_phase("a sample")
        text = final_sample(self.engine, run.rows, run.folder / "model")
        run.outcome = Outcome("finished", reason, sample=text)

    def _say_how_to_resume(self, reason: str) -> None:
        folder = self.run.folder
        flags = ""
        if self.run.settings.run.resume_from_checkpoint == "never":
            flags = f" and --resume_from_checkpoint auto --output_dir {folder}"
        say(
            "stopped",
            f"{reason}: step {self.run.step} is saved in {folder}; "
            f"resume with the same command{flags}",
        )
        if has_launcher() and self.run.stop_signal in (signal.SIGTERM, signal.SIGINT):
            say("launcher", "a traceback of the launcher may follow; it only reports the signal")


# In the order in which they are called: replicas are compared before a checkpoint is made of them,
# and a step is logged before the evaluation that follows it.
_CALLBACKS: tuple[type[LoopCallback], ...] = (
    MemoryAdvice,
    WarmUp,
    Replay,
    RowLedger,
    CompareReplicas,
    Logging,
    XRayRecording,
    Evaluation,
    Samples,
    Checkpoints,
    Finish,
)


def callbacks_of(context: LoopContext) -> list[Callback]:
    """Return the callbacks of a run, in the order in which they are called."""
    wanted = [kind(context) for kind in _CALLBACKS if kind.is_wanted(context)]
    return [context.timing, *wanted]
