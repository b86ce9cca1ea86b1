"""What a plan takes from the phases of a few real steps."""

import pytest

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
