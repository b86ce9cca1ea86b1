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


@pytest.mark.parametrize("micro", [1, 3, 4])
def test_every_eval_token_counts_once_whatever_the_batch(
    accelerator: Accelerator, micro: int
) -> None:
    rows = [[(7 * i + 3 * j) % 20 for j in range(9)] for i in range(5)]
    rows[4][6:] = [-100] * 3
    config = GPTConfig(n_layer=1, n_head=2, n_embd=16, block_size=8)
    model = GPT(config, vocab_size=20, seed=2).requires_grad_(False)
    nll = 0.0
    tokens = 0
    for row in rows:
        ids = torch.tensor([[token for token in row if token >= 0]])
        nll += float(model(ids, ids))
        tokens += ids.shape[1] - 1
    loader = accelerator.prepare(eval_loader(Dataset.from_dict({"input_ids": rows}), 1, micro))
    results = evaluate(engine_of(accelerator, model), loader, text_bytes=100)
    assert results["loss"] == pytest.approx(nll / tokens, rel=1e-6)
    assert results["perplexity"] == pytest.approx(math.exp(nll / tokens), rel=1e-5)
    assert results["bits_per_byte"] == pytest.approx(nll / math.log(2) / 100, rel=1e-6)
    assert model.training


class Offset(nn.Module):
    """A model that cannot compute without the offsets that `add_offsets` prepares."""

    def forward(self, input_ids: Tensor, labels: Tensor, offsets: Tensor) -> Tensor:
        return (offsets * (labels[:, 1:] != -100).any(1)).sum().double()


def add_offsets(batch: Batch) -> Batch:
    return {"offsets": batch["input_ids"].sum(1)}


def test_the_loss_of_a_single_row_gets_what_prepare_batch_returns(accelerator: Accelerator) -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    loader = train_loader(
        Dataset.from_dict({"input_ids": rows}), 4, 2, range(1), seed=None, prepare=add_offsets
    )
    (batch,) = accelerator.prepare(loader)
    losses = row_losses(engine_of(accelerator, Offset()), batch, add_offsets)
    assert [row["row"] for row in losses] == [0, 1, 2]
    assert [row["loss"] * row["targets"] for row in losses] == [6, 15, 24]


def test_the_tokens_of_a_row_are_all_but_its_padding(accelerator: Accelerator) -> None:
    long = list(range(1, 201))
    short = [5, 6, 7, 7, 7, *[-100] * 195]
    loader = train_loader(
        Dataset.from_dict({"input_ids": [long, short]}), 2, 1, range(1), seed=None
    )
    (batch,) = accelerator.prepare(loader)
    rows = row_losses(engine_of(accelerator, Constant()), batch)
    assert [row["tokens"] for row in rows] == [long, [5, 6, 7, 7, 7]]


class Constant(nn.Module):
    """A model whose loss is a nat for each target token."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return (labels[:, 1:] != -100).sum().double()


class Counted(Objective):
    """An objective whose loss needs the counts of all eval rows."""

    uses_prepass_in_eval = True

    def prepass(self, engine: Any, batches: Iterable[Batch], totals: StepTotals) -> Batch:
        counts = (totals.target_tokens, totals.denominator, totals.stop_votes)
        assert {count.dtype for count in counts} == {torch.int64}
        assert engine.sum_over_batches(lambda model, batch: self.denominator(batch), batches) == 10
        return {"tokens": totals.target_tokens, "denominator": totals.denominator}

    def loss(self, model: Any, batch: Batch, extra: Batch) -> LossSums:
        nll = model.nll(**batch)
        return LossSums(nll * extra["tokens"], metrics={"nll": nll})

    def metrics(self, sums: Mapping[str, float], extra: Batch) -> dict[str, float]:
        return {"share": sums["nll"] / int(extra["denominator"])}


def test_an_eval_prepass_gets_the_counts_and_the_metrics_get_what_it_returned(
    accelerator: Accelerator,
) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 5})
    loader = accelerator.prepare(eval_loader(rows, 1, 2))
    engine = engine_of(accelerator, Constant(), Counted())
    extra = eval_extra(engine, lambda: loader)
    results = evaluate(engine, loader, text_bytes=0, extra=extra)
    assert results["loss"] == 10
    assert results["share"] == 1


class Silent(Objective):
    """An objective with a method that returns nothing."""

    def __init__(self, method: str) -> None:
        setattr(self, method, lambda *arguments: None)


@pytest.mark.parametrize("method", ["metrics", "eval_metrics"])
def test_an_objective_that_returns_no_metrics_is_refused(
    accelerator: Accelerator, method: str
) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3]] * 5})
    loader = accelerator.prepare(eval_loader(rows, 1, 2))
    engine = engine_of(accelerator, Constant(), Silent(method))
    with pytest.raises(UserError, match=rf"Silent\.{method} returned None; return a dictionary"):
        evaluate(engine, loader, text_bytes=0)
