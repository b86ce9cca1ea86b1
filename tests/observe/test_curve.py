"""The loss curve in the terminal has round ticks, and shows all evaluations."""

import re

import pytest

from llmtrain.observe.progress import loss_curve, round_tick


def test_the_axes_of_a_curve_have_round_ticks_around_all_values() -> None:
    entries = [{"step": 12 * tenth, "train/loss": 7.6 - 0.3 * tenth} for tenth in range(11)]
    lines = loss_curve(entries).splitlines()

    assert max(len(line) for line in lines) <= 100
    labels = [re.match(r" *([\d.]+) \|", line) for line in lines]
    losses = [float(label[1]) for label in labels if label]
    assert losses == pytest.approx([7.6 - 0.2 * tick for tick in range(17)])
    [steps] = [line.split()[1:] for line in lines if re.match(r" +\| 0 ", line)]
    assert steps == ["0", "20", "40", "60", "80", "100", "120"]


@pytest.mark.parametrize("last_step", [1, 120])
def test_the_first_and_the_last_evaluation_are_drawn(last_step: int) -> None:
    evaluations = [{"step": 0, "eval/loss": 5.0}, {"step": last_step, "eval/loss": 4.0}]

    drawing, _, _ = loss_curve(evaluations).partition("Legend")

    points = [line.partition(" | ")[2].count("o") for line in drawing.splitlines()]
    assert sum(points) == 2


@pytest.mark.parametrize(("length", "expected"), [(100, 20), (8, 1), (9, 2), (0.03, 0.005)])
def test_at_most_eight_ticks_have_the_smallest_round_distance(
    length: float, expected: float
) -> None:
    assert round_tick(length, most=8) == pytest.approx(expected)
