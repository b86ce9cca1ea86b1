"""A metric of the user is a sum divided by a count, both over all eval batches."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.metric import FunctionMetric
from llmtrain.parallel.engine import Engine
from llmtrain.training.evaluate import evaluate
from llmtrain.training.run import Run
from tests.engines import engine_of


class ConstantModel(nn.Module):
    """A model whose loss is 2 nats a row."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch.tensor(2.0) * labels.shape[0]


@pytest.fixture
def engine(accelerator: Accelerator) -> Engine:
    return engine_of(accelerator, ConstantModel())


def local_batch(rows: int) -> LocalBatch:
    """A batch of one micro-batch, with two target tokens a row."""
    tokens = torch.ones(rows, 3, dtype=torch.int64)
    unused = torch.zeros(0)
    return LocalBatch(
        columns={"input_ids": tokens, "labels": tokens},
        micro_batch=rows,
        rows=unused,
        targets=unused,
        token_fingerprint=0,
        label_fingerprint=0,
    )


def test_sums_are_added_up_and_divided_once(engine: Engine) -> None:
    def row_counts(model: Any, batch: Batch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        assert isinstance(model, ConstantModel)
        count = torch.tensor(float(len(batch["labels"])))
        return {"squares": (count**2, count), "ratio": (count, torch.tensor(0.25))}

    results = evaluate(
        engine,
        [local_batch(1), local_batch(3)],
        text_bytes=10,
        metrics=[FunctionMetric(row_counts)],
    )

    assert results["squares"] == (1 + 9) / (1 + 3)
    assert results["ratio"] == (1 + 3) / (0.25 + 0.25)
    # Each of 4 rows has a loss of 2 and 2 targets.
    assert results["loss"] == (4 * 2) / (4 * 2)


def test_a_sum_without_a_denominator_stays_a_sum(engine: Engine) -> None:
    def rows(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        return {"rows": torch.tensor(len(batch["labels"]))}

    def batches(model: Any, batch: Batch) -> dict[str, int]:
        return {"batches": 1}

    results = evaluate(
        engine,
        [local_batch(1), local_batch(3)],
        text_bytes=10,
        metrics=[FunctionMetric(rows), FunctionMetric(batches)],
    )

    assert results["rows"] == 4
    assert results["batches"] == 2


def test_a_metric_that_lacks_a_name_in_some_batch_is_refused(engine: Engine) -> None:
    def only_of_three_rows(
        model: Any, batch: Batch
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        if len(batch["labels"]) == 3:
            return {"rare": (torch.ones(()), torch.ones(()))}
        return {}

    with pytest.raises(UserError, match="the same names for every batch"):
        evaluate(
            engine,
            [local_batch(1), local_batch(3)],
            text_bytes=10,
            metrics=[FunctionMetric(only_of_three_rows)],
        )


def test_a_metric_runs_inside_forward(accelerator: Accelerator) -> None:
    class ObservedModel(ConstantModel):
        is_in_forward = False

    def enter(module: Any, inputs: object) -> None:
        module.is_in_forward = True

    def leave(module: Any, inputs: object, output: object) -> None:
        module.is_in_forward = False

    def calls_in_forward(model: Any, batch: Batch) -> dict[str, Any]:
        return {"calls in forward": (int(model.is_in_forward), 1)}

    model = ObservedModel()
    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)

    results = evaluate(
        engine_of(accelerator, model),
        [local_batch(1)],
        text_bytes=0,
        metrics=[FunctionMetric(calls_in_forward)],
    )

    assert results["calls in forward"] == 1


def metric_returning(value: Any) -> FunctionMetric:
    """Return a metric that returns ``value`` for every micro-batch."""

    def constant(model: Any, batch: Batch) -> Any:
        return value

    return FunctionMetric(constant)


@pytest.mark.parametrize("name", ["twice", "loss", "perplexity", "rounded_loss"])
def test_two_metrics_of_one_name_are_refused(name: str, engine: Engine) -> None:
    metrics = [metric_returning({"twice": 1}), metric_returning({name: 2})]

    with pytest.raises(UserError, match=f"two metrics with the name {name}; rename one"):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=metrics)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(
            torch.tensor(0.5),
            r"the metric constant returned tensor\(0.5.*; return a dictionary by name",
            id="tensor",
        ),
        pytest.param(
            {"mean": torch.ones(3)}, "as mean; return a sum, or a pair", id="three numbers"
        ),
        pytest.param({"mean": (1.0, 2.0, 3.0)}, "as mean; return a sum, or a pair", id="triple"),
        pytest.param({"mean": None}, "returned None as mean; return a sum, or", id="None"),
        pytest.param({"": 5.0}, "constant returned a metric with the name ''; a", id="no name"),
        pytest.param({1: 5.0, "b": 1.0}, "returned a metric with the name 1; a", id="a number"),
    ],
)
def test_a_metric_that_returns_no_sum_is_refused(value: Any, message: str, engine: Engine) -> None:
    with pytest.raises(UserError, match=message):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=[metric_returning(value)])


# --- metrics of callbacks


class TwiceTheLoss(lt.Callback):
    """A callback that adds a metric to each evaluation."""

    def __init__(self, metric_name: str) -> None:
        self.metric_name = metric_name

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        return {self.metric_name: 2 * evaluate()["loss"]}


def test_a_callback_adds_metrics_to_an_evaluation(train_gpt: Callable[..., Run]) -> None:
    run = train_gpt(callbacks=[TwiceTheLoss("twice")])

    evaluations = run.history().dropna(subset=["eval/loss"])
    assert len(evaluations) == 4
    assert (evaluations["eval/twice"] == 2 * evaluations["eval/loss"]).all()


class ReturnsMetrics(lt.Callback):
    """A callback whose on_evaluate returns a given object."""

    fingerprint = None

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        pytest.param(None, "returned None; return a dictionary", id="nothing"),
        pytest.param({"x": None}, "returned None as x; return a number", id="None"),
        pytest.param({None: 1.0}, "returned a metric with the name None; a name", id="no text"),
    ],
)
def test_a_callback_that_returns_no_metrics_is_refused(
    returned: Any, message: str, train_gpt: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match=rf"ReturnsMetrics\.on_evaluate {message}"):
        train_gpt(callbacks=[ReturnsMetrics(returned)])


def test_a_callback_cannot_replace_another_metric(train_gpt: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="two metrics with the name loss; rename one"):
        train_gpt(callbacks=[TwiceTheLoss("loss")])


# --- metrics of the objective


class OwnMetrics(lt.Objective):
    """An objective whose sums and metrics are given objects."""

    def __init__(self, metrics: Any, sums: Any = ()) -> None:
        self.sums = dict(sums) if isinstance(sums, tuple) else sums
        self.metrics = lambda sums, extra: metrics

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(model.nll(**batch), metrics=self.sums)


@pytest.mark.parametrize("eval_steps", [4, 0], ids=["evaluated", "trained"])
@pytest.mark.parametrize(
    ("objective", "message"),
    [
        pytest.param(
            OwnMetrics({"loss": 7.0}),
            "two metrics with the name (train/)?loss; rename one",
            id="the name of the loss",
        ),
        pytest.param(
            OwnMetrics({"": 7.0}), "metrics returned a metric with the name ''", id="none"
        ),
        pytest.param(
            OwnMetrics({"x": torch.ones(())}),
            r"OwnMetrics.metrics returned tensor\(1.\) as x; return a number",
            id="a tensor",
        ),
        pytest.param(
            OwnMetrics(torch.ones(())),
            r"OwnMetrics.metrics returned tensor\(1.\); return a dictionary",
            id="no dictionary",
        ),
        pytest.param(
            OwnMetrics({}, sums=[torch.ones(())]),
            r"OwnMetrics.loss returned \[tensor.*; return a dictionary by name",
            id="sums in a list",
        ),
        pytest.param(
            OwnMetrics({}, sums={1: torch.ones(()), "b": torch.ones(())}),
            "OwnMetrics.loss returned a metric with the name 1; a name",
            id="a sum without a name",
        ),
    ],
)
def test_metrics_of_an_objective_that_cannot_be_logged_are_refused(
    objective: OwnMetrics, message: str, eval_steps: int, train_gpt: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match=message):
        train_gpt(objective=objective, eval_steps=eval_steps)


def test_a_metric_cannot_replace_a_number_of_a_log_entry(train_gpt: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="two metrics with the name train/grad_norm; rename one"):
        train_gpt(objective=OwnMetrics({"grad_norm": 1.0}))


class Negative(lt.Objective):
    """An objective whose denominator is no number of anything."""

    def denominator(self, batch: Batch) -> torch.Tensor:
        return torch.tensor(-0.5)


@pytest.mark.parametrize("eval_steps", [4, 0], ids=["evaluated", "trained"])
def test_a_run_with_a_negative_denominator_ends_in_a_line_that_names_the_objective(
    eval_steps: int, train_gpt: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match=r"the sum of Negative\.denominator over all"):
        train_gpt(objective=Negative(), eval_steps=eval_steps)
