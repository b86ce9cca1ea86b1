"""The loss curve of a run, drawn in the terminal."""

import sys

from llmtrain.types import Facts


def loss_curve(readings: list[Facts]) -> str:
    """Draw training and held-out loss against the step, as text; in colour where stdout is a terminal."""
    import plotille

    figure = plotille.Figure()
    figure.width, figure.height, figure.color_mode = 76, 16, "names"
    figure.with_colors = sys.stdout.isatty()
    figure.x_label, figure.y_label = "step", "loss"
    figure.register_label_formatter(float, lambda value, **_: f"{value:.5g}")
    figure.set_x_limits(min_=0)
    for key, label, colour in (
        ("train/loss", "training", "cyan"),
        ("eval/loss", "held out", "magenta"),
    ):
        if points := [(line["step"], line[key]) for line in readings if line.get(key) is not None]:
            figure.plot(
                *zip(*points, strict=True),
                label=label,
                lc=colour,
                marker="o" if key == "eval/loss" else None,
            )
    return str(figure.show(legend=True))
