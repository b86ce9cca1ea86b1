"""The callbacks of the training loop, in the order in which they are called."""

import contextlib
from collections.abc import Iterator

from accelerate.data_loader import DataLoaderShard

from llmtrain.config.flags import configs_of
from llmtrain.console import pluralize
from llmtrain.data.loader import count_shapes
from llmtrain.errors import UserError, is_out_of_memory
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.interfaces.model import can_recompute
from llmtrain.observe.heartbeat import Heartbeat
from llmtrain.observe.progress import ProgressBar
from llmtrain.observe.xray import WARM_UP_PHASE, XRay
from llmtrain.training.compiling import compile_blocks
from llmtrain.training.loop import Loop, LoopCallback
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.periodic import Checkpoints, Evaluation, Finish, Samples
from llmtrain.training.step_log import Logging, RowLedger

# On a GPU, compiling takes 10 seconds or more, and saves a tenth of a step or more. A step of 50 ms
# regains 10 seconds after 2,000 steps. The step of a larger model takes longer and saves more. Each
# shape of a micro-batch is compiled.
_MIN_COMPILED_STEPS = 2000


def loop_callbacks(
    loop: Loop, optimizer_state: OptimizerState, eval_batches: DataLoaderShard | None
) -> list[Callback]:
    """Return the callbacks that a run needs, in the order in which they are called.

    Those of the user come before them.
    """
    run = loop.run
    engine = loop.engine
    settings = run.settings

    callbacks: list[Callback] = [
        loop.throughput,
        Heartbeat(
            run.ranks,
            engine.phases,
            folder=run.folder,
            timeout=settings.parallel.ddp_timeout,
            on_failure=run.record_failure,
        ),
        ProgressBar(
            shown=loop.is_main,
            step=run.step,
            max_steps=loop.max_steps,
            every_entry=settings.log.is_set("logging_steps"),
        ),
        MemoryAdvice(loop),
        WarmUp(loop),
    ]
    if settings.log.log_rows:
        callbacks.append(RowLedger(loop))

    # A step is logged before the evaluation that follows it.
    callbacks.append(Logging(loop))
    if settings.log.xray_range is not None:
        callbacks.append(XRayRecording(loop, settings.log.xray_range))
    if eval_batches is not None and settings.eval.eval_steps > 0:
        callbacks.append(Evaluation(loop, eval_batches))
    if settings.eval.sample_prompts:
        callbacks.append(Samples(loop))
    callbacks.append(Checkpoints(loop, optimizer_state))
    callbacks.append(Finish(loop))
    return callbacks


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
            shorter_rows = "Make the rows shorter"
            for config in configs_of(self.run.settings).values():
                if config.row_length_flag:
                    shorter_rows = f"Lower --{config.row_length_flag}"
            advice = f"one row is too much. {shorter_rows}, or make the model smaller."
        bundle = self.run.bundle
        recomputes = bundle.recomputation is not None and bundle.recomputation.enabled
        if can_recompute(bundle.model) and not recomputes:
            advice += " --gradient_checkpointing saves memory for activations."
        if self.engine.ranks.is_sharded and not self.engine.sync_each_batch:
            advice += " With several micro-batches, --sync_each_batch saves memory for gradients."
        return advice


class WarmUp(LoopCallback):
    """Compiles the model, if the run does, with the first batch of this start."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        self.first_step = loop.run.step

    def on_step_begin(self, batch: LocalBatch) -> None:
        if self.run.step > self.first_step:
            return
        micro_batch = batch.batches[-1]  # any would do
        shapes = count_shapes(self.run.rows.train)

        self.engine.phases.begin(WARM_UP_PHASE)
        with self.loop.throughput.paused():
            compiles = self._should_compile(shapes)
            if compiles:
                compile_blocks(self.engine, micro_batch, shapes)
            # On a CPU, `auto` leaves the recorded choice to later starts on a GPU.
            is_on_gpu = self.engine.device.type == "cuda"
            if is_on_gpu or self.run.status.compiled is None:
                self.run.status.compiled = compiles
            # DDP rebuilds its buckets once, after the first step of a run. Buckets decide in which
            # order gradients are added over the ranks. A run that resumes at a later step rebuilds
            # them here, before its first step, so that it adds them like a run without a break.
            if self.run.step:
                self.engine.rebuild_buckets(micro_batch)

    def _should_compile(self, shapes: int) -> bool:
        mode = self.run.settings.parallel.torch_compile
        if mode != "auto":
            return mode == "always"
        if self.engine.device.type != "cuda":
            return False
        # Compiled code rounds differently, so a run keeps its choice.
        if self.run.status.compiled is not None:
            return self.run.status.compiled
        if self.run.settings.parallel.bitwise:
            return False
        # This depends on the run alone: not on measured times, nor on the step where it resumes.
        return self.run.settings.optim.max_steps >= _MIN_COMPILED_STEPS * shapes


class XRayRecording(LoopCallback):
    """Records the steps of ``--xray_steps`` as a timeline."""

    def __init__(self, loop: Loop, steps: range) -> None:
        super().__init__(loop)
        self.xray = XRay(
            self.run.ranks,
            self.engine.phases,
            self.engine.model,
            steps,
            self.run.folder / "xray",
        )

    def context(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.watching_buckets(self.xray.on_bucket)

    def on_train_begin(self) -> None:
        self.xray.at_step_boundary(self.run.step)

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.xray.at_step_boundary(info.step)
