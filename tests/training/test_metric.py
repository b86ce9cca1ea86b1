"""A metric of the user's own is a sum divided by a count, both over all eval batches."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.metric import FunctionMetric
from llmtrain.training.evaluate import evaluate
from tests.engines import engine_of


class Constant(nn.Module):
    """A model whose loss is 2 nats a row."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor(2.0) * labels.shape[0]


def local_batch(rows: int) -> LocalBatch:
    """A batch of one micro-batch, with two target tokens a row."""
    tokens = torch.ones(rows, 3, dtype=torch.int64)
    nothing = torch.zeros(0)
    return LocalBatch(
        columns={"input_ids": tokens, "labels": tokens},
        micro_batch=rows,
        rows=nothing,
        targets=nothing,
        token_fingerprint=0,
        label_fingerprint=0,
    )


def test_sums_are_added_up_and_divided_once(accelerator: Accelerator) -> None:
    def rows(
        model: Any, batch: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        assert isinstance(model, Constant)
        count = torch.tensor(float(len(batch["labels"])))
        return {"squares": (count**2, count), "half": (count, torch.tensor(0.25))}

    engine = engine_of(accelerator, Constant())
    batches = [local_batch(1), local_batch(3)]
    results = evaluate(engine, batches, text_bytes=10, metrics=[FunctionMetric(rows)])
    assert results["squares"] == (1 + 9) / (1 + 3)
    assert results["half"] == (1 + 3) / 0.5
    assert results["loss"] == 8 / 8


def test_names_that_come_and_go_are_refused(accelerator: Accelerator) -> None:
    def some(
        model: Any, batch: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"rare": (torch.ones(()), torch.ones(()))} if len(batch["labels"]) == 3 else {}

    engine = engine_of(accelerator, Constant())
    batches = [local_batch(1), local_batch(3)]
    with pytest.raises(UserError, match="the same names for every batch"):
        evaluate(engine, batches, text_bytes=10, metrics=[FunctionMetric(some)])
