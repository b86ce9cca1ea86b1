"""What every engine promises, on one process."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator

import llmtrain as lt
from llmtrain.interfaces.batches import Batch
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from tests.engines import engine_of, split


def test_a_pass_without_gradients_leaves_the_random_numbers_of_training_as_they_were(
    accelerator: Accelerator,
) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), vocab_size=30)
    ids = torch.randint(30, (4, 9))
    batches = split({"input_ids": ids, "labels": ids}, micro_batch=2)

    def draw(model: Any, batch: Batch) -> torch.Tensor:
        return torch.rand(3)

    torch.manual_seed(7)
    expected = torch.rand(5)
    torch.manual_seed(7)
    total = engine_of(accelerator, model).sum_over_batches(draw, batches)
    assert total.shape == (3,)
    assert torch.equal(torch.rand(5), expected)


def test_norms_of_bfloat16_tensors_are_not_rounded(accelerator: Accelerator) -> None:
    model = torch.nn.Linear(30, 30).bfloat16()
    engine = engine_of(accelerator, model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    gradients = [p.grad.double() for p in model.parameters() if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients).item()
    assert engine.clip_grad_norm(max_norm=1e9).item() == pytest.approx(expected, rel=1e-5)

    weights = [p.detach().double() for p in model.parameters()]
    expected = torch.nn.utils.get_total_norm(weights).item()
    assert engine.weight_norm().item() == pytest.approx(expected, rel=1e-5)


class Returning(lt.Objective):
    """An objective whose loss is what a test gives it."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def loss(self, model: Any, batch: Batch, extra: Batch) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.tensor(1.5), r"Returning.loss returned tensor\(1.5.*; return llmtrain.LossSums"),
        (None, "Returning.loss returned None; return llmtrain.LossSums"),
        (lt.LossSums(loss=torch.ones(4)), "as its loss; return a tensor without dimensions"),
        (lt.LossSums(loss=1.5), "returned 1.5 as its loss; return a tensor without dimensions"),
        (
            lt.LossSums(torch.tensor(1.5), {"rows": 4}),
            "returned 4 as rows; return a tensor without",
        ),
    ],
)
def test_an_objective_that_returns_no_sums_is_refused(
    accelerator: Accelerator, returned: Any, message: str
) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), vocab_size=30)
    ids = torch.randint(30, (4, 9))
    engine = engine_of(accelerator, model, Returning(returned))
    with pytest.raises(lt.UserError, match=message):
        engine.loss({"input_ids": ids, "labels": ids})


class Rows(lt.Objective):
    """An objective whose denominator is a number instead of a tensor."""

    def denominator(self, batch: Batch) -> Any:
        return len(batch["labels"])


def test_a_denominator_that_is_no_tensor_is_refused(accelerator: Accelerator) -> None:
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), vocab_size=30)
    ids = torch.randint(30, (4, 9))
    engine = engine_of(accelerator, model, Rows())
    with pytest.raises(lt.UserError, match=r"Rows\.denominator returned 4; return a tensor"):
        engine.count([{"input_ids": ids, "labels": ids}])
