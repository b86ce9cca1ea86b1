"""What rank 0 shows in the terminal: the progress bar, and in the end the loss curve."""

import contextlib
import sys
import time
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from llmtrain.console import can_show_bars, write_line
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import Callback, StepInfo, StepResult

# How the line of an evaluation shows each metric. Custom metrics follow, by their own names.
_EVAL_FORMATS = {
    "eval/loss": "loss {:.4f}",
    "eval/perplexity": "perplexity {:,.1f}",
    "eval/bits_per_byte": "bits per byte {:.3f}",
    "eval/rewards/accuracies": "chosen above rejected {:.1%}",
    "eval/rewards/margins": "margin {:.3f}",
    "eval/kl": "KL {:.3f}",
}
# Details that would make the line too long.
_NOT_SHOWN = ("eval/loss/", "eval/rewards/", "eval/logps/")

_LINE_SECONDS = 10  # the least time between two lines of a log file


class ProgressBar(Callback):
    """A bar with the loss, tokens/s and time left, and a line above it for each evaluation.

    If stderr is a log file, there are lines for log entries instead of a bar.

    Args:
        shown: whether this process shows anything.
        step: steps made before this start.
        max_steps: steps of the run.
        every_entry: write a line for every log entry. Otherwise at least ten seconds lie between
            two lines.
    """

    takes_late_results = True

    def __init__(self, shown: bool, step: int, max_steps: int, every_entry: bool = False) -> None:
        self.is_shown = shown
        self.line_seconds = 0 if every_entry else _LINE_SECONDS
        self.first_step = step
        self.max_steps = max_steps
        self.start_time = time.monotonic()
        self.last_line_time = self.start_time
        self.bar = tqdm(
            total=max_steps,
            initial=step,
            disable=not shown or not can_show_bars(),
            unit="step",
            desc="training",
            dynamic_ncols=True,
        )

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.bar.update()

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the log entry of a step or of an evaluation."""
        if self.is_shown and "eval/loss" in metrics:
            self._write_evaluation(step, metrics)
        if "train/loss" not in metrics:
            return

        loss = metrics["train/loss"]
        speed = metrics["train/tokens_per_second"]
        text = f"loss {loss:.4f}, {speed:,.0f} tokens/s"
        if not self.bar.disable:
            self.bar.set_postfix_str(text, refresh=False)
            return

        # A log file gets a line, unless the last one is too young.
        now = time.monotonic()
        if not self.is_shown or now - self.last_line_time < self.line_seconds:
            return
        self.last_line_time = now
        seconds_per_step = (now - self.start_time) / (step - self.first_step)
        seconds_left = seconds_per_step * (self.max_steps - step)
        left = tqdm.format_interval(seconds_left)
        seen = f"{metrics['tokens_seen']:,.0f} tokens"
        with contextlib.suppress(OSError):
            write_line(f"step {step:>6}/{self.max_steps}  {text}, {seen}, {left} left", sys.stderr)

    def on_train_end(self) -> None:
        self.bar.close()

    def _write_evaluation(self, step: int, entry: Mapping[str, float]) -> None:
        """Write a line with the results of an evaluation."""
        results = {name: value for name, value in entry.items() if name.startswith("eval/")}
        metrics = [
            text.format(results[name]) for name, text in _EVAL_FORMATS.items() if name in results
        ]
        for name, value in results.items():
            if name not in _EVAL_FORMATS and not name.startswith(_NOT_SHOWN):
                metrics.append(f"{name.removeprefix('eval/')} {value:.4g}")
        # A reader that has gone (`| head`), or a full disk, does not end the run.
        with contextlib.suppress(OSError):
            self.bar.write(f"step {step:>6}  eval: {'  '.join(metrics)}", file=sys.stdout)
            sys.stdout.flush()


def loss_curve(entries: list[JsonObject]) -> str:
    """Draw the train loss and the eval loss against the step, as text.

    The text is coloured if stdout is a terminal.

    Args:
        entries: the log entries of a run, as in ``metrics.jsonl``.
    """
    import plotille

    figure = plotille.Figure()
    figure.width = 60
    figure.height = 12
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label = "step"
    figure.y_label = "loss"
    figure.set_x_limits(min_=0)
    figure.register_label_formatter(float, _label)

    _plot(figure, entries, "train/loss", label="training", lc="cyan")
    _plot(figure, entries, "eval/loss", label="eval", lc="magenta", marker="o")
    return str(figure.show(legend=True))


def _plot(figure: Any, entries: list[JsonObject], metric: str, **style: str) -> None:
    """Add the curve of a metric, if some entry has it."""
    points = [(entry["step"], entry[metric]) for entry in entries if entry.get(metric) is not None]
    if points:
        steps, losses = zip(*points, strict=True)
        figure.plot(steps, losses, **style)


def _label(value: float, chars: int, left: bool = False, **_: object) -> str:
    """Return the label of a tick, to three digits; of a step, whole."""
    text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return text.ljust(chars) if left else text.rjust(chars)
