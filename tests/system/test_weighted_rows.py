"""A loss whose denominator is a sum of weights is that of a plain loop, on any layout."""

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch.nn import functional as F

from llmtrain.interfaces.batches import LocalBatch
from llmtrain.training.evaluate import evaluate
from tests.engines import engine_of
from tests.forked import run_forked
from tests.launching import PYTHON, torchrun
from tests.system.weighted_rows import (
    CASES,
    ROWS,
    SECOND_DOCUMENT,
    TOKENS,
    Case,
    make_step,
    weights_of_rows,
)


def plain_step(case: Case) -> dict[str, torch.Tensor]:
    """Return the results of a step that plain torch makes in float64, document by document."""
    model = case.model().double()
    batch = case.global_batch()
    token_weights = batch.get("loss_weight", weights_of_rows(batch)).double()
    borders = [0, SECOND_DOCUMENT, TOKENS] if case.is_packed else [0, TOKENS]
    loss_sum = torch.zeros((), dtype=torch.float64)
    denominator = torch.zeros((), dtype=torch.float64)
    target_tokens = torch.tensor(0)
    for row in range(ROWS):
        for start, end in itertools.pairwise(borders):
            output = model(batch["input_ids"][[row], start : end - 1])
            logits = getattr(output, "logits", output)[0]
            targets = batch["labels"][row, start + 1 : end]
            weights = token_weights[row, start + 1 : end] * (targets != -100)
            nll = F.cross_entropy(logits, targets, reduction="none")
            loss_sum = loss_sum + (nll * weights).sum()
            denominator += weights.sum()
            target_tokens += (targets != -100).sum()

    loss = loss_sum / denominator
    loss.backward()
    stepped = [(p.detach() - p.grad).flatten() for p in model.parameters() if p.grad is not None]
    return {
        "loss": loss.detach(),
        "weights": torch.cat(stepped),
        "denominator": denominator,
        "target_tokens": target_tokens,
    }


def assert_same_step(results: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert results.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(results[name].to(value.dtype), value, rtol=1e-5, atol=1e-6)


def test_the_step_of_weighted_rows_is_that_of_a_plain_loop_on_any_layout(tmp_path: Path) -> None:
    expected = {name: plain_step(case) for name, case in CASES.items()}
    on_one_process = {}
    for processes, launcher in {1: PYTHON, 2: torchrun(2), 4: torchrun(4)}.items():
        folder = tmp_path / str(processes)
        folder.mkdir()
        run_forked([*launcher, "tests/system/weighted_rows.py", str(folder)]).assert_ok()

        for case in CASES:
            assert_same_step(torch.load(folder / f"{case}-replicated.pt"), expected[case])
            bitwise = torch.load(folder / f"{case}-bitwise.pt")
            assert_same_step(bitwise, expected[case])
            on_one_process.setdefault(case, bitwise)
            for name, value in bitwise.items():
                assert torch.equal(value, on_one_process[case][name]), (case, name)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case("gpt2"),
        Case("gpt2", is_packed=True),
        Case("lfm2", is_packed=True),
        Case("llama"),
        Case("llama", is_packed=True),
    ],
    ids=lambda case: f"{case.model_name}{'-packed' * case.is_packed}",
)
def test_the_column_of_weights_gives_the_step_and_the_eval_loss_of_a_plain_loop(
    accelerator: Accelerator, case: Case, accumulation: int
) -> None:
    expected = plain_step(case)
    model = case.model()
    batch = case.global_batch()
    micro_batch = ROWS // accumulation
    batches = case.micro_batches(model, batch, micro_batch)
    engine = engine_of(accelerator, model)
    of_no_row = torch.zeros(0)
    eval_batch = LocalBatch(batch, micro_batch, of_no_row, of_no_row, 0, 0)
    prepared = tuple(map(model.prepare_batch, eval_batch.batches))
    eval_batch = dataclasses.replace(eval_batch, prepared=prepared)

    metrics = evaluate(engine, [eval_batch], text_bytes=100)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    results = make_step(engine, optimizer, batches)

    assert_same_step(results, expected)
    expected_loss = float(expected["loss"])
    assert metrics == {
        "loss": pytest.approx(expected_loss, rel=1e-5),
        "perplexity": pytest.approx(math.exp(expected_loss), rel=1e-5),
    }
