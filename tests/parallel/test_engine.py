"""The promises of every engine, on one process."""

import copy
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import llmtrain as lt
from llmtrain.device_numbers import DeviceScalars
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import SAVE_VOTE
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.engine import check_denominator
from llmtrain.training.step import train_step
from tests.engines import engine_of, split


@pytest.fixture
def model() -> GPT:
    return GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8), vocab_size=30)


@pytest.fixture
def batch() -> Batch:
    ids = torch.randint(30, (4, 9))
    return {"input_ids": ids, "labels": ids}


def test_a_pass_without_gradients_leaves_the_random_generator_unchanged(
    accelerator: Accelerator, model: GPT, batch: Batch
) -> None:
    def draw(model: Any, batch: Batch) -> torch.Tensor:
        return torch.rand(3)

    torch.manual_seed(7)
    expected = torch.rand(5)

    torch.manual_seed(7)
    engine = engine_of(accelerator, model)
    total = engine.sum_over_batches(draw, split(batch, micro_batch=2))

    assert total.shape == (3,)
    assert torch.equal(torch.rand(5), expected)


def test_norms_of_bfloat16_tensors_are_not_rounded(accelerator: Accelerator) -> None:
    model = torch.nn.Linear(30, 30).bfloat16()
    engine = engine_of(accelerator, model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)

    weights = [parameter.detach().double() for parameter in model.parameters()]
    gradients = [parameter.grad.double() for parameter in model.parameters()]
    norm_of_weights = torch.nn.utils.get_total_norm(weights).item()
    norm_of_gradients = torch.nn.utils.get_total_norm(gradients).item()
    assert engine.weight_norm().item() == pytest.approx(norm_of_weights, rel=1e-5)
    measured = engine.clip_grad_norm(max_norm=1e9).item()
    assert measured == pytest.approx(norm_of_gradients, rel=1e-5)


class ReturningObjective(lt.Objective):
    """An objective whose loss is a given object."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def loss(self, model: Any, batch: Batch, extra: Batch) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (torch.tensor(1.5), "tensor"),
        (None, "None"),
        (lt.LossSums(loss=torch.ones(4)), "as its loss"),
        (lt.LossSums(loss=1.5), r"1\.5 as its loss"),
        (lt.LossSums(torch.tensor(1.5), {"rows": 4}), "4 as rows"),
    ],
)
def test_an_objective_that_does_not_return_sums_is_refused(
    returned: Any, named: str, accelerator: Accelerator, model: GPT, batch: Batch
) -> None:
    engine = engine_of(accelerator, model, ReturningObjective(returned))

    with pytest.raises(lt.UserError, match=rf"ReturningObjective\.loss returned .*{named}"):
        engine.loss(batch)


class GivenDenominator(lt.Objective):
    """An objective whose denominator is the same object for each micro-batch."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def denominator(self, batch: Batch) -> Any:
        return self.value


@pytest.mark.parametrize("device", ["cpu", "mps"])  # MPS has no float64
def test_twenty_million_tokens_are_counted_beside_a_denominator_of_floats(
    device: str, accelerator: Accelerator, model: GPT
) -> None:
    engine = engine_of(accelerator, model, GivenDenominator(torch.tensor(0.5)))
    engine.device = torch.device(device)
    labels = torch.zeros((), dtype=torch.int64).expand(1, 20_000_002)

    totals = engine.count([{"labels": labels}], stop_requested=True)
    scalars = DeviceScalars(
        {
            "tokens": totals.target_tokens,
            "denominator": totals.denominator,
            "votes": totals.stop_votes,
        },
        engine.device,
    )

    assert scalars.read() == {"tokens": 20_000_001, "denominator": 0.5, "votes": SAVE_VOTE}


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_a_denominator_that_is_negative_or_not_finite_makes_no_step(
    value: float, accelerator: Accelerator, model: GPT, batch: Batch
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = copy.deepcopy(model.state_dict())
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = engine_of(accelerator, model, GivenDenominator(torch.tensor(value)))

    result = train_step(engine, optimizer, split(batch, 2), max_grad_norm=1.0)

    with pytest.raises(lt.UserError, match=r"the sum of GivenDenominator\.denominator over all"):
        check_denominator(engine.objective, result.denominator)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_a_denominator_that_is_no_tensor_is_refused(
    accelerator: Accelerator, model: GPT, batch: Batch
) -> None:
    engine = engine_of(accelerator, model, GivenDenominator(4))

    with pytest.raises(lt.UserError, match=r"GivenDenominator\.denominator returned 4"):
        engine.count([batch])
