"""Tokens a second count what is trained; the share of the peak counts what is computed."""

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig
from llmtrain.interfaces.callback import StepInfo
from llmtrain.observe import throughput
from llmtrain.observe.throughput import Throughput


def add(counted: Throughput, tokens: int, positions: int) -> None:
    """Count a step."""
    batch: Any = SimpleNamespace(positions=positions)
    result: Any = SimpleNamespace(target_tokens=tokens)
    counted.on_step_end(batch, result, StepInfo(1, is_last=False, should_stop=False))
    counted.on_step_result(1, result)


def test_speed_is_of_trained_tokens_and_the_share_of_computed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter([0.0, 1.0, 3.0, 10.0, 10.0])  # made at 0, paused from 1 to 3, read at 10
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(throughput, "peak_flops", lambda _: 1000.0)
    model = GPT(GPTConfig(1, 1, 8, 8), 16)
    counted = Throughput(Accelerator(cpu=True), model)
    add(counted, tokens=30, positions=100)
    with counted.paused():
        pass
    add(counted, tokens=10, positions=60)
    assert counted.positions == 160
    assert counted.read(counted.positions) == {
        "train/tokens_per_second": pytest.approx(40 / 8),
        "train/mfu": pytest.approx(160 / 8 * model.flops_per_token() / 1000),
    }
    assert (counted.tokens, counted.positions) == (0, 0)


def test_the_peak_of_a_cpu_is_not_known_so_there_is_no_share_of_it() -> None:
    """What a CPU reaches depends on what else runs on its cores."""
    counted = Throughput(Accelerator(cpu=True), GPT(GPTConfig(1, 1, 8, 8), 16))
    add(counted, tokens=30, positions=100)
    assert counted.read(counted.positions).keys() == {"train/tokens_per_second"}
