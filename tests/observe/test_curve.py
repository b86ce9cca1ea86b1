"""The loss curve in the terminal has round ticks, and shows all evaluations."""

import itertools
import math
import re

import pytest

from llmtrain.observe.curve import loss_curve, round_tick


def entries(last_step: int, first_loss: float, last_loss: float) -> list[dict[str, float]]:
    """Return log entries at eleven steps, between which the loss changes linearly."""
    entries = []
    for tenth in range(11):
        loss = first_loss + (last_loss - first_loss) * tenth / 10
        entries.append({"step": last_step * tenth // 10, "train/loss": loss})
    return entries


def is_round(distance: float) -> bool:
    """Whether a distance between ticks is 1, 2 or 5 times a power of ten."""
    mantissa = distance / 10.0 ** math.floor(math.log10(distance) + 1e-9)
    return any(math.isclose(mantissa, factor) for factor in (1, 2, 5))


def ticks_of_losses(lines: list[str]) -> list[float]:
    """Read the labels of the vertical axis, from the top down."""
    matches = [re.match(r" *([-\d.e]+) \|", line) for line in lines]
    return [float(match[1]) for match in matches if match]


def ticks_of_steps(lines: list[str]) -> list[float]:
    """Read the labels of the horizontal axis."""
    (axis,) = [line for line in lines if re.match(r" +\| 0 ", line)]
    return [float(label) for label in axis.split()[1:]]


@pytest.mark.parametrize(
    ("last_step", "first_loss", "last_loss"),
    [
        (120, 7.6467, 3.873),
        (6, 5.5, 5.49),
        (240, 0.693, 0.0001),
        (12_345, 10.8, 2.9),
        (1, 3.0, 3.0),
    ],
)
def test_the_distances_between_ticks_are_round(
    last_step: int, first_loss: float, last_loss: float
) -> None:
    lines = loss_curve(entries(last_step, first_loss, last_loss)).splitlines()
    assert max(len(line) for line in lines) <= 100

    losses = ticks_of_losses(lines)
    assert len(losses) >= 2
    assert max(losses) >= first_loss
    assert min(losses) <= last_loss
    for upper, lower in itertools.pairwise(losses):
        assert is_round(upper - lower)

    steps = ticks_of_steps(lines)
    assert steps[0] == 0
    assert all(step.is_integer() for step in steps)
    for step, next_step in itertools.pairwise(steps):
        assert is_round(next_step - step)


@pytest.mark.parametrize("last_step", [1, 7, 100, 120])
def test_the_first_and_the_last_evaluation_are_drawn(last_step: int) -> None:
    evaluations = [{"step": 0, "eval/loss": 5.0}, {"step": last_step, "eval/loss": 4.0}]

    drawing, _, _ = loss_curve(evaluations).partition("Legend")

    points = [line.partition(" | ")[2].count("o") for line in drawing.splitlines()]
    assert sum(points) == 2


def test_a_run_without_a_loss_has_an_empty_curve() -> None:
    assert "step" in loss_curve([{"step": 0, "train/weight_norm": 1.0}])


@pytest.mark.parametrize(
    ("length", "expected"), [(100, 20), (8, 1), (9, 2), (0.03, 0.005), (41, 10)]
)
def test_at_most_eight_ticks_have_the_smallest_round_distance(
    length: float, expected: float
) -> None:
    assert round_tick(length, most=8) == pytest.approx(expected)
