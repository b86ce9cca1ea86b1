"""A metric of a recipe's own is a sum by a count over all held-out batches."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

from llmtrain.contract import Window
from llmtrain.errors import UserError
from llmtrain.training.evaluate import evaluate


class Constant(nn.Module):
    def forward(self, labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor(2.0) * labels.shape[0]


def window(rows: int) -> Window:
    labels, none = torch.ones(rows, 3, dtype=torch.int64), torch.zeros(0)
    return Window({"labels": labels}, rows, none, none, none)


def test_sums_are_added_up_and_divided_once(accelerator: Accelerator) -> None:
    def rows(
        model: Any, batch: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        assert isinstance(model, Constant)
        count = torch.tensor(float(len(batch["labels"])))
        return {"squares": (count**2, count), "half": (count, torch.tensor(0.25))}

    found = evaluate(accelerator, Constant(), [window(1), window(3)], 10, metric=rows)
    assert found["eval/squares"] == (1 + 9) / (1 + 3)
    assert found["eval/half"] == (1 + 3) / 0.5
    assert found["eval/loss"] == 8 / 8


def test_names_that_come_and_go_are_refused(accelerator: Accelerator) -> None:
    def some(
        model: Any, batch: dict[str, torch.Tensor]
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        return {"rare": (torch.ones(()), torch.ones(()))} if len(batch["labels"]) == 3 else {}

    with pytest.raises(UserError, match="the same names for every batch"):
        evaluate(accelerator, Constant(), [window(1), window(3)], 10, metric=some)
