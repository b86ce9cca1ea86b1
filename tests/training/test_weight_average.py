"""The average of the weights is that of its formula, and evaluations measure it."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.record import saver
from llmtrain.record.history import read_lines
from llmtrain.record.tensor_files import read_tensors
from llmtrain.training.run import Run

STEPS = 12


class Weights(lt.Callback):
    """Keeps the weights after each step."""

    settings = None

    def setup(self, training: Any) -> None:
        self.model = training.model
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        self.steps.append({n: p.detach().double() for n, p in self.model.named_parameters()})

    def mean(self, shares: list[float]) -> dict[str, torch.Tensor]:
        """Return the sum of the weights of all steps, each times its share."""
        return {
            name: sum(share * step[name] for share, step in zip(shares, self.steps, strict=True))
            for name in self.steps[0]
        }


def exponential(decay: float) -> list[float]:
    """Return the share of each step in an exponential average, which begins as a mean."""
    shares: list[float] = []
    for count in range(1, STEPS + 1):
        weight = max(1 / count, 1 - decay)
        shares = [(1 - weight) * share for share in shares] + [weight]
    return shares


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"decay": 0.75}, exponential(0.75)),
        ({"tail": 0.2}, [0.0] * 9 + [1 / 3] * 3),  # 2.4 steps, rounded up
        ({"tail": 1.0}, [1 / 12] * 12),
    ],
    ids=["decay", "tail", "all steps"],
)
def test_the_average_is_that_of_its_formula_in_each_run(
    options: dict[str, float], shares: list[float], train_gpt: Callable[..., Run]
) -> None:
    average = lt.WeightAverage(**options)
    for _ in range(2):
        weights = Weights()
        train_gpt(callbacks=[weights, average], resume="never")
        expected = weights.mean(shares)
        for name, value in average.state_dict()["average"].items():
            torch.testing.assert_close(value.double(), expected[name], rtol=1e-6, atol=1e-7)


def test_the_average_is_evaluated_and_exported_and_the_weights_stay(
    train_gpt: Callable[..., Run],
) -> None:
    weights = Weights()
    average = lt.WeightAverage(decay=0.9, folder="model-average")
    run = train_gpt(callbacks=[weights, average])

    evaluations = [e for e in read_lines(run.folder / "metrics.jsonl") if "eval/loss" in e]
    assert ["eval/average/loss" in entry for entry in evaluations] == [False, True, True, True]
    assert evaluations[-1]["eval/average/loss"] != evaluations[-1]["eval/loss"]

    for name, tensor in read_tensors(run.folder / "checkpoints" / "step-00000012" / "model"):
        assert torch.equal(tensor.double(), weights.steps[-1][name]), name
    exported = dict(read_tensors(run.folder / "model-average"))
    final = dict(read_tensors(run.folder / "model"))
    assert exported.keys() == final.keys()
    assert not any(torch.equal(exported[name], final[name]) for name in exported)


def test_the_average_is_exported_after_the_save_in_the_background(
    train_gpt: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both may use the same process group, and a save that is under way would mix with it."""
    events: list[str] = []
    commit = saver.Saver._commit
    write_model = saver.write_model

    def slow_commit(self: Any, step: int, *arguments: Any) -> None:
        time.sleep(0.3)
        commit(self, step, *arguments)
        events.append(f"saved {step}")

    def recorded_write(folder: Path, *arguments: Any, **options: Any) -> None:
        events.append(folder.name)
        write_model(folder, *arguments, **options)

    monkeypatch.setattr(saver.Saver, "_commit", slow_commit)
    monkeypatch.setattr(saver, "write_model", recorded_write)
    train_gpt(callbacks=[lt.WeightAverage(decay=0.9, folder="model-average")], async_save=True)
    assert events == ["saved 4", "saved 8", "saved 12", "model-average", "model"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({}, "decay"),
        ({"decay": 0.9, "tail": 0.1}, "decay"),
        ({"decay": 1.0}, r"decay 1\.0"),
        ({"tail": 0.0}, r"tail 0\.0"),
        ({"decay": 0.9, "folder": "metrics.jsonl"}, "folder 'metrics.jsonl'"),
        ({"decay": 0.9, "folder": "../average"}, "folder '../average'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        lt.WeightAverage(**arguments)


def test_a_path_that_exists_in_the_run_folder_is_not_replaced(
    train_gpt: Callable[..., Run], tmp_path: Path
) -> None:
    class Notes(lt.Callback):
        """A callback of the user that writes into the run folder."""

        settings = None

        def setup(self, training: Any) -> None:
            (training.folder / "notes").write_text("mine")

    average = lt.WeightAverage(decay=0.9, folder="notes")
    with pytest.raises(UserError, match="notes exists; name another folder"):
        train_gpt(callbacks=[Notes(), average])
    assert (tmp_path / "run" / "notes").read_text() == "mine"
