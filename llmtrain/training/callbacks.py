"""The callbacks of the training loop, in the order in which they are called."""

import contextlib
import math
from collections.abc import Iterator

from llmtrain.config.flags import configs_of
from llmtrain.console import note, pluralize
from llmtrain.data.loader import count_shapes
from llmtrain.errors import UserError, is_out_of_memory
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult
from llmtrain.interfaces.model_bundle import can_recompute
from llmtrain.interfaces.part import as_json, name_of
from llmtrain.observe.heartbeat import Heartbeat
from llmtrain.observe.progress import ProgressBar
from llmtrain.observe.replicas import check_replicas
from llmtrain.observe.xray import WARM_UP_PHASE, XRay
from llmtrain.parallel.gradient_syncs import GradientSyncs
from llmtrain.training.compiling import compile_blocks, is_worth_compiling
from llmtrain.training.context import LoopCallback, LoopContext
from llmtrain.training.periodic import Checkpoints, Evaluation, Finish, Samples
from llmtrain.training.run_state import compare_states, flat_states
from llmtrain.training.step_log import Logging, RowLedger

_WATCHED_STEPS = 10  # after which the fields of parts are compared with what they were
_COMPARE_STEPS = 100  # steps between two comparisons of the replicas, besides those at checkpoints


def loop_callbacks(context: LoopContext) -> list[Callback]:
    """Return the callbacks that a run needs, in the order in which they are called.

    Those of the user come before them.
    """
    run = context.run
    engine = context.engine
    settings = run.settings
    syncs = None

    callbacks: list[Callback] = [
        context.throughput,
        Heartbeat(
            run.ranks,
            engine.phases,
            folder=run.folder,
            timeout=settings.parallel.ddp_timeout,
            on_failure=run.record_failure,
        ),
        ProgressBar(
            shown=run.ranks.is_main,
            step=run.step,
            max_steps=settings.optim.max_steps,
            every_entry=settings.log.is_set("logging_steps"),
        ),
        MemoryAdvice(context),
        StatelessParts(context),
        WarmUp(context),
    ]
    if settings.log.log_rows:
        # It counts from the beginning of a step, so it comes after those that make passes there.
        syncs = GradientSyncs(engine.model)
        callbacks.append(syncs)
        callbacks.append(RowLedger(context))

    # Replicas are compared before a checkpoint is made of them, and a step is logged before the
    # evaluation that follows it.
    callbacks.append(CompareReplicas(context))
    callbacks.append(Logging(context, syncs))
    if settings.log.xray_range is not None:
        callbacks.append(XRayRecording(context, settings.log.xray_range))
    if context.evaluates:
        callbacks.append(Evaluation(context))
    if settings.eval.sample_prompts:
        callbacks.append(Samples(context))
    callbacks.append(CheckStates(context))
    callbacks.append(Checkpoints(context))
    callbacks.append(Finish(context))
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
            advice = f"one row is too much. {self._shorter_rows()}, or make the model smaller."
        bundle = self.run.bundle
        recomputes_all = bundle.recomputation is not None and bundle.recomputation.every == 1
        if can_recompute(bundle.model) and not recomputes_all:
            advice += (
                " --gradient_checkpointing computes activations again instead of keeping them."
            )
        if self.engine.ranks.is_sharded and not self.engine.sync_each_batch:
            advice += (
                " With several micro-batches per step, --sync_each_batch also saves memory for "
                "gradients."
            )
        return advice

    def _shorter_rows(self) -> str:
        """Return how to make rows shorter: with a flag, if the recipe has one."""
        for config in configs_of(self.run.settings).values():
            if config.row_length_flag:
                return f"Lower --{config.row_length_flag}"
        return "Make the rows shorter"


class WarmUp(LoopCallback):
    """Compiles the model, if the run does, with the first batch of this start."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        self.first_step = context.run.step

    def on_step_begin(self, batch: LocalBatch) -> None:
        if self.run.step > self.first_step:
            return
        micro_batch = batch.batches[-1]  # any would do
        shapes = count_shapes(self.run.rows.train)

        self.engine.phases.begin(WARM_UP_PHASE)
        with self.loop_context.throughput.paused():
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
        mode = self.settings.parallel.torch_compile
        if mode != "auto":
            return mode == "always"
        if self.engine.device.type != "cuda":
            return False
        # Compiled code rounds differently, so a run keeps its choice.
        if self.run.status.compiled is not None:
            return self.run.status.compiled
        if self.settings.parallel.bitwise:
            return False
        steps = self.settings.optim.max_steps
        return is_worth_compiling(self.engine.device, steps=steps, shapes=shapes)


class StatelessParts(LoopCallback):
    """Notes which parts have no state, and yet change while the run trains.

    A resumed run would start with their first values, without a word. Parts that change nothing of
    the run, and so have no fingerprint, may do so.
    """

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        self.first_step = self.run.step
        self.fields: dict[str, str] = {}

    def on_train_begin(self) -> None:
        self.fields = self._fields()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if info.step != self.first_step + _WATCHED_STEPS:
            return
        # On all ranks, because a state_dict may gather shards.
        for name, fields in self._fields().items():
            if fields != self.fields.get(name) and self.engine.ranks.is_main:
                note(
                    f"{name} changes while the run trains, but has no state_dict: a resumed run "
                    "starts with its first values. Give it state_dict and load_state_dict."
                )

    def _fields(self) -> dict[str, str]:
        """Return a description of all fields of each part without state, by name."""
        return {
            name_of(part): repr(as_json(vars(part)))
            for part in self.run.parts.fingerprinted
            if part.fingerprint is not None and not part.state_dict()
        }


class CompareReplicas(LoopCallback):
    """Compares the ranks' weights every 100 steps, and before each checkpoint."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if self.loop_context.saves_after(info) or info.is_due(_COMPARE_STEPS):
            check_replicas(self.run.ranks, self.engine.model)


class CheckStates(LoopCallback):
    """Checks once, after the first step of this start, that checkpoints can hold all states.

    All ranks must have the same states.
    """

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        self._is_checked = False

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        # A skipped step may leave the optimizer without a state. All ranks have the same norm, and
        # an optimizer may keep a state on some of them only.
        if self._is_checked or not math.isfinite(result.grad_norm):
            return
        self._is_checked = True
        self.loop_context.settle()  # callbacks may keep states of their results
        compare_states(flat_states(self.run, self.loop_context.optimizer_state))


class XRayRecording(LoopCallback):
    """Records the steps of ``--xray_steps`` as a timeline."""

    def __init__(self, context: LoopContext, steps: range) -> None:
        super().__init__(context)
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
