"""Where the time goes: what is added up, and who is named."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.observe import phases
from llmtrain.observe.phases import Phases, find_straggler
from llmtrain.phase_names import OWN_PHASES, PHASES

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
    watched.begin("optimizer")
    clock[0] += seconds["optimizer"] / 2
    watched.begin("norm")
    clock[0] += seconds["norm"]
    watched.begin("optimizer")
    clock[0] += seconds["optimizer"] / 2
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
        for factor in (1, 3):
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
    assert watched.step == 2


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
    seen: list[str] = []
    watched.on_change.append(lambda phase, mark: seen.append(phase))
    with watched.watching():
        for step in range(2):
            for sync in (False, True):
                model.require_backward_grad_sync = sync
                watched.begin("count", step)
                model(torch.ones(1, 2)).sum().backward()
                watched.begin("norm")
    passes = ["count", "forward", "backward"]
    assert seen == [*passes, "norm", *passes, "exchange", "norm"] * 2


def test_the_first_update_does_not_count_and_names_nobody(clock: list[float]) -> None:
    watched = Phases(CPU, nn.Linear(2, 2))
    late, other = readings([1.0, 1.0], data=[0.0, 9.0]), readings([1.0, 1.0], data=[9.0, 0.0])
    for seconds in (10, 1):
        for phase in ("data", "count", "optimizer"):
            watched.begin(phase)
        clock[0] += seconds
        watched.begin("other")
        if seconds == 10:
            assert watched.new_straggler(late) is None
            watched.drop_first_step()
    assert watched.read()["optimizer"] == 1.0
    assert watched.new_straggler(other) is None, "once may be chance"
    named = [watched.new_straggler(late) for _ in range(4)]
    assert [found is not None for found in named] == [False, True, False, False], (
        "twice in a row, and said once"
    )


def readings(each: list[float], **other: list[float]) -> dict[str, list[float]]:
    """Every rank takes ``each`` in every phase of its own, and waits for nothing."""
    return {
        **{phase: each if phase in OWN_PHASES else [0.0] * len(each) for phase in PHASES},
        **other,
    }


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
@pytest.mark.parametrize("phase", OWN_PHASES)
def test_a_process_that_takes_longer_is_named_with_its_phase(rank: int, phase: str) -> None:
    ranks = [1.0] * 4
    ranks[rank] = 4.0
    waiting = [3.0] * 4
    waiting[rank] = 0.0
    late = find_straggler(readings([1.0] * 4, **{phase: ranks, "exchange": waiting}))
    assert late is not None
    assert (late.rank, late.phase, late.seconds, late.share) == (rank, phase, 3.0, 3 / 8)
    assert str(late).startswith(
        f"rank {rank} takes 3000.0 ms longer per step than the others, most of it in {PHASES[phase]}"
    )


def test_who_waits_is_not_named_nor_a_small_difference_nor_one_that_is_alone() -> None:
    assert find_straggler(readings([1.0, 1.0], exchange=[5.0, 0.0])) is None
    assert find_straggler(readings([1.0, 1.0], data=[1.0, 2.0])) is None, (
        "less than a fifth of the update"
    )
    assert find_straggler(readings([1.0], data=[9.0])) is None
