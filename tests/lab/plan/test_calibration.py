"""A plan learns from the phases of a few real steps, and measures the peak of the device."""

import itertools

import pytest
import torch

from llmtrain.lab.plan import calibration
from llmtrain.lab.plan.calibration import compute_from_phases
from llmtrain.phase_names import PHASES


def test_time_in_which_a_rank_waits_for_another_one_is_not_computing() -> None:
    """Rank 0 computes longer, and rank 1 waits for it whenever they communicate."""
    seconds_by_phase = {phase: [0.0, 0.0] for phase in PHASES} | {
        "forward": [2.0, 1.0],
        "backward": [4.0, 3.0],
        "optimizer": [0.5, 0.5],
        "data": [0.1, 0.1],
        "other": [0.2, 0.1],
        "count": [0.0, 9.0],
        "exchange": [0.0, 9.0],
        "norm": [0.3, 9.0],
    }

    compute = compute_from_phases(seconds_by_phase, rows=2)

    assert compute.forward == 2.0 / 2
    assert compute.backward == 4.0 / 2
    assert compute.other == pytest.approx(0.1 + 0.2)
    assert compute.optimizer == pytest.approx(0.3 + 0.5), "the norm of the rank that does not wait"
    assert compute.per_sent_byte == 0.0


def test_a_single_process_computes_all_the_time() -> None:
    seconds_by_phase = {name: [0.5] for name in PHASES}

    compute = compute_from_phases(seconds_by_phase, rows=1)

    norm_and_optimizer = 0.5 + 0.5
    assert compute.optimizer == norm_and_optimizer
    data_and_other = 0.5 + 0.5
    assert compute.other == data_and_other


@pytest.mark.parametrize(("seconds", "size"), [(0.005, 192), (0.0005, 768)])
def test_the_peak_is_measured_with_matrices_whose_product_takes_a_short_time(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(ticks) * seconds)

    peak = calibration.measured_peak(torch.device("cpu"), torch.float32)

    assert peak == pytest.approx(2 * size**3 / seconds)
