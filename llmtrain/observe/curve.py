"""The loss curve of a run, drawn in the terminal."""

import math
import sys
from typing import Any

from llmtrain.json_types import JsonObject

# In characters. plotille writes a label at each row, and below every tenth column.
_MOST_ROWS = 20
_MOST_STEP_TICKS = 8
_TICK_COLUMNS = 10


def loss_curve(entries: list[JsonObject]) -> str:
    """Draw the train loss and the eval loss against the step, as text.

    The text is coloured if stdout is a terminal.

    Args:
        entries: the log entries of a run, as in ``metrics.jsonl``.
    """
    import plotille

    figure = plotille.Figure()
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label = "step"
    figure.y_label = "loss"
    figure.register_label_formatter(float, _label)

    _plot(figure, entries, "train/loss", label="training", lc="cyan")
    _plot(figure, entries, "eval/loss", label="eval", lc="magenta", marker="o")
    _set_round_limits(figure, entries)
    return str(figure.show(legend=True))


def _plot(figure: Any, entries: list[JsonObject], metric: str, **style: str) -> None:
    """Add the curve of a metric, if some entry has it."""
    points = [(entry["step"], entry[metric]) for entry in entries if entry.get(metric) is not None]
    if points:
        steps, losses = zip(*points, strict=True)
        figure.plot(steps, losses, **style)


def _label(value: float, chars: int, left: bool = False, **_: object) -> str:
    """Return the label of a tick, without the digits that rounding errors leave."""
    text = f"{round(value, 10):.6g}"
    return text.ljust(chars) if left else text.rjust(chars)


def _set_round_limits(figure: Any, entries: list[JsonObject]) -> None:
    """Choose the size and the limits of a figure so that its ticks are round numbers."""
    losses = []
    last_step = 1
    for entry in entries:
        for metric in ("train/loss", "eval/loss"):
            if entry.get(metric) is not None:
                losses.append(entry[metric])
                last_step = max(last_step, entry["step"])
    if not losses:
        return

    # plotille draws no point on the upper limit. So the last step has a column of its own.
    step_tick = max(1.0, round_tick(last_step, _MOST_STEP_TICKS))
    figure.width = math.ceil(last_step / step_tick * _TICK_COLUMNS) + 1
    figure.set_x_limits(min_=0, max_=figure.width * step_tick / _TICK_COLUMNS)

    lowest = min(losses)
    highest = max(losses)
    height = highest - lowest or abs(highest) or 1.0
    # Two rows fewer, because both ends are rounded outwards.
    loss_tick = round_tick(height, _MOST_ROWS - 2)
    first_row = math.floor(lowest / loss_tick)
    end_row = math.floor(highest / loss_tick) + 1
    figure.height = end_row - first_row
    figure.set_y_limits(min_=first_row * loss_tick, max_=end_row * loss_tick)


def round_tick(length: float, most: int) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, ... or 0.5, 0.2, ... that divides a length well.

    Args:
        length: the length of the axis, above 0.
        most: the largest number of ticks.
    """
    power = 10.0 ** math.floor(math.log10(length / most))
    for factor in (1, 2, 5):
        if length / (factor * power) <= most:
            return factor * power
    return 10 * power
