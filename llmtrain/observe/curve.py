"""The loss curve of a run, drawn in the terminal."""

import sys
from typing import Any

from llmtrain.types import JsonObject


def loss_curve(entries: list[JsonObject]) -> str:
    """Draw the train loss and the eval loss against the step, as text.

    The text is coloured if stdout is a terminal.

    Args:
        entries: the log entries of a run, as in ``metrics.jsonl``.
    """
    import plotille

    figure = plotille.Figure()
    figure.width = 76
    figure.height = 16
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label = "step"
    figure.y_label = "loss"
    figure.register_label_formatter(float, lambda value, **_: f"{value:.5g}")
    figure.set_x_limits(min_=0)

    _plot(figure, entries, "train/loss", label="training", lc="cyan")
    _plot(figure, entries, "eval/loss", label="eval", lc="magenta", marker="o")
    return str(figure.show(legend=True))


def _plot(figure: Any, entries: list[JsonObject], metric: str, **style: str) -> None:
    """Add the curve of a metric, if some entry has it."""
    points = [(entry["step"], entry[metric]) for entry in entries if entry.get(metric) is not None]
    if points:
        steps, losses = zip(*points, strict=True)
        figure.plot(steps, losses, **style)
