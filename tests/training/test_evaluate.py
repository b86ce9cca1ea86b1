"""An evaluation counts every eval token once, and reports what the objective measures."""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import llmtrain as lt
from llmtrain.data.loader import eval_loader
from llmtrain.data.prompts import Prompts
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.objective import LossSums, Objective, StepTotals
from llmtrain.interfaces.part import FunctionMetric
from llmtrain.models.config import GPTConfig
from llmtrain.models.generation import Sampling
from llmtrain.models.gpt import GPT
from llmtrain.parallel.engine import Engine
from llmtrain.training.evaluate import evaluate, sample
from llmtrain.training.run import Run
from tests.engines import engine_of


def rows_of(rows: list[list[int]]) -> TokenRows:
    return TokenRows([ArrayRows({"input_ids": np.array(rows)})])


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

    loader = accelerator.prepare(eval_loader(rows_of(rows), 1, micro_batch))
    metrics = evaluate(engine_of(accelerator, model), loader, text_bytes=100)

    assert metrics["loss"] == pytest.approx(nll / target_tokens, rel=1e-6)
    assert metrics["perplexity"] == pytest.approx(math.exp(nll / target_tokens), rel=1e-5)
    assert metrics["bits_per_byte"] == pytest.approx(nll / math.log(2) / 100, rel=1e-6)
    assert model.training, "the mode of the model is restored"


# --- objectives of the user


@pytest.fixture
def ten_target_tokens(accelerator: Accelerator) -> Any:
    """A loader of five eval rows with two target tokens each."""
    rows = rows_of([[1, 2, 3]] * 5)
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

    metrics = evaluate(engine, ten_target_tokens, text_bytes=0)

    assert metrics["loss"] == 10, "each token counts ten nats"
    assert metrics["nll_per_token"] == 1


# --- metrics of the user: a sum divided by a count, both over all eval batches


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


def test_sums_are_added_up_and_divided_once_if_they_have_a_denominator(engine: Engine) -> None:
    def row_counts(model: Any, batch: Batch) -> dict[str, Any]:
        assert isinstance(model, ConstantModel)
        count = torch.tensor(float(len(batch["labels"])))
        return {
            "squares": (count**2, count),
            "ratio": (count, torch.tensor(0.25)),
            "rows": count,
            "batches": 1,
        }

    results = evaluate(
        engine,
        [local_batch(1), local_batch(3)],
        text_bytes=10,
        metrics=[FunctionMetric(row_counts)],
    )

    assert results["squares"] == (1 + 9) / (1 + 3)
    assert results["ratio"] == (1 + 3) / (0.25 + 0.25)
    assert results["rows"] == 4
    assert results["batches"] == 2
    # Each of 4 rows has a loss of 2 and 2 targets.
    assert results["loss"] == (4 * 2) / (4 * 2)


def test_a_metric_that_lacks_a_name_in_some_batch_is_refused(engine: Engine) -> None:
    def only_of_three_rows(model: Any, batch: Batch) -> dict[str, int]:
        return {"rare": 1} if len(batch["labels"]) == 3 else {}

    with pytest.raises(UserError, match="the same names for every batch"):
        evaluate(
            engine,
            [local_batch(1), local_batch(3)],
            text_bytes=10,
            metrics=[FunctionMetric(only_of_three_rows)],
        )


@pytest.mark.parametrize("name", ["twice", "loss"])
def test_two_metrics_of_one_name_are_refused(name: str, engine: Engine) -> None:
    def twice(model: Any, batch: Batch) -> dict[str, int]:
        return {"twice": 1}

    def other(model: Any, batch: Batch) -> dict[str, int]:
        return {name: 2}

    metrics = [FunctionMetric(twice), FunctionMetric(other)]
    with pytest.raises(UserError, match=f"two metrics with the name {name}"):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=metrics)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        pytest.param(torch.tensor(0.5), "dictionary", id="a tensor"),
        pytest.param({"mean": torch.ones(3)}, "as mean", id="three numbers"),
        pytest.param({"mean": (1.0, 2.0, 3.0)}, "as mean", id="a triple"),
        pytest.param({"mean": None}, "None as mean", id="nothing"),
        pytest.param({1: 5.0}, "the name 1", id="no name"),
    ],
)
def test_a_metric_that_returns_no_sum_is_refused(value: Any, named: str, engine: Engine) -> None:
    def constant(model: Any, batch: Batch) -> Any:
        return value

    with pytest.raises(UserError, match=f"constant returned .*{named}"):
        evaluate(engine, [local_batch(1)], text_bytes=0, metrics=[FunctionMetric(constant)])


# --- metrics of callbacks


class ReturnsMetrics(lt.Callback):
    """A callback whose on_evaluate returns a given object."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Any:
        return self.returned


@pytest.mark.parametrize(
    ("callback", "named"),
    [
        (ReturnsMetrics(None), r"ReturnsMetrics\.on_evaluate returned None"),
        (ReturnsMetrics({"x": None}), r"ReturnsMetrics\.on_evaluate returned None as x"),
        (ReturnsMetrics({"loss": 1.0}), "two metrics with the name loss"),
    ],
)
def test_a_callback_that_returns_no_metrics_is_refused(
    callback: lt.Callback, named: str, train_gpt: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match=named):
        train_gpt(callbacks=[callback])


# --- metrics of the objective


class OwnMetrics(lt.Objective):
    """An objective whose sums and metrics are given objects."""

    def __init__(self, metrics: Any, sums: Any = ()) -> None:
        self.sums = dict(sums) if isinstance(sums, tuple) else sums
        self.metrics = lambda sums, extra: metrics

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(model.nll(**batch), metrics=self.sums)


EVALUATED = 4  # steps between evaluations; the first one comes before the first step
TRAINED = 0


@pytest.mark.parametrize(
    ("objective", "eval_steps", "named"),
    [
        (OwnMetrics({"loss": 7.0}), EVALUATED, "the name loss"),
        (OwnMetrics({"loss": 7.0}), TRAINED, "the name train/loss"),
        (OwnMetrics({"grad_norm": 1.0}), TRAINED, "the name train/grad_norm"),
        (OwnMetrics({"x": torch.ones(())}), EVALUATED, r"OwnMetrics\.metrics returned .* as x"),
        (OwnMetrics(None), TRAINED, r"OwnMetrics\.metrics returned None"),
        (OwnMetrics({}, sums=[torch.ones(())]), EVALUATED, r"OwnMetrics\.loss returned \[tensor"),
        (OwnMetrics({}, sums={1: torch.ones(())}), TRAINED, "the name 1"),
    ],
)
def test_an_objective_whose_numbers_cannot_be_logged_is_refused(
    objective: lt.Objective, eval_steps: int, named: str, train_gpt: Callable[..., Run]
) -> None:
    with pytest.raises(UserError, match=named):
        train_gpt(objective=objective, evaluation={"eval_steps": eval_steps})


# --- samples


def test_samples_depend_only_on_weights_and_prompts_and_leave_no_trace(
    accelerator: Accelerator,
) -> None:
    alphabet = "the kernel waits for the bucket"
    tokenizer = as_pretrained(train_tokenizer("char", [alphabet], lambda: iter([alphabet])), 8)
    config = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=8, dropout=0.5)
    model = GPT(config, len(tokenizer), seed=1).train()
    prompts = [Prompts(tokenizer).of_question(text) for text in ("the k", "")]
    sampling = Sampling(max_new_tokens=20, seed=0)
    write = functools.partial(sample, engine_of(accelerator, model), tokenizer)
    state = torch.get_rng_state()

    texts = write(prompts, sampling)
    assert len(texts) == len(prompts)
    assert all(texts)
    assert {*"".join(texts)} <= {*alphabet}
    assert write(prompts, sampling) == texts
    assert len(set(write(prompts[:1] * 8, sampling))) == 8, "equal prompts have different samples"

    letter = texts[0][5]
    stop_token_id = tokenizer.convert_tokens_to_ids(letter)
    stopped = write(prompts, sampling, stop_token_ids=[stop_token_id])
    assert stopped == [text.partition(letter)[0] for text in texts]
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)

    weight = model.transformer.wte.weight
    weight.data += torch.randn_like(weight)
    assert write(prompts, sampling) != texts
