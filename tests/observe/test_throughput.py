"""Tokens per second count target tokens; the share of the peak counts computed positions."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig
from llmtrain.interfaces.callback import StepInfo
from llmtrain.observe import throughput
from llmtrain.observe.throughput import Throughput

INFO = StepInfo(1, is_last=False, should_stop=False)


class Clock:
    """A clock that stands still until a test sets it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(throughput, "peak_flops", lambda _: 1000.0)
    return clock


def end_step(counter: Throughput, positions: int) -> None:
    batch: Any = SimpleNamespace(positions=positions)
    result: Any = None
    counter.on_step_end(batch, result, INFO)


def take_result(counter: Throughput, tokens: int) -> None:
    result: Any = SimpleNamespace(target_tokens=tokens)
    counter.on_step_result(1, result)


def on_device(device: str, model: GPT) -> Throughput:
    accelerator: Any = SimpleNamespace(device=torch.device(device))
    return Throughput(accelerator, model)


def test_speed_is_of_target_tokens_and_the_share_of_computed_positions(clock: Clock) -> None:
    model = GPT(GPTConfig(1, 1, 8, 8), 16)
    counter = on_device("cpu", model)
    clock.seconds = 1
    end_step(counter, positions=100)
    take_result(counter, tokens=30)
    with counter.paused():
        clock.seconds = 3
    clock.seconds = 10
    end_step(counter, positions=60)
    take_result(counter, tokens=10)

    assert counter.positions == 160
    assert counter.read(counter.positions) == {
        "train/tokens_per_second": pytest.approx(40 / 8),
        "train/mfu": pytest.approx(160 / 8 * model.flops_per_token() / 1000),
    }
    assert (counter.tokens, counter.positions) == (0, 0)


@pytest.mark.parametrize(
    ("device", "speed"),
    [
        pytest.param("cpu", 30 / 2, id="a CPU has computed a step when it ends"),
        pytest.param("cuda", 30 / 3, id="a GPU has when its numbers arrive"),
    ],
)
def test_the_time_of_a_step_ends_when_it_is_computed(
    clock: Clock, device: str, speed: float
) -> None:
    counter = on_device(device, GPT(GPTConfig(1, 1, 8, 8), 16))
    for start in (0, 3):
        clock.seconds = start + 2
        end_step(counter, positions=1)
        clock.seconds = start + 3
        take_result(counter, tokens=30)
        metrics = counter.read(counter.positions)
        if start == 0:
            assert metrics["train/tokens_per_second"] == pytest.approx(speed)

    # Between the ends of two steps there are 3 seconds on both.
    assert metrics["train/tokens_per_second"] == pytest.approx(30 / 3)


def test_the_peak_of_a_cpu_is_not_known_so_there_is_no_share_of_it() -> None:
    """The speed that a CPU reaches depends on what else runs on its cores."""
    counter = Throughput(Accelerator(cpu=True), GPT(GPTConfig(1, 1, 8, 8), 16))
    end_step(counter, positions=100)
    take_result(counter, tokens=30)
    assert counter.read(counter.positions).keys() == {"train/tokens_per_second"}
