"""A run that diverges is told once, and a healthy run never is."""

import math
import random
import statistics
from collections.abc import Callable

import pytest

from llmtrain.observe.rising_loss import RisingLoss

STEPS = 300


def events_of(
    loss_of: Callable[[int], float], logging_steps: int, eval_loss: float | None = None
) -> list[str]:
    """Return the events of a run with these losses, and this eval loss before its first step."""
    rising = RisingLoss(STEPS)
    events = []
    if eval_loss is not None:
        rising.add_entry(0, {"eval/loss": eval_loss})
    for step in range(1, STEPS + 1):
        loss = loss_of(step)
        if step % logging_steps == 0:
            events.append(rising.add_entry(step, {"train/loss": loss}))
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
@pytest.mark.parametrize("has_evaluations", [True, False])
def test_a_healthy_run_has_no_event(
    curve: Callable[[int, random.Random], float], logging_steps: int, has_evaluations: bool
) -> None:
    for seed in range(50):
        draw = random.Random(seed)
        eval_loss = None
        if has_evaluations:
            eval_loss = statistics.fmean(curve(1, draw) for _ in range(100))
        assert events_of(lambda step: curve(step, draw), logging_steps, eval_loss) == []  # noqa: B023


@pytest.mark.parametrize("logging_steps", [1, 5, 10, STEPS // 5])  # the last has five entries
@pytest.mark.parametrize("first", [0.69, 6.9, 25.0])
def test_a_run_whose_loss_stays_above_its_start_has_one_event(
    first: float, logging_steps: int
) -> None:
    """Also if it rises before the first log entry, or with an entry that is not finite."""

    def loss_of(step: int) -> float:
        return math.inf if step == 200 else first * 5 + step % 5 / 10

    [event] = events_of(loss_of, logging_steps, eval_loss=first)
    assert f"above its start, {first:.4g}, since step" in event


@pytest.mark.parametrize("logging_steps", [1, 5, 10])
def test_without_evaluations_the_first_five_entries_are_the_start(logging_steps: int) -> None:
    def loss_of(step: int) -> float:
        return 2.0 + step / 1000 if step <= 5 * logging_steps else 9.0

    [event] = events_of(loss_of, logging_steps)
    start = loss_of(5 * logging_steps)
    assert f"above its start, {start:.4g}, since step {6 * logging_steps};" in event
