"""When two runs differ in a quantity: the definition that `llmtrain verify` and `llmtrain diff` share."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.record.history import History
from llmtrain.record.tolerances import (
    QUANTITIES,
    Deviation,
    deviation,
    relative_difference,
    tolerance_of,
    weight_difference,
)


def history(folder: Path, losses: dict[int, Any]) -> History:
    folder.mkdir()
    (folder / "status.json").write_text("{}")
    lines = [json.dumps({"step": step, "train/loss": loss}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return History.of_run(folder)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({1: 4.0, 2: 2.0}, Deviation(largest=0.0, first_step=None)),
        ({1: 4.0, 2: 1.0}, Deviation(largest=0.5, first_step=2)),
        ({1: 4.0}, Deviation(largest=math.inf, first_step=2)),
        ({1: 4.0, 2: 2.0, 3: 1.0}, Deviation(largest=math.inf, first_step=3)),
        ({1: 4.0, 2: None}, Deviation(largest=math.inf, first_step=2)),
    ],
)
def test_runs_that_must_have_the_same_steps_differ_in_a_value_or_in_a_missing_step(
    losses: dict[int, Any], expected: Deviation, tmp_path: Path
) -> None:
    reference = history(tmp_path / "reference", {1: 4.0, 2: 2.0})
    other = history(tmp_path / "other", losses)
    assert deviation(QUANTITIES["loss"], reference, other) == expected


def test_what_is_no_number_agrees_only_with_itself() -> None:
    assert relative_difference(math.nan, math.nan) == 0
    assert relative_difference(math.nan, 1.0) == math.inf
    assert relative_difference([1, 2], [1, 2]) == 0
    assert relative_difference([1, 2], [2, 1]) == math.inf
    assert relative_difference(0.0, 1e-30) == 1
    assert relative_difference(0, 0.0) == 0


def test_counts_have_no_tolerance_and_an_unknown_precision_has_that_of_half() -> None:
    assert QUANTITIES["target_tokens"].limit(tolerance_of("bf16")) == 0
    assert QUANTITIES["loss"].limit(tolerance_of("no")) == 1e-5
    assert tolerance_of("fp8") == tolerance_of("fp16")


def test_weights_are_compared_by_the_norm_of_their_difference() -> None:
    weights = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    assert weight_difference(weights, weights) == 0
    assert weight_difference(weights, {**weights, "b": torch.tensor([3.0])}) == pytest.approx(1 / 5)
    assert weight_difference(weights, {"a": weights["a"]}) == math.inf
