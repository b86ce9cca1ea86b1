"""A loss whose denominator is a sum of weights is that of a plain loop, on any layout."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from tests.forked import run_forked
from tests.launching import PYTHON, torchrun
from tests.system.weighted_rows import Bigrams, global_batch, weights_of_targets

SCRIPT = "tests/system/weighted_rows.py"


def plain_step() -> dict[str, torch.Tensor]:
    """Return the results of a step that plain torch makes in float64, row by row."""
    model = Bigrams().double()
    batch = global_batch()
    weights = weights_of_targets(batch).double()
    loss_sum = torch.zeros((), dtype=torch.float64)
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        logits = model.head(model.embedding(ids[:-1]))
        nll = F.cross_entropy(logits, labels[1:], reduction="none")
        loss_sum = loss_sum + (nll * weights[row]).sum()

    loss = loss_sum / weights.sum()
    loss.backward()
    stepped = [(p.detach() - p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return {"loss": loss.detach(), "weights": torch.cat(stepped), "denominator": weights.sum()}


def trained(path: Path, launcher: list[str], *flags: str) -> dict[str, torch.Tensor]:
    run_forked([*launcher, SCRIPT, str(path), *flags]).assert_ok()
    results: dict[str, torch.Tensor] = torch.load(path)
    return results


@pytest.mark.parametrize("launcher", [PYTHON, torchrun(2)], ids=["one process", "DDP 2"])
def test_the_step_of_weighted_rows_is_that_of_a_plain_loop(
    launcher: list[str], tmp_path: Path
) -> None:
    results = trained(tmp_path / "results.pt", launcher)

    for name, expected in plain_step().items():
        torch.testing.assert_close(results[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_the_step_of_weighted_rows_has_the_same_bits_on_any_layout(tmp_path: Path) -> None:
    results = [
        trained(tmp_path / f"{count}.pt", launcher, "--bitwise")
        for count, launcher in [(1, PYTHON), (2, torchrun(2)), (4, torchrun(4))]
    ]

    for name, expected in plain_step().items():
        torch.testing.assert_close(results[0][name].double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(results[1][name], results[0][name]), name
        assert torch.equal(results[2][name], results[0][name]), name
