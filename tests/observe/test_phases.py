"""Where the time goes: what is added up."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain import phases
from llmtrain.phases import Phases

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which the test moves on."""
    now = [0.0]
    monkeypatch.setattr(phases.Clock, "now", lambda self: phases.Mark(now[0], None))
    return now


def one_update(
    watched: Phases, model: nn.Module, clock: list[float], seconds: dict[str, float]
) -> None:
    watched.begin("data")
    clock[0] += seconds["data"]
    watched.begin("count", watched.step)
    clock[0] += seconds["count"]
    loss = model(torch.ones(1, 2)).sum()  # its hooks are told the time at which it begins and ends
    clock[0] += seconds["backward"]
    loss.backward()
    watched.begin("norm")
    clock[0] += seconds["norm"] / 2
    watched.begin("optimizer")
    clock[0] += seconds["optimizer"]
    watched.begin("norm")  # the numbers of the step before are read
    clock[0] += seconds["norm"] / 2
    watched.begin("other", watched.step + 1)
    clock[0] += seconds["other"]


class Slow(nn.Linear):
    def __init__(self, clock: list[float]) -> None:
        super().__init__(2, 2)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock[0] += 4
        return super().forward(x)


def test_each_phase_is_given_its_own_seconds_and_a_mean_is_taken_over_updates(
    clock: list[float],
) -> None:
    model = Slow(clock)
    watched = Phases(CPU, model)
    seconds = {
        "data": 1.0,
        "count": 2.0,
        "backward": 8.0,
        "norm": 64.0,
        "optimizer": 16.0,
        "other": 32.0,
    }
    with watched.watching():
        for factor in (0, 1, 3):  # the first step is not part of the mean
            longer = {name: value * factor for name, value in seconds.items()}
            one_update(watched, model, clock, longer)
    watched.begin("a save")
    clock[0] += 1000
    watched.begin("data")
    assert watched.read() == {
        **{name: 2 * value for name, value in seconds.items()},
        "forward": 4.0,
        "exchange": 0.0,
    }
    assert watched.read()["data"] == 0.0, "after it was read, it begins anew"
    assert watched.step == 3


def test_a_pass_outside_an_update_is_not_one_of_its_phases(clock: list[float]) -> None:
    model = Slow(clock)
    watched = Phases(CPU, model)
    with watched.watching():
        watched.begin("the warm-up")
        model(torch.ones(1, 2)).sum().backward()
        assert watched.phase == "the warm-up"
        watched.begin("count")
        with torch.no_grad():
            model(torch.ones(1, 2))
        assert watched.phase == "count"
        model(torch.ones(1, 2))
        assert watched.phase == "backward"


class Replicated(DistributedDataParallel):
    """A model that says what DDP says, in one process without a group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_the_wait_for_the_others_begins_with_the_last_gradient(clock: list[float]) -> None:
    model = Replicated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    watched = Phases(CPU, model)
    starts = watched.record()
    with watched.watching():
        for step in range(2):
            for sync in (False, True):
                model.require_backward_grad_sync = sync
                watched.begin("count", step)
                model(torch.ones(1, 2)).sum().backward()
                watched.begin("norm")
    passes = ["count", "forward", "backward"]
    seen = [start.phase for start in starts]
    assert seen == [*passes, "norm", *passes, "exchange", "norm"] * 2


def test_the_first_step_of_a_start_does_not_count(clock: list[float]) -> None:
    watched = Phases(CPU, nn.Linear(2, 2))
    with watched.watching(first_step=5):
        for step, seconds in ((5, 10), (6, 1)):
            for phase in ("data", "count", "optimizer"):
                watched.begin(phase)
            assert watched.has_dropped_first_step == (step > 5)
            clock[0] += seconds
            watched.begin("other", step + 1)
        assert watched.read()["optimizer"] == 1.0


def test_a_recording_has_the_phases_between_its_begin_and_its_end() -> None:
    watched = Phases(CPU, nn.Linear(2, 2))
    watched.begin("data")
    starts = watched.record()
    watched.begin("count")
    watched.begin("norm")
    watched.stop_recording()
    watched.begin("other")
    assert [start.phase for start in starts] == ["count", "norm"]
