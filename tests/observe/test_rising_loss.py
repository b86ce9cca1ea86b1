"""A run that diverges is told once, and a healthy run never is."""

import math
import random
from collections.abc import Callable

import pytest

from llmtrain.observe.rising_loss import RisingLoss

STEPS = 300


def events_of(loss_of: Callable[[int], float], logging_steps: int) -> list[str]:
    """Return the events of a run with these losses."""
    rising = RisingLoss(STEPS)
    events = []
    for step in range(1, STEPS + 1):
        loss = loss_of(step)
        if rising.needs_loss_of(step):
            rising.add_first_loss(loss)
        if step % logging_steps == 0:
            events.append(rising.find_new(step, loss))
    return [event for event in events if event]


def pretraining(step: int, draw: random.Random) -> float:
    """Falls, with a spike when the warmup ends."""
    spike = 6.0 if 30 <= step < 60 else 0.0
    return 3 + 4 * math.exp(-step / 50) + spike + draw.gauss(0, 0.1)


def single_rows(step: int, draw: random.Random) -> float:
    """Fine-tuning with one row per step: it does not fall, and rows are easy or hard."""
    return draw.lognormvariate(0.4, 0.7)


def low(step: int, draw: random.Random) -> float:
    """A model that knows the data, and loses a little of them."""
    return 0.05 + min(step / 100, 1) * 0.3 + draw.uniform(0, 0.3)


def dpo(step: int, draw: random.Random) -> float:
    """Begins with log 2, and then varies from batch to batch."""
    return math.log(2) if step == 1 else math.log1p(math.exp(draw.gauss(-0.3, 1.2)))


def ipo(step: int, draw: random.Random) -> float:
    """Begins with 25, and squares the error of the margin."""
    return (5 - draw.gauss(min(step / 60, 4), 2)) ** 2


@pytest.mark.parametrize("logging_steps", [1, 5, 10])
@pytest.mark.parametrize("curve", [pretraining, single_rows, low, dpo, ipo])
def test_a_healthy_run_has_no_event(
    curve: Callable[[int, random.Random], float], logging_steps: int
) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        assert events_of(lambda step: curve(step, draw), logging_steps) == []  # noqa: B023


@pytest.mark.parametrize("logging_steps", [1, 5, 10, STEPS // 5])  # the last has five entries
@pytest.mark.parametrize("first", [0.69, 6.9, 25.0])
def test_a_run_whose_loss_stays_above_its_start_has_one_event(
    first: float, logging_steps: int
) -> None:
    """Also if it rises before the first log entry, or with an entry that is not finite."""

    def loss_of(step: int) -> float:
        return math.inf if step == 200 else first * (1 if step <= 5 else 5) + step % 5 / 10

    [event] = events_of(loss_of, logging_steps)
    assert f"above its start, {first + 0.4:.4g}, since step" in event
