"""Tokens per second count target tokens, and the MFU counts computed positions."""

from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator

from llmtrain import GPT, GPTConfig
from llmtrain.interfaces.callback import StepInfo
from llmtrain.observe import throughput
from llmtrain.observe.throughput import Throughput


@pytest.fixture
def model() -> GPT:
    return GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), 16)


def end_step(measured: Throughput, target_tokens: int, positions: int) -> None:
    batch: Any = SimpleNamespace(positions=positions)
    result: Any = SimpleNamespace(target_tokens=target_tokens)
    measured.on_step_end(batch, result, StepInfo(1, is_last=False, should_stop=False))
    measured.on_step_result(1, result)


def test_pauses_do_not_count_as_training_time(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 3.0, 10.0, 10.0])  # the start, a pause from 1 to 3, and the end
    seconds = 10.0 - (3.0 - 1.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(throughput, "peak_flops", lambda device: 1000.0)

    measured = Throughput(Accelerator(cpu=True), model)
    end_step(measured, target_tokens=30, positions=100)
    with measured.paused():
        pass
    end_step(measured, target_tokens=10, positions=60)

    assert measured.positions == 160
    metrics = measured.read(measured.positions)
    assert metrics["train/tokens_per_second"] == pytest.approx(40 / seconds)
    flops_per_second = 160 / seconds * model.flops_per_token()
    assert metrics["train/mfu"] == pytest.approx(flops_per_second / 1000)
    assert measured.tokens == 0
    assert measured.positions == 0


def test_a_cpu_has_no_mfu(model: GPT) -> None:
    """Its peak is not known: it depends on what else runs on its cores."""
    measured = Throughput(Accelerator(cpu=True), model)
    end_step(measured, target_tokens=30, positions=100)

    metrics = measured.read(measured.positions)

    assert metrics.keys() == {"train/tokens_per_second"}
