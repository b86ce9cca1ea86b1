"""The loss curve in the terminal has round ticks."""

import itertools
import math
import re

import pytest

from llmtrain.observe.curve import loss_curve, round_tick


def entries(last_step: int, first_loss: float, last_loss: float) -> list[dict]:
    losses = [first_loss + (last_loss - first_loss) * i / 10 for i in range(11)]
    return [{"step": last_step * i // 10, "train/loss": losses[i]} for i in range(11)]


def is_round(tick: float) -> bool:
    """Whether a step from one tick to the next is 1, 2 or 5 times a power of ten."""
    mantissa = tick / 10.0 ** math.floor(math.log10(tick) + 1e-9)
    return any(math.isclose(mantissa, factor) for factor in (1, 2, 5))


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
def test_ticks_are_round(last_step: int, first_loss: float, last_loss: float) -> None:
    lines = loss_curve(entries(last_step, first_loss, last_loss)).splitlines()

    losses = [float(match[1]) for line in lines if (match := re.match(r" *([-\d.e]+) \|", line))]
    assert len(losses) >= 2
    assert max(losses) >= first_loss
    assert min(losses) <= last_loss
    for upper, lower in itertools.pairwise(losses):
        assert is_round(upper - lower)

    (axis,) = [line for line in lines if re.match(r" +\| 0 ", line)]
    steps = [float(word) for word in axis.split()[1:]]
    assert steps[0] == 0
    assert all(is_round(second - first) for first, second in itertools.pairwise(steps))
    assert all(step == int(step) for step in steps)
    assert max(len(line) for line in lines) <= 100


@pytest.mark.parametrize("last_step", [1, 7, 100, 120])
def test_the_first_and_the_last_evaluation_are_drawn(last_step: int) -> None:
    evaluations = [{"step": step, "eval/loss": 5.0 - step / last_step} for step in (0, last_step)]
    drawn = loss_curve(evaluations).split("Legend")[0]
    assert sum(line.partition(" | ")[2].count("o") for line in drawn.splitlines()) == 2


def test_a_run_without_a_loss_is_drawn_without_an_error() -> None:
    assert "step" in loss_curve([{"step": 0, "train/weight_norm": 1.0}])


@pytest.mark.parametrize(("length", "tick"), [(100, 20), (8, 1), (9, 2), (0.03, 0.005), (41, 10)])
def test_the_smallest_round_tick_is_chosen(length: float, tick: float) -> None:
    assert round_tick(length, 8) == pytest.approx(tick)
