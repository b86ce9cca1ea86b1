"""How ranks exchange gradients: watching changes no bit, and a resume adds them as before."""

from pathlib import Path

from tests.forked import run_forked
from tests.launching import read_json, torchrun


def test_how_three_ranks_exchange_gradients(tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    run_forked([*torchrun(3), "tests/system/exchange_ranks.py", str(path)]).assert_ok()
    comparison = read_json(path)

    assert comparison["has_same_bits_if_watched"]

    # On two processes, a + b = b + a would hide the difference.
    assert comparison["has_same_bits_if_restarted"]
    assert not comparison["has_same_bits_without_rebuilding"]

    # Once a step, in its last micro-batch.
    counts = comparison["reductions"]
    assert [count > 0 for count in counts] == [False, False, True] * 3
    assert all(comparison["reductions_without_no_sync"]), "the counts would show a missing no_sync"
