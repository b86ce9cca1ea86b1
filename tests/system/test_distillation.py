"""An objective with a teacher, written in the tests, has the gradient of plain autograd on any layout."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.forked import run_forked
from tests.launching import PYTHON, torchrun
from tests.system.distillation import global_batch, llama

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def plain_gradient() -> tuple[float, dict[str, torch.Tensor]]:
    """The loss and its gradient by plain autograd, without the package."""
    student = llama(seed=1, layers=2)
    teacher = llama(seed=2, layers=3)
    batch = global_batch()
    is_target = batch["labels"][:, 1:] != -100
    ids = batch["input_ids"][:, :-1]
    log_p = student(ids).logits.log_softmax(-1)[is_target]
    log_q = teacher(ids).logits.log_softmax(-1)[is_target].detach()
    loss = F.kl_div(log_p, log_q, reduction="sum", log_target=True) / is_target.sum()
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in student.named_parameters()}


@pytest.mark.parametrize(
    ("launcher", "environment"),
    [(PYTHON, {}), (torchrun(2), {}), (torchrun(2), FSDP2)],
    ids=["one process", "DDP 2", "FSDP2 2"],
)
def test_the_gradient_of_a_distillation_objective_is_that_of_plain_autograd(
    launcher: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "results.pt"
    script = "tests/system/distillation.py"
    run_forked([*launcher, script, str(file)], env=environment).assert_ok()
    results = torch.load(file)

    loss, expected = plain_gradient()
    assert results["loss"] == pytest.approx(loss, rel=1e-5)
    assert results["gradient"].keys() == expected.keys()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-3
    for name, gradient in expected.items():
        torch.testing.assert_close(
            results["gradient"][name], gradient, rtol=1e-4, atol=1e-6 * largest
        )
    assert 0 <= results["metrics"]["agreement"] < 1
