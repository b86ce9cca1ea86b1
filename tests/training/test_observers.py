"""What the observers of the loop say, and when."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Update
from llmtrain.training.observers import Readings


class Preferring(nn.Linear):
    """A model of preferences whose rewards the test sets."""

    takes_reference = True

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.rewards = 0.0, 0.0

    def units(self, batch: Any) -> torch.Tensor:
        raise NotImplementedError

    def measured(self) -> torch.Tensor:
        raise NotImplementedError

    def readings(self, sums: Sequence[float]) -> dict[str, float]:
        chosen, rejected = self.rewards
        return {"rewards/chosen": chosen, "rewards/rejected": rejected}


def events_of(rewards: list[tuple[float, float]]) -> list[int]:
    """Return the log entries, counted from 1, at which the event was recorded."""
    model = Preferring()
    events: list[int] = []
    entry = 0
    run: Any = SimpleNamespace(
        accelerator=Accelerator(cpu=True),
        settings=SimpleNamespace(loop=None),
        incident=lambda kind, text: events.append(entry),
    )
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])
    training: Any = SimpleNamespace(run=run, model=model, optimizer=optimizer)
    readings = Readings(training)
    window: Any = SimpleNamespace(content=torch.zeros(2, dtype=torch.int64))
    update = Update(
        nll=torch.zeros(()),
        tokens=1,
        grad_norm=1.0,
        stop=False,
        units=1,
        measured=torch.zeros(1),
    )
    for pair in rewards:
        entry += 1
        model.rewards = pair
        readings._metrics(window, update)
    return events


DISPLACED = (-0.3, -0.9)  # both below the reference model, rejected answers further


def test_displaced_answers_are_an_event_after_five_log_entries_once() -> None:
    assert events_of([DISPLACED] * 4) == []
    assert events_of([DISPLACED] * 20) == [5]


@pytest.mark.parametrize(
    "rewards",
    [
        [(-0.001, -0.002)] * 20,
        [DISPLACED, DISPLACED, (0.1, -0.9)] * 7,
        [(-0.3, -0.1)] * 20,
        [(0.3, -0.9)] * 20,
        [(-0.3, 0.0)] * 20,
    ],
    ids=[
        "noise around zero",
        "no five entries in a row",
        "rejected answers have fallen less",
        "chosen answers have become more likely",
        "rejected answers have not fallen",
    ],
)
def test_answers_that_are_not_displaced_are_no_event(rewards: list[tuple[float, float]]) -> None:
    assert events_of(rewards) == []


def test_a_healthy_start_does_not_hide_a_later_displacement() -> None:
    assert events_of([(0.1, -0.1)] * 9 + [DISPLACED] * 9) == [14]
