"""The peak of a device, as a plan measures it."""

import itertools

import pytest
import torch

from llmtrain.lab.plan import peak as measurement


@pytest.mark.parametrize(("seconds", "size"), [(0.005, 192), (0.0005, 768)])
def test_the_peak_is_of_a_product_that_takes_no_long_time(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(measurement.time, "perf_counter", lambda: next(clock) * seconds)
    peak = measurement.measured_peak(torch.device("cpu"), torch.float32)
    assert peak == pytest.approx(2 * size**3 / seconds)
