"""Callbacks that use the model between steps and at the end: to evaluate, to sample, to save it."""

import signal
import time

from llmtrain.console import say
from llmtrain.data.prompts import Prompts
from llmtrain.errors import as_user_error, first_line
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.interfaces.part import name_of
from llmtrain.launching.launcher import has_launcher
from llmtrain.models.dtypes import dtype_name
from llmtrain.models.generation import Sampling
from llmtrain.parallel.team import Team
from llmtrain.record.history import read_lines
from llmtrain.training.compiling import eager_code
from llmtrain.training.context import LoopCallback, LoopContext
from llmtrain.training.evaluate import ROUNDED_LOSS, add_metrics, as_numbers_by_name, sample
from llmtrain.training.run_state import (
    load_best,
    round_weights,
    save,
    wait_for_saves,
    write_model,
)
from llmtrain.training.status import Outcome
from llmtrain.training.summary import SAMPLE_TOKENS, final_sample


class Evaluation(LoopCallback):
    """Measures the eval loss."""

    def on_train_begin(self) -> None:
        if self.run.step == 0:
            self._evaluate()

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if self.loop_context.evaluates_after(info):
            self.loop_context.settle()
            self._evaluate()

    def _evaluate(self) -> None:
        run = self.run
        start = time.monotonic()
        with self.loop_context.throughput.paused(), eager_code(self.engine.model):
            results = self.loop_context.measure()
            for callback in self.loop_context.in_turn("on_evaluate"):
                further = callback.on_evaluate(self.loop_context.measure)
                source = f"{name_of(callback)}.on_evaluate"
                add_metrics(results, as_numbers_by_name(source, further))
            # A run with a time limit stops early enough to make another evaluation.
            run.deadline.reserve("evaluation", time.monotonic() - start)
            results = {f"eval/{name}": value for name, value in results.items()}
            self.loop_context.log(results)
        if run.patience.keeps_best:
            run.patience.record(run.step, results)


class Samples(LoopCallback):
    """Writes samples of the model's text to ``samples.jsonl``, every ``--eval_steps`` steps."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        rows = self.run.rows
        assert rows.tokenizer is not None  # or the settings would be refused
        prompts = Prompts(rows.tokenizer, rows.stop_token_ids)
        with as_user_error("--sample_prompts", describe=first_line):
            texts = self.settings.eval.sample_prompts
            self._prompts = [prompts.of_question(text) for text in texts]

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        # A run that was asked to stop makes no samples, to stop sooner.
        if info.should_stop and not info.is_last:
            return
        if not info.is_due(self.settings.eval.eval_steps):
            return
        self.loop_context.settle()
        start = time.monotonic()
        sampling = Sampling(max_new_tokens=SAMPLE_TOKENS, seed=self.settings.optim.seed)

        self.engine.phases.begin("a sample")
        with self.loop_context.throughput.paused(), eager_code(self.engine.model):
            texts = sample(
                self.engine,
                self.run.rows.tokenizer,
                self._prompts,
                sampling,
                stop_token_ids=self.run.rows.stop_token_ids,
            )
        # A run with a time limit stops early enough to make samples once more.
        self.run.deadline.reserve("samples", time.monotonic() - start)
        pairs = zip(self.settings.eval.sample_prompts, texts, strict=True)
        self.run.log_samples([{"prompt": prompt, "text": text} for prompt, text in pairs])


class Checkpoints(LoopCallback):
    """Saves checkpoints."""

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        if not self.loop_context.saves_after(info):
            return
        self.loop_context.settle()
        self.engine.phases.begin("a save")
        with self.loop_context.throughput.paused():
            save(self.run, self.engine, self.loop_context.optimizer_state)


class Finish(LoopCallback):
    """Records how the run has ended, and writes the model and a sample if it is finished."""

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        self.model_step = self.run.step  # whose weights the finished model has

    def on_train_end(self) -> None:
        run = self.run
        run.status.outcome = self._outcome()
        if run.is_finished:
            # The model is written: the run is finished, whatever becomes of the rest.
            run.writer.set_status("finished", run.step, run.status.outcome.reason)
            if self.loop_context.evaluates:
                self._evaluate_rounded()
            self.engine.phases.begin("a sample")
            run.status.sample = final_sample(self.engine, run.rows, run.folder / "model")

    def _outcome(self) -> Outcome:
        """Write the model if the run is finished; return how the run has ended."""
        run = self.run
        wait_for_saves(run)
        if run.early_end:
            return self._finished(run.early_end)
        if run.step == run.settings.optim.max_steps:
            return self._finished("all steps are done")

        reason = run.status.stop_reason or "asked to stop"
        self._say_how_to_resume(reason)
        return Outcome("preempted", f"{reason}; step {run.step} is saved")

    def _finished(self, reason: str) -> Outcome:
        """Write the best weights if the run keeps them, and the last ones otherwise."""
        run = self.run
        self.model_step = load_best(run, self.engine)
        write_model(run, self.engine, run.folder / "model")
        return Outcome("finished", reason)

    def _evaluate_rounded(self) -> None:
        """Log the eval loss of the finished model if its weights were rounded to another dtype."""
        run = self.run
        dtype = round_weights(run, self.engine)
        if dtype is None:
            return
        with eager_code(self.engine.model):
            loss = self.loop_context.measure()["loss"]
        run.log({f"eval/{ROUNDED_LOSS}": loss})
        trained_loss = Team.everyone().on_main(self._trained_loss)
        before = "" if trained_loss is None else f" ({trained_loss:.4f} before rounding)"
        run.record_event("rounded", f"eval loss {loss:.4f} in {dtype_name(dtype)}{before}")

    def _trained_loss(self) -> float | None:
        """Return the eval loss of the model before its weights were rounded, from the log."""
        losses = [
            entry["eval/loss"]
            for entry in read_lines(self.run.folder / "metrics.jsonl")
            if entry["step"] == self.model_step and entry.get("eval/loss") is not None
        ]
        return losses[-1] if losses else None

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
        if has_launcher() and self.run.status.stop_signal not in (None, signal.SIGUSR1):
            say("launcher", "a traceback of the launcher may follow; it only reports the signal")
