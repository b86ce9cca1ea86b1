"""The loss curve of a run, drawn in the terminal."""

import json
import sys
from pathlib import Path


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Every line of a run's ``metrics.jsonl``; a line cut off by a crash is left out."""
    lines = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return lines


def loss_curve(folder: Path, width: int = 76, height: int = 16) -> str:
    """Training and held-out loss against the step, as text; in colour where stdout is a terminal."""
    import plotille

    metrics = read_metrics(folder)
    figure = plotille.Figure()
    figure.width, figure.height = width, height
    figure.color_mode = "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label, figure.y_label = "step", "loss"
    figure.register_label_formatter(float, lambda value, **_: f"{value:.5g}")
    figure.set_x_limits(min_=0)
    for key, label, colour in (("train/loss", "training", "cyan"), ("eval/loss", "held out", "magenta")):
        points = [(line["step"], line[key]) for line in metrics if line.get(key) is not None]
        if points:
            figure.plot(*zip(*points, strict=True), label=label, lc=colour, marker="o" if key == "eval/loss" else None)
    return figure.show(legend=True)
