"""The difference between two runs, as `llmtrain verify` and `llmtrain diff` measure it."""

import json
import math
from pathlib import Path

import pytest
import torch

from llmtrain.commands.trial import Deviation, deviation, weight_difference
from llmtrain.record.history import History
from llmtrain.record.tolerances import QUANTITIES, relative_difference, tolerance_of


def history(folder: Path, losses: dict[int, float | None]) -> History:
    """Write a run folder with these losses by step, and read it."""
    folder.mkdir()
    (folder / "status.json").write_text("{}")
    lines = [json.dumps({"step": step, "train/loss": loss}) for step, loss in losses.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return History.of_run(folder)


@pytest.mark.parametrize(
    ("losses", "largest", "first_step"),
    [
        pytest.param({1: 4.0, 2: 2.0}, 0.0, None, id="equal"),
        pytest.param({1: 4.0, 2: 1.0}, 0.5, 2, id="another loss"),
        pytest.param({1: 4.0}, math.inf, 2, id="missing step"),
        pytest.param({1: 4.0, 2: 2.0, 3: 1.0}, math.inf, 3, id="additional step"),
        pytest.param({1: 4.0, 2: None}, math.inf, 2, id="not finite"),
    ],
)
def test_the_deviation_of_a_run_covers_values_and_missing_steps(
    losses: dict[int, float | None], largest: float, first_step: int | None, tmp_path: Path
) -> None:
    reference = history(tmp_path / "reference", {1: 4.0, 2: 2.0})
    other = history(tmp_path / "other", losses)

    measured = deviation(QUANTITIES["loss"], reference, other)

    assert measured == Deviation(largest=largest, first_step=first_step)


def test_values_other_than_numbers_agree_only_with_themselves() -> None:
    assert relative_difference(math.nan, math.nan) == 0
    assert relative_difference(math.nan, 1.0) == math.inf
    assert relative_difference([1, 2], [2, 1]) == math.inf
    assert relative_difference(0.0, 1e-30) == 1, "zero and a tiny number"


def test_losses_have_tolerances_and_counts_have_none() -> None:
    exact = tolerance_of("no")

    assert QUANTITIES["target_tokens"].limit(exact) == 0
    assert QUANTITIES["loss"].limit(exact) > 0
    assert tolerance_of("no", {"optim": "adamw_torch_8bit"}).loss > exact.loss


def test_weights_differ_by_the_relative_norm_of_their_difference() -> None:
    weights = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    changed = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([3.0])}

    assert weight_difference(weights, weights) == 0
    # The norm of the weights is 5, and that of the difference is 1.
    assert weight_difference(weights, changed) == pytest.approx(1 / 5)
    assert weight_difference(weights, {"a": weights["a"]}) == math.inf
