"""A plan learns from the phases of a few real steps, and measures the peak of the device."""

import itertools
import json
from pathlib import Path

import pytest
import torch

from llmtrain.lab.plan import calibration


def test_the_seconds_beyond_computing_are_those_of_the_bytes_that_are_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes that add up 1,000 gradients of 4 bytes send 2 (2 - 1) / 2 of them: 4,000.

    Rank 0 computes longer, and rank 1 waits for it when they communicate.
    """
    phases = {
        "forward": [1.0, 0.5],
        "backward": [2.0, 1.5],
        "optimizer": [0.5, 0.5],
        "data": [0.1, 0.1],
        "other": [0.1, 0.05],
        "count": [0.2, 0.9],
        "exchange": [0.1, 0.1],
        "norm": [0.3, 0.5],
    }

    def write_metrics(command: list[str], on_cpu: bool, **_: str) -> None:
        run = Path(command[command.index("--output_dir") + 1])
        run.mkdir()
        (run / "metrics.jsonl").write_text(json.dumps({"step": 12, "phases": phases}) + "\n")

    monkeypatch.setattr(calibration, "run_command", write_metrics)
    monkeypatch.setattr(calibration, "has_too_few_gpus", lambda processes: True)

    compute = calibration.calibrate(
        "recipe.py", [], processes=2, rows=2, precision="no", trained_numel=1000
    )

    assert (compute.forward, compute.backward) == (1.0 / 2, 2.0 / 2)
    assert compute.other == pytest.approx(0.1 + 0.1)
    assert compute.optimizer == pytest.approx(0.5 + 0.3), "the norm of the rank that does not wait"
    assert compute.per_sent_byte == pytest.approx((0.2 + 0.1) / 4000)


@pytest.mark.parametrize(("seconds", "size"), [(0.005, 192), (0.0005, 768)])
def test_the_peak_is_measured_with_matrices_whose_product_takes_a_short_time(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(ticks) * seconds)

    peak = calibration.measured_peak(torch.device("cpu"), torch.float32)

    assert peak == pytest.approx(2 * size**3 / seconds)
