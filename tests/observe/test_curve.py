"""The loss curve in the terminal fits it, and shows all evaluations."""

import pytest

from llmtrain.observe.progress import loss_curve


@pytest.mark.parametrize("last_step", [1, 120, 100_000])
def test_the_first_and_the_last_evaluation_are_drawn(last_step: int) -> None:
    evaluations = [{"step": 0, "eval/loss": 5.0}, {"step": last_step, "eval/loss": 4.0}]

    drawing, _, _ = loss_curve(evaluations).partition("Legend")

    points = [line.partition(" | ")[2].count("o") for line in drawing.splitlines()]
    assert sum(points) == 2
    assert max(len(line) for line in drawing.splitlines()) <= 100
