"""One step: the gradient of one big batch, however it is split."""

import copy
import math
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from llmtrain.interfaces.batches import Batch, count_targets
from llmtrain.interfaces.callback import StepInfo
from llmtrain.interfaces.objective import Objective
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.parallel.engine import Engine, unwrap
from llmtrain.training.optim import make_optimizer
from llmtrain.training.settings import OptimConfig
from llmtrain.training.step import train_step
from tests.engines import ScaledRows, engine_of, split

VOCABULARY = 40


@pytest.fixture
def model() -> GPT:
    return GPT(
        GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12), VOCABULARY, seed=1
    ).double()


def ragged_batch(rows: int = 8) -> Batch:
    """Rows of very different numbers of targets, one of them with none at all."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(VOCABULARY, (rows, 13), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, 1 + 2 * row % 13 :] = -100
    labels[3] = -100
    return {"input_ids": ids, "labels": labels}


def prepared(
    accelerator: Accelerator, model: GPT, objective: Objective | None = None, **optim: float
) -> tuple[Engine, Any]:
    """Return an engine and an optimizer for the model."""
    optimizer = make_optimizer(accelerator, model, OptimConfig(**optim))
    model, optimizer = accelerator.prepare(model, optimizer)
    return engine_of(accelerator, model, objective), optimizer


def weights_after_steps(
    accelerator: Accelerator, model: GPT, batches: list[Batch], steps: int = 3
) -> tuple[list[float], torch.Tensor]:
    """Train a copy of the model; return the gradient norms and the weights."""
    model = copy.deepcopy(model)
    engine, optimizer = prepared(accelerator, model, learning_rate=1e-2)
    results = [train_step(engine, optimizer, batches, max_grad_norm=0.5) for _ in range(steps)]
    norms = [result.grad_norm for result in results]
    return norms, torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_every_split_of_a_ragged_batch_makes_the_same_step(
    accelerator: Accelerator, model: GPT, micro: int
) -> None:
    batch = ragged_batch()
    norms, weights = weights_after_steps(accelerator, model, [batch])
    split_norms, split_weights = weights_after_steps(accelerator, model, split(batch, micro))
    assert split_norms == pytest.approx(norms, rel=1e-12)
    assert float((split_weights - weights).norm() / weights.norm()) <= 1e-12


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_the_gradient_of_every_split_is_that_of_one_big_batch(
    accelerator: Accelerator, model: GPT, micro: int, dtype: torch.dtype, limit: float
) -> None:
    batch = ragged_batch()
    model = model.to(dtype)
    (model(**batch) / count_targets(batch["labels"])).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()

    engine = engine_of(accelerator, accelerator.prepare(model))
    batches = split(batch, micro)
    engine.forward_backward(batches, engine.count(batches))
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert float((gradient - expected).norm() / expected.norm()) <= limit


def test_a_mean_of_means_would_be_noticed(accelerator: Accelerator, model: GPT) -> None:
    batch = ragged_batch()
    batches = split(batch, 2)
    model.requires_grad_(False)
    expected = float(model(**batch)) / int(count_targets(batch["labels"]))
    counts = [int(count_targets(micro["labels"])) for micro in batches]
    means = [float(model(**micro)) / n for micro, n in zip(batches, counts, strict=True) if n]
    assert abs(sum(means) / len(means) - expected) > 1e-3


def test_the_step_is_that_of_plain_autograd(accelerator: Accelerator, model: GPT) -> None:
    """Against a bare torch loop: a factor that both sides of the other test lack is found here."""
    batch = ragged_batch()
    _, weights = weights_after_steps(accelerator, model, split(batch, 2), steps=1)
    bare = copy.deepcopy(model)
    optimizer = make_optimizer(accelerator, bare, OptimConfig(learning_rate=1e-2))
    (bare(**batch) / count_targets(batch["labels"])).backward()
    torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
    optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in bare.parameters()])
    assert float((weights - expected).norm() / expected.norm()) <= 1e-12


def test_the_result_of_a_step(accelerator: Accelerator, model: GPT) -> None:
    batch = ragged_batch()
    expected_loss = model(**batch).item()
    expected_count = int(count_targets(batch["labels"]))
    engine, optimizer = prepared(accelerator, model)

    result = train_step(engine, optimizer, split(batch, 4), max_grad_norm=1.0, stop_requested=True)
    assert float(result.sums.loss) == pytest.approx(expected_loss, rel=1e-6)
    assert result.target_tokens == result.denominator == expected_count
    assert result.stop == "save"
    assert not train_step(engine, optimizer, split(batch, 4), max_grad_norm=1.0).stop


@pytest.mark.parametrize("micro", [2, 4])
def test_an_objective_has_its_own_denominator_metrics_and_prepass(
    accelerator: Accelerator, model: GPT, micro: int
) -> None:
    batch = ragged_batch()
    bare = copy.deepcopy(model)
    nll = bare(**batch)
    (2 * nll).backward()  # the number of rows cancels out
    expected_norm = torch.nn.utils.get_total_norm([p.grad for p in bare.parameters()])

    engine, optimizer = prepared(accelerator, model, ScaledRows())
    result = train_step(engine, optimizer, split(batch, micro), max_grad_norm=1.0)

    rows = 6  # of eight: two have no target after the shift
    assert result.denominator == rows
    assert result.target_tokens == int(count_targets(batch["labels"]))
    assert int(result.extra["factor"]) == 2 * rows
    assert int(result.sums.metrics["rows"]) == rows
    assert not result.sums.metrics["nll"].requires_grad, "it would keep the graph of each batch"
    assert float(result.sums.metrics["nll"].detach()) == pytest.approx(
        float(nll.detach()), rel=1e-6
    )
    assert float(result.sums.loss) == pytest.approx(2 * rows * float(nll.detach()), rel=1e-6)
    assert result.grad_norm == pytest.approx(float(expected_norm), rel=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_makes_no_step(
    accelerator: Accelerator, model: GPT, poison: float
) -> None:
    with torch.no_grad():
        model.transformer.ln_f.bias[0] = poison
    before = copy.deepcopy(model.state_dict())
    engine, optimizer = prepared(accelerator, model)

    result = train_step(engine, optimizer, [ragged_batch()], max_grad_norm=1.0)
    assert not math.isfinite(result.grad_norm)
    after = model.state_dict()
    assert all(
        torch.equal(before[name], after[name]) for name in before if name != "transformer.ln_f.bias"
    )


def test_a_batch_without_any_target_changes_nothing_but_decay(
    accelerator: Accelerator, model: GPT
) -> None:
    before = copy.deepcopy(model.state_dict())
    engine, optimizer = prepared(accelerator, model, weight_decay=0.0)
    empty = {"input_ids": torch.zeros(2, 13, dtype=torch.long), "labels": torch.full((2, 13), -100)}
    assert train_step(engine, optimizer, [empty], max_grad_norm=1.0).target_tokens == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_periodic_actions_are_due_at_their_multiples_and_at_the_end_but_never_with_0() -> None:
    steps = [StepInfo(step, is_last=False, should_stop=False) for step in range(1, 10)]
    assert [info.step for info in steps if info.is_due(1)] == [*range(1, 10)]
    assert [info.step for info in steps if info.is_due(3)] == [3, 6, 9]
    assert not any(info.is_due(0) for info in steps)

    last = StepInfo(7, is_last=True, should_stop=False)
    assert last.is_due(100), "at the end all is done"
    assert not last.is_due(0)


def test_a_model_is_found_inside_the_wrappers_of_ddp_and_of_a_compiler(model: GPT) -> None:
    replicated = DistributedDataParallel.__new__(DistributedDataParallel)  # without other processes
    nn.Module.__init__(replicated)
    replicated.module = model
    for wrapped in (model, replicated, torch.compile(model), torch.compile(replicated)):
        assert unwrap(wrapped) is model
