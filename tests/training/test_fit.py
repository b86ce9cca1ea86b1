"""`fit` makes the steps of recipes/gpt.py, and says in one line which argument is wrong."""

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.interfaces.batches import Batch
from recipes import gpt
from tests.launching import TINY, series


class DoubledLoss(lt.Objective):
    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(2 * model.nll(**batch))


class Bigram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(8, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return lt.summed_nll(self.logits(input_ids[:, :-1]), labels[:, 1:])


def build(*_: Any) -> nn.Module:
    return Bigram()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def rows() -> lt.Tokenized:
    table = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8})
    return lt.Tokenized.of(table, None, eval=table)


def settings(folder: Path) -> Any:
    return lt.Settings(
        data=lt.BatchConfig(global_batch_size=4),
        optim=lt.OptimConfig(max_steps=2, warmup_steps=0),
        log=lt.LogConfig(logging_steps=1),
        run=lt.RunConfig(str(folder), report_to=["none"]),
    )


def test_fit_trains_as_the_recipe_that_makes_each_step_itself(
    text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file), "--eval_steps", "2", "--report_to", "none"]
    run_of_recipe: Any = gpt.main([*flags, "--output_dir", str(tmp_path / "recipe")])

    parsed = lt.parse(gpt.DEFAULTS, [*flags, "--output_dir", str(tmp_path / "fit")])
    run = lt.fit(parsed, gpt.tokenized(parsed), gpt.build)

    assert run.is_finished
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert series(run.folder, key) == series(run_of_recipe.folder, key)
    expected_weights = run_of_recipe.bundle.model.state_dict()
    for name, weight in run.bundle.model.state_dict().items():
        assert torch.equal(weight, expected_weights[name]), name
    assert run.fingerprint == run_of_recipe.fingerprint


def test_fit_trains_with_the_parts_of_the_user(tmp_path: Path) -> None:
    callback = lt.Callback()
    objective = DoubledLoss()

    def first_token(model: Any, batch: Batch) -> dict[str, Any]:
        first_tokens = batch["input_ids"][:, 0]
        return {"first": (first_tokens.sum(), len(first_tokens))}

    run = lt.fit(
        settings(tmp_path / "run"),
        rows(),
        lambda *_: lt.ModelBundle(Bigram(), objective=lt.Objective()),
        objective=objective,
        optimizer=sgd,
        callbacks=[callback],
        metrics=[first_token],
    )

    assert run.parts.objective is objective
    assert type(run.parts.optimizer) is torch.optim.SGD
    assert run.parts.callbacks == (callback,)
    assert series(run.folder, "eval/first")[0] == 1
    with_usual_loss = lt.fit(settings(tmp_path / "usual"), rows(), build, optimizer=sgd)
    usual_loss = series(with_usual_loss.folder, "eval/loss")[0]
    assert series(run.folder, "eval/loss")[0] == 2 * usual_loss


class NeedsSecondHead(lt.Objective):
    """An objective that refuses the model."""

    def check(self, model: Any) -> None:
        raise UserError("the model has no second head.")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"optimizer": sgd(Bigram())}, "this SGD was made too early"),
        ({"optimizer": torch.optim.SGD}, "optimizer: the class SGD"),
        ({"optimizer": lambda model: None}, "optimizer: None"),
        ({"objective": DoubledLoss}, "objective: the class DoubledLoss"),
        ({"objective": NeedsSecondHead()}, "the model has no second head"),
        ({"build": Bigram()}, "build: Bigram"),
        ({"build": lambda *_: None}, "build returned None"),
        ({"rows": [[1, 2, 3]]}, "rows: "),
        ({"callbacks": [lt.Callback]}, "callbacks: the class Callback"),
        ({"callbacks": lt.Callback()}, "callbacks: the Callback object is no list"),
        ({"metrics": [lambda model, batch: {}]}, "metrics: a lambda has no name"),
        ({"metrics": [len]}, "metrics: .* must take two arguments"),
        ({"metrics": [3]}, "metrics: 3"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(
    arguments: dict[str, Any], named: str, tmp_path: Path
) -> None:
    valid_arguments = {"rows": rows(), "build": build}

    with pytest.raises(UserError, match=named):
        lt.fit(settings(tmp_path / "run"), **(valid_arguments | arguments))

    assert not (tmp_path / "run").exists()
