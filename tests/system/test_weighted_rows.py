"""A loss whose denominator is a sum of weights is that of a plain loop, on any layout."""

from pathlib import Path

import torch
from torch.nn import functional as F

from tests.forked import run_forked
from tests.launching import PYTHON, torchrun
from tests.system.weighted_rows import Bigrams, global_batch, weights_of_targets


def plain_step() -> dict[str, torch.Tensor]:
    """Return the results of a step that plain torch makes in float64, row by row."""
    model = Bigrams().double()
    batch = global_batch()
    weights = weights_of_targets(batch).double()
    loss_sum = torch.zeros((), dtype=torch.float64)
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        logits = model(ids[:-1])
        nll = F.cross_entropy(logits, labels[1:], reduction="none")
        loss_sum = loss_sum + (nll * weights[row]).sum()

    loss = loss_sum / weights.sum()
    loss.backward()
    stepped = [(p.detach() - p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return {"loss": loss.detach(), "weights": torch.cat(stepped), "denominator": weights.sum()}


def test_the_step_of_weighted_rows_is_that_of_a_plain_loop_on_any_layout(tmp_path: Path) -> None:
    expected = plain_step()
    bitwise = []
    for processes, launcher in {1: PYTHON, 2: torchrun(2), 4: torchrun(4)}.items():
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_forked([*launcher, "tests/system/weighted_rows.py", str(folder)]).assert_ok()

        replicated = torch.load(folder / "replicated.pt")
        bitwise.append(torch.load(folder / "bitwise.pt"))
        for name, value in expected.items():
            torch.testing.assert_close(replicated[name].double(), value, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(bitwise[-1][name].double(), value, rtol=1e-5, atol=1e-6)
            assert torch.equal(bitwise[-1][name], bitwise[0][name]), name
