"""A metric of the user's own is a sum divided by a count, both over all eval batches."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.metric import FunctionMetric
from llmtrain.training.evaluate import evaluate
from llmtrain.training.run import Run
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


def metric_of(name: str, value: Any) -> FunctionMetric:
    """A metric that returns a value for every micro-batch."""

    def constant(model: Any, batch: dict[str, torch.Tensor]) -> Any:
        return {name: value} if name else value

    return FunctionMetric(constant)


def test_a_sum_without_a_denominator_stays_a_sum(accelerator: Accelerator) -> None:
    def rows(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor(len(batch["labels"]))}

    engine = engine_of(accelerator, Constant())
    batches = [local_batch(1), local_batch(3)]
    metrics = [FunctionMetric(rows), metric_of("batches", 1)]
    results = evaluate(engine, batches, text_bytes=10, metrics=metrics)
    assert results["rows"] == 4
    assert results["batches"] == 2


def test_a_metric_runs_inside_forward(accelerator: Accelerator) -> None:
    class Watched(Constant):
        is_inside = False

    def hook(is_inside: bool) -> Any:
        def enter_or_leave(*_: object) -> None:
            Watched.is_inside = is_inside

        return enter_or_leave

    def inside(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"inside": (int(model.is_inside), 1)}

    model = Watched()
    model.register_forward_pre_hook(hook(True))
    model.register_forward_hook(hook(False))
    engine = engine_of(accelerator, model)
    results = evaluate(engine, [local_batch(1)], text_bytes=0, metrics=[FunctionMetric(inside)])
    assert results["inside"] == 1


@pytest.mark.parametrize("name", ["twice", "loss", "perplexity"])
def test_two_metrics_of_one_name_are_refused(accelerator: Accelerator, name: str) -> None:
    engine = engine_of(accelerator, Constant())
    metrics = [metric_of("twice", 1), metric_of(name, 2)]
    with pytest.raises(UserError, match=f"two metrics with the name {name}; rename one"):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=metrics)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("", torch.tensor(0.5), "the metric constant returns Tensor, not a dictionary of sums"),
        ("mean", torch.ones(3), "the metric mean must be a sum, or a pair"),
        ("mean", (1.0, 2.0, 3.0), "the metric mean must be a sum, or a pair"),
        ("mean", None, "the metric mean must be a sum, or a pair"),
    ],
)
def test_what_is_no_sum_is_refused(
    accelerator: Accelerator, name: str, value: Any, message: str
) -> None:
    engine = engine_of(accelerator, Constant())
    with pytest.raises(UserError, match=message):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=[metric_of(name, value)])


class Twice(lt.Callback):
    """A callback that evaluates the model once more."""

    def __init__(self, metric_name: str) -> None:
        self.metric_name = metric_name

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        return {self.metric_name: 2 * evaluate()["loss"]}


def test_a_callback_adds_metrics_to_an_evaluation(train_gpt: Callable[..., Run]) -> None:
    run = train_gpt(callbacks=[Twice("twice")])
    evaluations = run.history().dropna(subset=["eval/loss"])
    assert len(evaluations) == 4
    assert (evaluations["eval/twice"] == 2 * evaluations["eval/loss"]).all()


class Silent(lt.Callback):
    """A callback whose on_evaluate returns nothing."""

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Any:
        evaluate()


def test_a_callback_that_returns_no_metrics_is_refused(train_gpt: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match=r"Silent\.on_evaluate returns None, not a dictionary"):
        train_gpt(callbacks=[Silent()])


def test_a_callback_cannot_replace_another_metric(train_gpt: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="two metrics with the name loss; rename one"):
        train_gpt(callbacks=[Twice("loss")])
