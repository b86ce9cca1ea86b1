"""`fit` is the steps of recipes/gpt.py, and says in one line which argument is wrong."""

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


class Doubled(lt.Objective):
    """The usual loss, twice."""

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


def test_fit_computes_what_the_recipe_that_is_written_out_computes(
    text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file), "--logging_steps", "1", "--eval_steps", "2"]
    flags += ["--report_to", "none", "--output_dir"]
    written_out: Any = gpt.main([*flags, str(tmp_path / "written-out")])

    parsed = lt.parse(gpt.DEFAULTS, [*flags, str(tmp_path / "fit")])
    run = lt.fit(parsed, gpt.tokenized(parsed), gpt.build)

    assert run.is_finished
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert series(run.folder, key) == series(written_out.folder, key)
    weights = written_out.bundle.model.state_dict()
    for name, weight in run.bundle.model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert run.fingerprint == written_out.fingerprint


class NeedsHead(lt.Objective):
    """An objective that the model does not fit."""

    def check(self, model: Any) -> None:
        raise UserError("the model has no second head.")


def test_the_objective_that_is_trained_checks_the_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the model has no second head\."):
        lt.fit(settings(tmp_path / "run"), rows(), build, optimizer=sgd, objective=NeedsHead())


def test_fit_trains_with_what_the_user_brings(tmp_path: Path) -> None:
    callback = lt.Callback()
    objective = Doubled()

    def rank(model: Any, batch: Batch) -> dict[str, Any]:
        return {"first": (batch["input_ids"][:, 0].sum(), batch["input_ids"].shape[0])}

    run = lt.fit(
        settings(tmp_path / "run"),
        rows(),
        lambda *_: lt.ModelBundle(Bigram(), objective=lt.Objective()),
        objective=objective,
        optimizer=sgd,
        callbacks=[callback],
        metrics=[rank],
    )

    assert run.parts.objective is objective
    assert type(run.parts.optimizer) is torch.optim.SGD
    assert run.parts.callbacks == (callback,)
    plain = lt.fit(settings(tmp_path / "plain"), rows(), build, optimizer=sgd)
    assert series(run.folder, "eval/loss")[0] == 2 * series(plain.folder, "eval/loss")[0]
    assert series(run.folder, "eval/first")[0] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"optimizer": sgd(Bigram())}, "this SGD was made too early, because the model exists"),
        ({"optimizer": torch.optim.SGD}, "optimizer: the class SGD is no function of the model"),
        ({"optimizer": "adamw"}, "optimizer: 'adamw' is no function of the model"),
        ({"optimizer": lambda model: model}, r"optimizer: Bigram\(.* is no torch optimizer"),
        ({"optimizer": lambda model: None}, "optimizer: None is no torch optimizer; make one of"),
        ({"objective": Doubled}, "objective: the class Doubled is no llmtrain.Objective"),
        ({"build": Bigram()}, r"build: Bigram\(.* is no function; pass a function of the settings"),
        ({"build": lambda *_: None}, "build returned None; return a torch module or an"),
        ({"rows": [[1, 2, 3]]}, r"rows: \[\[1, 2, 3\]\] is no llmtrain.Tokenized; make the rows"),
        ({"callbacks": [lt.Callback]}, "callbacks: the class Callback is no llmtrain.Callback"),
        (
            {"callbacks": lt.Callback()},
            "callbacks: the Callback object is no list; write callbacks=",
        ),
        ({"metrics": build}, "metrics: the function build is no list; write metrics="),
        ({"metrics": [lambda model, batch: {}]}, "metrics: a lambda has no name for the log"),
        ({"metrics": [len]}, "metrics: .* len.* must take two arguments"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    given = {"rows": rows(), "build": build, **arguments}
    with pytest.raises(UserError, match=message):
        lt.fit(settings(tmp_path / "run"), **given)
    assert not (tmp_path / "run").exists()
