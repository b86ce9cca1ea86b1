"""What `llmtrain diff` calls rounding, and when it expects the same bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lab.diff import RunDifference, diff_lines, diff_runs
from llmtrain.lab.identity import may_bits_differ, tolerance_between
from llmtrain.record.history import History
from llmtrain.record.tolerances import tolerance_of
from tests.lab.seed_runs import write_run
from tests.launching import read_json

START = {
    "device": "cpu",
    "host": "node",
    "processes": 1,
    "threads": 1,
    "versions": {"torch": "2"},
    "mixed_precision": "no",
}


def history(
    folder: Path, losses: dict[int, float], *starts: dict[str, Any], **settings: Any
) -> History:
    """Return a run with these losses, whose starts differ from ``START`` in these keys."""
    write_run(folder, 0, dict(losses), **settings)
    record = read_json(folder / "run.json")
    record["starts"] = [{"step": 0, **START, **start} for start in starts or ({},)]
    (folder / "run.json").write_text(json.dumps(record))
    return History.of_run(folder)


def compared(tmp_path: Path, relative: dict[int, float]) -> RunDifference:
    """Compare a run with one on two processes, whose losses are off by these factors."""
    a = history(tmp_path / "a", dict.fromkeys(relative, 2.0))
    losses = {step: 2.0 * (1 - off) for step, off in relative.items()}
    b = history(tmp_path / "b", losses, {"processes": 2})
    return diff_runs(a, b)


def test_nothing_above_the_tolerance_is_called_rounding(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {1: 1e-6, 2: 1e-5, 3: 1.2e-5, 4: 2e-5, 5: 0.5})
    text = "\n".join(diff_lines(comparison, "a", "b"))
    assert comparison.first is not None, text
    assert comparison.first.step == 3
    assert "differs   at step 3: loss" in text
    assert "rounding explains" not in text
    # The layout may be the cause of a difference that has grown slowly.
    assert comparison.causes == [
        "processes: 1 and 2",
        "rounding errors may have grown: at the log entry before, the runs agree within 1e-05",
    ]


def test_a_jump_has_not_grown_from_rounding(tmp_path: Path) -> None:
    comparison = compared(tmp_path, {1: 1e-6, 2: 1e-6, 3: 0.5})
    assert comparison.first is not None
    assert comparison.first.step == 3
    assert comparison.other_differences == ["processes: 1 and 2"]
    assert not any("rounding" in cause for cause in comparison.causes)


def test_a_setting_is_named_once(tmp_path: Path) -> None:
    a = history(tmp_path / "a", {1: 2.0}, tokenizer="byte")
    b = history(tmp_path / "b", {1: 1.0}, tokenizer="char")
    text = "\n".join(diff_lines(diff_runs(a, b), "a", "b"))
    assert text.count("--tokenizer byte and char") == 1, text


@pytest.mark.parametrize(
    ("settings", "changed", "start", "may_differ"),
    [
        ({}, {}, {}, False),
        ({}, {"ddp_timeout": 60, "learning_rate": 0.5}, {}, False),
        ({}, {"per_device_train_batch_size": 2}, {}, True),
        ({}, {"ddp_bucket_cap_mb": 1.0}, {}, True),
        ({}, {}, {"processes": 2}, True),
        ({}, {}, {"threads": 2}, True),
        ({}, {}, {"host": "another"}, True),
        ({}, {}, {"mixed_precision": "bf16"}, True),
        ({"bitwise": True}, {}, {"processes": 2}, False),
        ({"bitwise": True}, {}, {"threads": 2}, True),
        ({"bitwise": True}, {"per_device_train_batch_size": 2}, {}, True),
        ({}, {"bitwise": True}, {}, True),
    ],
)
def test_bits_may_differ_with_the_layout_and_with_bitwise_with_less(
    settings: dict[str, Any],
    changed: dict[str, Any],
    start: dict[str, Any],
    may_differ: bool,
    tmp_path: Path,
) -> None:
    a = history(tmp_path / "a", {1: 2.0}, **settings)
    b = history(tmp_path / "b", {1: 2.0}, {}, start, **(settings | changed))
    assert may_bits_differ(a, b) == may_bits_differ(b, a) == may_differ


def test_a_run_that_went_on_in_a_lower_precision_is_compared_with_its_tolerance(
    tmp_path: Path,
) -> None:
    a = history(tmp_path / "a", {1: 2.0})
    b = history(tmp_path / "b", {1: 2.0}, {}, {"mixed_precision": "bf16"})
    assert tolerance_between(a, b) == tolerance_between(b, a) == tolerance_of("bf16")


def test_a_gpu_repeats_its_bits_only_with_bitwise(tmp_path: Path) -> None:
    gpu = {"device": "cuda"}
    plain = [history(tmp_path / name, {1: 2.0}, gpu) for name in ("a", "b")]
    exact = [history(tmp_path / name, {1: 2.0}, gpu, bitwise=True) for name in ("c", "d")]
    assert may_bits_differ(*plain)
    assert not may_bits_differ(*exact)
