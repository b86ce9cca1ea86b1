"""What a plan takes from the phases of a few real steps, and the peak that it measures."""

import itertools

import pytest
import torch

from llmtrain.lab.plan import calibration
from llmtrain.lab.plan.calibration import compute_from_phases
from llmtrain.phase_names import PHASES

STEP = {phase: [0.0, 0.0] for phase in PHASES}


def test_waiting_for_other_processes_is_no_computing() -> None:
    """Rank 0 computes longer, and rank 1 waits for it in every meeting."""
    phases = STEP | {
        "forward": [2.0, 1.0],
        "backward": [4.0, 3.0],
        "optimizer": [0.5, 0.5],
        "data": [0.1, 0.1],
        "other": [0.2, 0.1],
    }
    waiting = phases | {"count": [0.0, 9.0], "exchange": [0.0, 9.0], "norm": [0.3, 9.0]}
    compute = compute_from_phases(waiting, rows=2)
    assert (compute.forward, compute.backward) == (1.0, 2.0)
    assert compute.other == pytest.approx(0.3)
    assert compute.optimizer == pytest.approx(0.8), "the norm takes 0.3 where nobody is waited for"
    assert compute.per_sent_byte == 0.0


def test_one_process_computes_all_the_time() -> None:
    phases = {name: [0.5] for name in PHASES}
    compute = compute_from_phases(phases, rows=1)
    assert compute.optimizer == 1.0, "the norm and the optimizer"
    assert compute.other == 1.0, "loading data and all else"


@pytest.mark.parametrize(("seconds", "size"), [(0.005, 192), (0.0005, 768)])
def test_the_peak_is_of_a_product_that_takes_no_long_time(
    seconds: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    monkeypatch.setattr(calibration.time, "perf_counter", lambda: next(clock) * seconds)
    peak = calibration.measured_peak(torch.device("cpu"), torch.float32)
    assert peak == pytest.approx(2 * size**3 / seconds)
