"""An evaluation counts every eval token once, and reports what the objective measures."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn

from llmtrain.data.loader import eval_loader, train_loader
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.models.config import GPTConfig
from llmtrain.models.gpt import GPT
from llmtrain.training.evaluate import eval_extra, evaluate, row_losses
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


def first_batch(
    accelerator: Accelerator, rows: list[list[int]], rows_per_step: int, micro_batch: int, **options
) -> Any:
    """Return the only batch of a loader of training rows."""
    loader = train_loader(
        dataset_of(rows), rows_per_step, micro_batch, range(1), seed=None, **options
    )
    (batch,) = accelerator.prepare(loader)
    return batch


class SumOfOffsets(nn.Module):
    """A model that cannot compute without the offsets that `add_offsets` prepares."""

    def forward(self, input_ids: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        has_targets = (labels[:, 1:] != -100).any(1)
        return (offsets * has_targets).sum().double()


def add_offsets(batch: Batch) -> Batch:
    return {"offsets": batch["input_ids"].sum(1)}


def test_the_losses_of_single_rows_use_the_columns_of_prepare_batch(
    accelerator: Accelerator,
) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    batch = first_batch(accelerator, rows, rows_per_step=4, micro_batch=2, prepare=add_offsets)

    losses = row_losses(engine_of(accelerator, SumOfOffsets()), batch, add_offsets)

    assert [loss["row"] for loss in losses] == [0, 1, 2]
    assert [loss["loss"] * loss["targets"] for loss in losses] == [sum(row) for row in rows]


def test_the_tokens_of_a_row_are_reported_without_padding(accelerator: Accelerator) -> None:
    long = [*range(1, 201)]
    short = [5, 6, 7, 7, 7]
    padding = [-100] * (len(long) - len(short))
    rows = [long, short + padding]
    batch = first_batch(accelerator, rows, rows_per_step=2, micro_batch=1)

    losses = row_losses(engine_of(accelerator, NatPerToken()), batch)

    assert [loss["tokens"] for loss in losses] == [long, short]


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
