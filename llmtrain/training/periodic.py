"""What uses the model between steps and at the end: to evaluate it, to sample, to save it."""

import signal
import time

from accelerate.data_loader import DataLoaderShard

from llmtrain.console import say
from llmtrain.data.prompts import Prompts
from llmtrain.errors import DamagedRowsError, as_user_error, first_line
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.interfaces.part import name_of
from llmtrain.launching.launch_request import has_launcher
from llmtrain.models.generation import Sampling
from llmtrain.observe.replicas import check_replicas
from llmtrain.training.compiling import eager_code
from llmtrain.training.evaluate import add_metrics, as_numbers_by_name, evaluate, sample
from llmtrain.training.loop import Loop, LoopCallback
from llmtrain.training.optimizer_state import OptimizerState
from llmtrain.training.run_state import load_best, save, wait_for_saves, write_model
from llmtrain.training.summary import SAMPLE_TOKENS, final_sample

_COMPARE_STEPS = 100  # steps between two comparisons of the replicas, besides those at checkpoints


class Evaluation(LoopCallback):
    """Measures the eval loss."""

    def __init__(self, loop: Loop, batches: DataLoaderShard) -> None:
        super().__init__(loop)
        self.batches = batches

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self._evaluate()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        # A run that is about to stop skips an evaluation, to stop sooner, unless evaluations choose
        # its best checkpoint. A resume does not make up for it. After the last step, it evaluates.
        stops_soon = info.should_stop and not info.is_last and not self.run.patience.keeps_best
        if info.is_due(self.run.settings.eval.eval_steps) and not stops_soon:
            self.loop.settle()
            self._evaluate()

    def _evaluate(self) -> None:
        run = self.run
        start = time.monotonic()
        with self.loop.throughput.paused(), eager_code(self.engine.model):
            results = self._measure()
            for callback in self.loop.in_turn("on_evaluate"):
                further = callback.on_evaluate(self._measure)
                source = f"{name_of(callback)}.on_evaluate"
                add_metrics(results, as_numbers_by_name(source, further))
            # A run with a time limit stops early enough to make another evaluation.
            run.deadline.reserve("evaluation", time.monotonic() - start)
            results = {f"eval/{name}": value for name, value in results.items()}
            self.loop.log(results)
        if run.patience.keeps_best:
            run.patience.record(run.step, results)

    def _measure(self) -> dict[str, float]:
        """Return the eval metrics of the model with its present weights, by name."""
        rows = self.run.rows
        return evaluate(
            self.engine,
            self.batches,
            text_bytes=rows.metadata.eval_bytes,
            metrics=self.run.parts.metrics,
            sources=rows.eval_sources,
        )


class Samples(LoopCallback):
    """Writes samples of the model's text to ``samples.jsonl``, every ``--eval_steps`` steps."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop)
        rows = self.run.rows
        assert rows.tokenizer is not None  # or the settings would be refused
        prompts = Prompts(rows.tokenizer, rows.stop_token_ids)
        self._texts = self.run.settings.eval.sample_prompts
        with as_user_error("--sample_prompts", describe=first_line):
            self._prompts = [prompts.of_question(text) for text in self._texts]

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        # A run that was asked to stop makes no samples, to stop sooner.
        stops_soon = info.should_stop and not info.is_last
        if info.is_due(self.run.settings.eval.eval_steps) and not stops_soon:
            self.loop.settle()
            self._sample()

    def _sample(self) -> None:
        run = self.run
        start = time.monotonic()
        sampling = Sampling(max_new_tokens=SAMPLE_TOKENS, seed=run.settings.optim.seed)

        self.engine.phases.begin("a sample")
        with self.loop.throughput.paused(), eager_code(self.engine.model):
            texts = sample(
                self.engine,
                run.rows.tokenizer,
                self._prompts,
                sampling,
                stop_token_ids=run.rows.stop_token_ids,
            )
        # A run with a time limit stops early enough to make samples once more.
        run.deadline.reserve("samples", time.monotonic() - start)
        pairs = zip(self._texts, texts, strict=True)
        for prompt, text in pairs:
            entry = {"step": run.step, "prompt": prompt, "text": text}
            run.writer.append("samples.jsonl", entry)


class Checkpoints(LoopCallback):
    """Saves checkpoints, and compares the replicas before each, and every 100 steps."""

    def __init__(self, loop: Loop, optimizer_state: OptimizerState) -> None:
        super().__init__(loop)
        self.optimizer_state = optimizer_state

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        run = self.run
        # An evaluation may choose the checkpoint of its step as the best one.
        may_become_best = run.patience.keeps_best and info.is_due(run.settings.eval.eval_steps)
        saves = info.should_stop or may_become_best or info.is_due(run.settings.run.save_steps)
        compares = run.ranks.sharding.replicas > 1 and info.is_due(_COMPARE_STEPS)
        if not saves and not compares:
            return

        self.loop.settle()
        check_replicas(run.ranks, self.engine.model)
        if saves:
            self.engine.phases.begin("a save")
            with self.loop.throughput.paused():
                save(run, self.engine, self.optimizer_state)


class Finish(LoopCallback):
    """Records how the run has ended, and writes the model and a sample if it is finished."""

    def on_train_end(self) -> None:
        run = self.run
        status = run.status
        wait_for_saves(run)
        if not self.loop.is_last:
            flags = ""
            if run.settings.run.resume_from_checkpoint == "never":
                flags = f" and --resume_from_checkpoint auto --output_dir {run.folder}"
            saved = f"step {run.step} is saved in {run.folder}; resume with the same command{flags}"
            if self.loop.is_damaged:
                raise DamagedRowsError(f"{status.stop_reason.rstrip('.')}; {saved}.")
            status.state = "preempted"
            status.reason = f"{status.stop_reason}; step {run.step} is saved"
            say("stopped", f"{status.stop_reason}: {saved}")
            if has_launcher() and status.stop_signal not in (None, signal.SIGUSR1):
                say(
                    "launcher", "a traceback of the launcher may follow; it only reports the signal"
                )
            return

        load_best(run, self.engine)
        write_model(run, self.engine, run.folder / "model")
        # The model is written: the run is finished, whatever becomes of the rest.
        status.state = "finished"
        status.reason = run.early_end or "all steps are done"
        run.writer.set_status(status.state, run.step, status.reason)
        self.engine.phases.begin("a sample")
        status.sample = final_sample(self.engine, run.rows, run.folder / "model")
