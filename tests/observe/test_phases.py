"""The seconds of each phase of a step are added up."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain import phases
from llmtrain.phases import Phases

CPU = torch.device("cpu")
FORWARD_SECONDS = 4.0


class FakeClock:
    """Replaces the clock of the phases. The test advances it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(phases.Clock, "now", lambda self: phases.Mark(clock.seconds, None))
    return clock


class SlowLinear(nn.Linear):
    """A layer whose forward pass takes some time."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(2, 2)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.clock.advance(FORWARD_SECONDS)
        return super().forward(x)


def make_step(
    watched: Phases, model: nn.Module, clock: FakeClock, seconds: dict[str, float]
) -> None:
    """Go through the phases of a step as the training loop does.

    Args:
        watched: the phases.
        model: the model, whose hooks begin the phases of its passes.
        clock: the clock.
        seconds: the seconds that each phase takes, except for the forward pass.
    """
    watched.begin("data")
    clock.advance(seconds["data"])

    watched.begin("count", watched.step)
    clock.advance(seconds["count"])

    loss = model(torch.ones(1, 2)).sum()
    clock.advance(seconds["backward"])
    loss.backward()

    watched.begin("norm")
    clock.advance(seconds["norm"] / 2)

    watched.begin("optimizer")
    clock.advance(seconds["optimizer"])

    # The host reads the numbers of the previous step, which is part of the same phase.
    watched.begin("norm")
    clock.advance(seconds["norm"] / 2)

    watched.begin("other", watched.step + 1)
    clock.advance(seconds["other"])


def test_the_mean_seconds_of_each_phase_leave_out_the_first_step_and_saves(
    clock: FakeClock,
) -> None:
    model = SlowLinear(clock)
    watched = Phases(CPU, model)
    seconds = {
        "data": 1.0,
        "count": 2.0,
        "backward": 8.0,
        "norm": 64.0,
        "optimizer": 16.0,
        "other": 32.0,
    }

    with watched.watching(first_step=5):
        watched.begin("other", 5)
        # The last phase of the first step ends when the second step begins, so that it counts.
        first_step = dict.fromkeys(seconds, 100.0) | {"other": 0.0}
        make_step(watched, model, clock, first_step)
        assert not watched.has_dropped_first_step
        for factor in (1, 3):
            longer = {phase: factor * value for phase, value in seconds.items()}
            make_step(watched, model, clock, longer)
    watched.begin("a save")
    clock.advance(1000)
    watched.begin("data")

    assert watched.has_dropped_first_step
    means = {phase: 2 * value for phase, value in seconds.items()}
    assert watched.read() == {**means, "forward": FORWARD_SECONDS, "exchange": 0.0}
    assert watched.read()["data"] == 0.0, "reading starts a new mean"
    assert watched.step == 5 + 3


def test_only_a_pass_with_gradients_in_a_step_begins_its_phases(clock: FakeClock) -> None:
    model = SlowLinear(clock)
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


class FakeDDP(DistributedDataParallel):
    """Has the attributes of DDP, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def test_the_exchange_begins_with_the_last_gradient_of_a_backward_that_syncs(
    clock: FakeClock,
) -> None:
    model = FakeDDP(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: clock.advance(1.0))
    watched = Phases(CPU, model)
    starts: list[phases.PhaseStart] = []
    watched.recording = starts

    with watched.watching():
        for step in range(2):
            for sync in (False, True):
                model.require_backward_grad_sync = sync
                watched.begin("count", step)
                model(torch.ones(1, 2)).sum().backward()
                watched.begin("norm")
    watched.recording = None
    watched.begin("other")

    without_sync = ["count", "forward", "backward", "norm"]
    with_sync = ["count", "forward", "backward", "exchange", "norm"]
    assert [start.phase for start in starts] == (without_sync + with_sync) * 2
    backward, exchange, _ = starts[-3:]
    assert exchange.mark.host - backward.mark.host == 4.0, "of four parameters"
