"""An evaluation counts every eval token once, and reports what the objective measures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from llmtrain.data.loader import eval_loader
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.training.evaluate import eval_extra, evaluate
from tests.engines import engine_of


def dataset_of(rows: list[list[int]]) -> Dataset:
    return Dataset.from_dict({"input_ids": rows})


class NatPerToken(nn.Module):
    """A model whose loss is one nat for each target token."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum().double()


# --- losses


@pytest.mark.parametrize("micro_batch", [1, 3, 4])
def test_every_eval_token_counts_once_whatever_the_micro_batch(
    accelerator: Accelerator, micro_batch: int
) -> None:
    rows = []
    for number in range(5):
        rows.append([(7 * number + 3 * position) % 20 for position in range(9)])
    rows[4][6:] = [-100] * 3
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)
    model = GPT(config, vocab_size=20, seed=2).requires_grad_(False)

    # The sums over single rows, without padding.
    nll = 0.0
    target_tokens = 0
    for row in rows:
        ids = torch.tensor([[token for token in row if token != -100]])
        nll += model(ids, ids).item()
        target_tokens += ids.shape[1] - 1

    loader = accelerator.prepare(eval_loader(dataset_of(rows), 1, micro_batch))
    metrics = evaluate(engine_of(accelerator, model), loader, text_bytes=100)

    assert metrics["loss"] == pytest.approx(nll / target_tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / target_tokens), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / 100, rel=1e-6)
    assert model.training, "the mode of the model is restored"


# --- objectives of the user


@pytest.fixture
def ten_target_tokens(accelerator: Accelerator) -> Any:
    """A loader of five eval rows with two target tokens each."""
    rows = dataset_of([[1, 2, 3]] * 5)
    return accelerator.prepare(eval_loader(rows, 1, 2))


class UsesCounts(Objective):
    """An objective whose loss needs the counts of all eval rows."""

    uses_prepass_in_eval = True

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        for count in (totals.target_tokens, totals.denominator, totals.stop_votes):
            assert count.dtype == torch.int64
        assert engine.sum_over_batches(lambda model, batch: self.denominator(batch), batches) == 10
        return {"tokens": totals.target_tokens, "denominator": totals.denominator}

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        nll = model.nll(**batch)
        return LossSums(nll * extra["tokens"], metrics={"nll": nll})

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        return {"nll_per_token": sums["nll"] / int(extra["denominator"])}


def test_loss_and_metrics_get_the_result_of_the_eval_prepass(
    accelerator: Accelerator, ten_target_tokens: Any
) -> None:
    engine = engine_of(accelerator, NatPerToken(), UsesCounts())

    extra = eval_extra(engine, lambda: ten_target_tokens)
    metrics = evaluate(engine, ten_target_tokens, text_bytes=0, extra=extra)

    assert metrics["loss"] == 10, "each token counts ten nats"
    assert metrics["nll_per_token"] == 1


class ReturnsNothing(Objective):
    """An objective with a method that returns nothing."""

    def __init__(self, method: str) -> None:
        setattr(self, method, lambda *arguments: None)


@pytest.mark.parametrize("method", ["metrics", "eval_metrics"])
def test_an_objective_that_returns_no_metrics_is_refused(
    accelerator: Accelerator, ten_target_tokens: Any, method: str
) -> None:
    engine = engine_of(accelerator, NatPerToken(), ReturnsNothing(method))

    message = rf"ReturnsNothing\.{method} returned None; return a dictionary"
    with pytest.raises(UserError, match=message):
        evaluate(engine, ten_target_tokens, text_bytes=0)
