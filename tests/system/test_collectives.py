"""DDP reduces the gradients of a step once, during the backward pass of its last micro-batch."""

from pathlib import Path
from typing import Any

from tests.forked import run_forked
from tests.launching import long_form, read_json, torchrun

PROGRAM = "tests/system/collectives.py"


def count_reductions(folder: Path, *options: str) -> dict[str, Any]:
    """Make three steps of three micro-batches on two ranks, and count the buckets that are reduced.

    Returns:
        ``buckets``: how many buckets DDP has. ``steps``: for each step, the number of buckets that
        were reduced in each micro-batch.
    """
    counts_file = folder / "counts.json"
    run_forked([*torchrun(2), PROGRAM, str(counts_file), *options]).assert_ok()
    counts: dict[str, Any] = read_json(counts_file)
    assert len(counts["steps"]) == 3
    return counts


def test_gradients_are_reduced_once_a_step_in_its_last_micro_batch(tmp_path: Path) -> None:
    counts = count_reductions(tmp_path)

    assert counts["buckets"] >= 1
    assert counts["steps"] == [[0, 0, counts["buckets"]]] * 3


@long_form
def test_the_count_would_show_a_reduction_in_every_micro_batch(tmp_path: Path) -> None:
    counts = count_reductions(tmp_path, "sync_every_micro_batch")

    assert all(first > 0 for first, _, _ in counts["steps"])
