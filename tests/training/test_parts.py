"""The parts of a user are treated like the package's: settings, state, errors at the start."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torch import nn

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import Batch, LocalBatch
from llmtrain.interfaces.callback import StepInfo, StepResult
from llmtrain.interfaces.part import Part, json_entries, settings_of
from llmtrain.record.checkpoint import checkpoints
from llmtrain.training.parts import Parts
from llmtrain.training.run import Run
from recipes import gpt, preference
from tests.launching import TINY, series
from tests.training.small_runs import StopAfter


class Scaled(lt.Objective):
    """The usual loss, times a factor."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def loss(self, model: Any, batch: Batch, extra: Batch) -> lt.LossSums:
        return lt.LossSums(self.factor * model.nll(**batch))


class Threshold(lt.Callback):
    """A callback with a setting."""

    def __init__(self, limit: float) -> None:
        self.limit = limit


def count(model: Any, batch: Batch) -> Any:
    return {"count": (batch["labels"].sum(), batch["labels"].sum())}


# --- the settings


class Base:
    width = 3


@dataclasses.dataclass
class Section:
    size: int = 2
    limit: float = math.inf


class Described(Base, Part):
    rate = 0.5
    _private = 1

    def __init__(self) -> None:
        self.weights = torch.ones(2)
        self.shape = (1, [2])
        self.section = Section()
        self.limits = {"low": math.inf, 3: None}
        self._seen = 0


def test_the_settings_are_the_class_and_all_public_fields_that_are_json() -> None:
    assert settings_of(Described()) == {
        "class": "Described",
        "width": 3,
        "rate": 0.5,
        "shape": [1, [2]],
        "section": {"size": 2, "limit": None},
        "limits": {"low": None, "3": None},
    }


def test_a_part_that_gives_its_settings_has_no_others() -> None:
    part = Described()
    part.settings = {"teacher": "v1"}
    assert settings_of(part) == {"class": "Described", "teacher": "v1"}

    for settings in ({"teacher": torch.ones(2)}, "v1"):
        part.settings = settings
        with pytest.raises(UserError, match="the settings of Described are no dictionary of JSON"):
            settings_of(part)


def test_the_settings_do_not_depend_on_where_a_flag_was_set() -> None:
    def settings_with(*flags: str) -> JsonObject:
        return json_entries({"config": lt.parse(preference.DEFAULTS, [*flags]).preference})

    assert settings_with("--beta", "0.1") == settings_with()
    assert settings_with("--beta", "0.2") != settings_with()


def test_a_changed_part_makes_a_new_run_and_the_log_says_why(
    train_gpt: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    def folder_of(
        factor: float = 1.0,
        limit: float = 1.0,
        metrics: Sequence[Any] = (count,),
        optimizer: Any = None,
    ) -> str:
        run = train_gpt(
            objective=Scaled(factor),
            callbacks=[Threshold(limit), StopAfter(1)],
            metrics=metrics,
            optimizer=optimizer,
        )
        return run.folder.name

    assert folder_of() == "run"
    assert folder_of(factor=2.0) == "run-2"
    assert "factor 1.0 there, 2.0 here" in capsys.readouterr().out
    assert folder_of(limit=2.0) == "run-3"
    assert "callbacks: Threshold" in capsys.readouterr().out
    assert folder_of(metrics=()) == "run-4"
    assert "metrics: count" in capsys.readouterr().out
    assert folder_of(optimizer=sgd) == "run-5"
    assert "class AdamW there, SGD here" in capsys.readouterr().out


def test_muon_has_one_fingerprint_in_every_mixed_precision() -> None:
    """Muon computes in that precision, and a run may be resumed with another one."""
    matrix = nn.Linear(2, 2, bias=False).weight

    def fingerprint_with(dtype: torch.dtype | None) -> JsonObject:
        muon = lt.Muon([matrix], lr=0.1, weight_decay=0.0, dtype=dtype)
        return Parts(lt.Objective(), muon).optimizer_fingerprint()

    assert fingerprint_with(torch.bfloat16) == fingerprint_with(None)


def test_a_run_is_resumed_without_a_callback_and_by_name_with_another_one(
    train_gpt: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    stopped = train_gpt(objective=Scaled(1.0), callbacks=[Threshold(1.0), StopAfter(5)])

    with pytest.raises(UserError, match=r"factor 1\.0 there, 3\.0 here"):
        train_gpt(objective=Scaled(3.0), callbacks=[Threshold(1.0)], resume=str(stopped.folder))
    by_name = train_gpt(
        objective=Scaled(1.0), callbacks=[Threshold(2.0)], resume=str(stopped.folder)
    )
    resumed = train_gpt(objective=Scaled(1.0), callbacks=[Threshold(1.0)])

    assert by_name.resume_point.step == 5
    assert "changed   callbacks: Threshold" in capsys.readouterr().out
    assert resumed.folder == stopped.folder, "the callback that stopped it changes nothing"
    assert resumed.resume_point.step == 5
    assert resumed.is_finished


def test_a_finished_run_that_is_resumed_by_name_makes_no_further_step(
    train_gpt: Callable[..., Run],
) -> None:
    """A schedule has no value after the last step, and must not be asked for one."""
    finished = train_gpt(schedule=lambda step, max_steps: 1 / (step + 1))

    resumed = train_gpt(
        schedule=lambda step, max_steps: 0.5 / (step + 1), resume=str(finished.folder)
    )

    assert resumed.resume_point.step == 12
    assert resumed.is_finished


def test_an_optimizer_may_be_used_for_a_second_run(train_gpt: Callable[..., Run]) -> None:
    """The schedule has changed its learning rate, which is put back when the first run ends."""
    first = train_gpt(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = first.parts.optimizer
    rates_after_first = [group["lr"] for group in optimizer.param_groups]

    second = train_gpt(model=first.bundle.model, optimizer=lambda model: optimizer, resume="never")

    assert rates_after_first == [0.1]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    logged_rates = first.history()["train/learning_rate"].dropna()
    assert logged_rates.nunique() > 1
    assert second.history()["train/learning_rate"].dropna().equals(logged_rates)


def test_parameters_that_the_optimizer_leaves_out_are_noted(
    train_gpt: Callable[..., Run], capsys: pytest.CaptureFixture[str]
) -> None:
    train_gpt(optimizer=lambda model: torch.optim.SGD([next(model.parameters())], lr=1e-3))

    assert "the optimizer SGD leaves" in capsys.readouterr().err


# --- the order of hooks


class HookRecorder(lt.Callback):
    """Records its hooks, and how far the step is when they are called."""

    def setup(self, training: Any) -> None:
        self._weight = next(training.model.parameters())
        self._checkpoints = training.folder / "checkpoints"
        self.calls: list[str] = []

    def on_step_begin(self, batch: LocalBatch) -> None:
        self._before_step = self._weight.detach().clone()
        self.calls.append("begin")

    def on_step_end(self, batch: LocalBatch, result: StepResult, info: StepInfo) -> None:
        assert info.is_last == (info.step == 12)
        has_stepped = not torch.equal(self._weight, self._before_step)
        self.calls.append(f"end {info.step} stepped={has_stepped}")

    def on_step_result(self, step: int, result: StepResult) -> None:
        self.calls.append(f"result {step}")

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/loss" in metrics:
            self.calls.append(f"log {step}")

    def on_evaluate(self, evaluate: Callable[[], Mapping[str, float]]) -> Mapping[str, float]:
        self.calls.append("evaluate")
        return {}

    def state_dict(self) -> dict[str, Any]:
        if hasattr(self, "calls"):
            self.calls.append(f"state after {len(checkpoints(self._checkpoints))} saves")
        return {}


def test_the_hooks_of_a_step_run_after_its_optimizer_step_and_before_its_save(
    train_gpt: Callable[..., Run],
) -> None:
    recorder = HookRecorder()

    train_gpt(callbacks=[recorder])

    assert recorder.calls.index("evaluate") < recorder.calls.index("begin")
    # Step 4 ends with an evaluation and a checkpoint.
    step_4 = recorder.calls.index("end 4 stepped=True")
    assert recorder.calls[step_4 - 1 : step_4 + 6] == [
        "begin",
        "end 4 stepped=True",
        "result 4",
        "log 4",
        "evaluate",
        "state after 0 saves",
        "begin",
    ]
    assert "state after 1 saves" in recorder.calls


# --- lt.fit


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
    objective = Scaled(2.0)

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
        ({"optimizer": sgd(Bigram())}, "optimizer: SGD .* is not a function of the model"),
        ({"optimizer": torch.optim.SGD}, "optimizer: the class SGD"),
        ({"optimizer": lambda model: None}, "optimizer: None"),
        ({"optimizer": lambda model: sgd(Bigram())}, "parameter of the optimizer SGD"),
        ({"objective": Scaled}, "objective: the class Scaled"),
        ({"objective": NeedsSecondHead()}, "the model has no second head"),
        ({"build": Bigram()}, "build: Bigram"),
        ({"build": lambda *_: None}, "build returned None"),
        ({"rows": [[1, 2, 3]]}, "rows: "),
        ({"callbacks": [lt.Callback]}, "callbacks: the class Callback"),
        ({"callbacks": lt.Callback()}, "callbacks: the Callback object is not a list"),
        ({"callbacks": [Threshold(1), Threshold(2)]}, "called Threshold"),
        (
            {"metrics": [lambda model, batch: {}]},
            "'<lambda>' cannot be the name of a FunctionMetric",
        ),
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
