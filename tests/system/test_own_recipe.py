"""docs/tutorials/own-recipe.md: a recipe with its own data, model, metric and objective."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain import DataConfig, tokenize
from llmtrain.errors import UserError
from llmtrain.training.recipe_model import build_recipe_model
from tests.forked import run_forked
from tests.launching import (
    BIN,
    PYTHON,
    ROOT,
    Ended,
    accelerate,
    long_form,
    run,
    series,
)

PAGE = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
FLAGS = shlex.split("--max_steps 60 --eval_steps 30 --logging_steps 5 --report_to none")


def code_of_page(pattern: str) -> str:
    """Return the code block of the page that a pattern describes by its only group."""
    [code] = re.findall(pattern, PAGE, re.DOTALL)
    return code


def train(
    recipe: Path, folder: Path, launcher: list[str] = PYTHON, flags: list[str] = FLAGS
) -> Ended:
    command = [*launcher, str(recipe), *flags, "--output_dir", str(folder)]
    return run_forked(command).assert_ok()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    code = code_of_page(r"```python\n(.*?)```")
    path = tmp_path_factory.mktemp("own") / "sums.py"
    path.write_text(code)
    return path


# --- the recipe


def test_the_recipe_learns_and_logs_its_metric(recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    train(recipe, folder)

    losses = series(folder, "eval/loss")
    accuracies = series(folder, "eval/accuracy")
    assert [*losses] == [*accuracies] == [0, 30, 60]
    assert losses[60] < 0.6 * losses[0]
    assert accuracies[0] < 0.3
    assert 0.3 < accuracies[60] < 1


def test_the_recipe_can_be_planned(recipe: Path) -> None:
    plan = build_recipe_model(str(recipe), ["--max_steps", "60"], "no")
    assert sum(parameter.numel() for parameter in plan.model.parameters()) == 58_381


@long_form
def test_two_processes_make_the_run_of_one(recipe: Path) -> None:
    verify = [str(BIN / "llmtrain"), "verify", "layout", "--layouts", "2", "--steps", "4"]
    run([*verify, str(recipe)], timeout=200).assert_ok()


@long_form
def test_the_sharded_recipe_of_the_page_has_the_same_metric(recipe: Path, tmp_path: Path) -> None:
    pattern = r"# in __init__, instead of self.layer\n(.*?\n)\n(    def predict.*?)```"
    [(layers, predict)] = re.findall(pattern, PAGE, re.DOTALL)
    code = recipe.read_text()
    code = re.sub(r" +self\.layer = .*\n", layers, code)
    code = re.sub(r"    def predict.*?\n\n", predict + "\n", code, flags=re.DOTALL)
    sharded_recipe = tmp_path / "sharded.py"
    sharded_recipe.write_text(code)

    flags = shlex.split("--max_steps 4 --report_to none")
    fsdp2 = accelerate("fsdp2")
    train(sharded_recipe, tmp_path / "on-one", flags=flags)
    train(sharded_recipe, tmp_path / "on-two", launcher=fsdp2, flags=flags)

    for key in ("eval/loss", "eval/accuracy"):
        expected = series(tmp_path / "on-one", key)
        assert [*expected] == [0, 4]
        assert series(tmp_path / "on-two", key) == pytest.approx(expected, rel=1e-4)


# --- objectives


def test_the_objective_of_the_page_trains_and_logs_its_metric(recipe: Path, tmp_path: Path) -> None:
    objective = code_of_page(r"```py\n(class LabelSmoothing.*?)```")
    [end_of_main] = re.findall(r"```py\n( +return lt.fit.*LabelSmoothing.*\n)```", PAGE)
    torch_import = "from torch import nn\n"
    code = recipe.read_text()
    code = code.replace(torch_import, f"{torch_import}from torch.nn import functional as F\n")
    code = code.replace("def main(", f"{objective}\n\ndef main(")
    code = re.sub(" +return lt.fit.*\n", end_of_main, code)
    smoothing_recipe = tmp_path / "smoothing.py"
    smoothing_recipe.write_text(code)
    folder = tmp_path / "run"

    train(smoothing_recipe, folder)

    losses = series(folder, "eval/loss")
    assert losses[60] < 0.8 * losses[0]
    # "right" is a metric of the objective, and "accuracy" one of the recipe.
    accuracies = series(folder, "eval/right")
    assert accuracies == pytest.approx(series(folder, "eval/accuracy"))
    assert accuracies[60] > 0.3
    assert series(folder, "train/right")
    assert not series(folder, "eval/perplexity"), "the loss is no nll"


# --- records from a function


def tokenized_metadata(records: Callable[[], object]):
    data = DataConfig(tokenizer="byte", eval_fraction=0.0)
    return tokenize(data, 8, records=records).metadata


def test_records_of_a_function_are_tokenised_again_if_they_change() -> None:
    texts = ["one", "two"]
    metadata = tokenized_metadata(lambda: iter(texts))
    assert metadata.records == 2
    assert metadata.train_tokens == 2 * 4, "three bytes each, and the end of the text"

    texts.append("three")
    assert tokenized_metadata(lambda: iter(texts)).records == 3


@pytest.mark.parametrize(
    ("records", "message"),
    [([3], "record 0 is 3"), ([{"text": "a"}, {"body": "a"}], "no field 'text'")],
)
def test_a_bad_record_of_a_function_is_an_error(records: list[object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tokenized_metadata(lambda: iter(records))
