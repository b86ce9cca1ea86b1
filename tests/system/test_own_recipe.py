"""docs/tutorials/own-recipe.md: data, a model and a metric of one's own, in a recipe that is the same run on any layout."""

import re
from pathlib import Path

import pytest

from llmtrain import DataConfig, tokenize
from llmtrain.errors import UserError
from llmtrain.training.recipe_model import build_recipe_model
from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    PYTHON,
    ROOT,
    TINY,
    accelerate,
    long_form,
    run,
    series,
    torchrun,
    write_chats,
)

FLAGS = [
    "--max_steps",
    "60",
    "--eval_steps",
    "30",
    "--logging_steps",
    "5",
    "--report_to",
    "none",
    "--output_dir",
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    (code,) = re.findall(
        r"```python\n(.*?)```",
        (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text(),
        re.DOTALL,
    )
    assert code.count("\n") < 80
    path = tmp_path_factory.mktemp("own") / "sums.py"
    path.write_text(code)
    return path


def test_a_recipe_with_data_a_model_and_a_metric_of_its_own_learns(
    recipe: Path, tmp_path: Path
) -> None:
    done = run_forked([*PYTHON, str(recipe), *FLAGS, str(tmp_path / "run")]).assert_ok()
    losses, right = series(tmp_path / "run", "eval/loss"), series(tmp_path / "run", "eval/accuracy")
    assert [*losses] == [*right] == [0, 30, 60]
    assert losses[60] < 0.6 * losses[0]
    assert right[0] < 0.3 < right[60] < 1
    assert f"  accuracy {right[60]:.4g}\n" in done.out
    model = tmp_path / "run" / "model"
    how = f'safetensors.torch: load_model(Recurrent(...), "{model}/model.safetensors")'
    assert f"model     {model}  ({how})\n" in done.out
    assert "failed" not in done.err
    ended = run_forked(
        [*PYTHON, str(recipe), "--dataset", "a.txt", *FLAGS, str(tmp_path / "other")]
    )
    assert (ended.status, ended.err.count("\n")) == (2, 1)
    assert "has its own data" in ended.err


def test_the_recipe_can_be_planned(recipe: Path) -> None:
    planned = build_recipe_model(str(recipe), ["--max_steps", "60"], "no")
    assert (planned.class_name, planned.settings.optim.max_steps) == ("Recurrent", 60)
    assert sum(p.numel() for p in planned.model.parameters()) == 58_381


def test_the_objective_of_the_page_trains_and_logs_its_metric(recipe: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
    (objective,) = re.findall(r"```py\n(class LabelSmoothing.*?)```", page, re.DOTALL)
    (end,) = re.findall(r"```py\n( +return lt.fit.*LabelSmoothing.*\n)```", page)
    text = recipe.read_text()
    text = text.replace(
        "from torch import nn\n", "from torch import nn\nfrom torch.nn import functional as F\n"
    )
    text = text.replace("def main(", f"{objective}\n\ndef main(")
    text = re.sub(" +return lt.fit.*\n", end, text)
    (tmp_path / "smoothed.py").write_text(text)

    run_forked([*PYTHON, str(tmp_path / "smoothed.py"), *FLAGS, str(tmp_path / "run")]).assert_ok()
    losses = series(tmp_path / "run", "eval/loss")
    assert losses[60] < 0.8 * losses[0]
    # The metric of the recipe and that of the objective count the same predictions.
    right = series(tmp_path / "run", "eval/right")
    assert right == pytest.approx(series(tmp_path / "run", "eval/accuracy"))
    assert right[60] > 0.3
    assert series(tmp_path / "run", "train/right")
    assert not series(tmp_path / "run", "eval/perplexity")


def test_the_loss_on_a_model_of_transformers_is_the_nll_and_the_penalty(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
    (code,) = re.findall(r'```py\n("""Fine-tune a model with a z-loss.*?)```', page, re.DOTALL)
    (tmp_path / "zloss.py").write_text(code)
    write_chats(tmp_path / "chats.jsonl")
    flags = [
        *("--dataset", str(tmp_path / "chats.jsonl"), "--tokenizer", "byte"),
        *("--config_overrides", "hidden_size=32,num_hidden_layers=2,intermediate_size=64"),
        *("--max_length", "128", "--max_steps", "4", "--logging_steps", "1"),
        *("--report_to", "none", "--output_dir"),
    ]
    run_forked([*PYTHON, str(tmp_path / "zloss.py"), *flags, str(tmp_path / "z")]).assert_ok()
    run_forked([*PYTHON, str(FINETUNE), *flags, str(tmp_path / "plain")]).assert_ok()
    share = series(tmp_path / "z", "eval/penalty_share")[0]
    loss = series(tmp_path / "z", "eval/loss")[0]
    # The penalty comes on top of the usual loss, here at the same initial weights.
    assert 0 < share < 0.1
    assert loss * (1 - share) == pytest.approx(series(tmp_path / "plain", "eval/loss")[0], rel=1e-5)


@pytest.mark.parametrize("architecture", ["gpt2", "lfm2"])
def test_the_same_loss_works_with_the_models_of_gpt(architecture: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
    (code,) = re.findall(r'```py\n("""Fine-tune a model with a z-loss.*?)```', page, re.DOTALL)
    (tmp_path / "zloss.py").write_text(code.replace("finetune", "gpt"))
    flags = [
        *TINY,
        *("--architecture", architecture, "--isolate_documents"),
        *("--max_steps", "2", "--warmup_steps", "1", "--eval_fraction", "0.001"),
        *("--report_to", "none", "--output_dir"),
    ]
    run_forked([*PYTHON, str(tmp_path / "zloss.py"), *flags, str(tmp_path / "z")]).assert_ok()
    run_forked([*PYTHON, str(GPT), *flags, str(tmp_path / "plain")]).assert_ok()
    share = series(tmp_path / "z", "eval/penalty_share")[0]
    loss = series(tmp_path / "z", "eval/loss")[0]
    assert 0 < share < 0.1
    assert loss * (1 - share) == pytest.approx(series(tmp_path / "plain", "eval/loss")[0], rel=1e-5)


def test_the_sharded_recipe_of_the_page_keeps_its_metric(recipe: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "own-recipe.md").read_text()
    pattern = r"# in __init__, instead of self.layer\n(.*?\n)\n(    def predict.*?)```"
    ((layers, predict),) = re.findall(pattern, page, re.DOTALL)
    code = recipe.read_text()
    code = re.sub(r" +self\.layer = .*\n", layers, code)
    code = re.sub(r"    def predict.*?\n\n", predict + "\n", code, flags=re.DOTALL)
    (tmp_path / "sharded.py").write_text(code)

    command = [str(tmp_path / "sharded.py"), "--max_steps", "4", "--report_to", "none"]
    launcher = accelerate("fsdp2", "--mixed_precision", "no")
    run_forked([*launcher, *command, "--output_dir", str(tmp_path / "two")]).assert_ok()
    run_forked([*PYTHON, *command, "--output_dir", str(tmp_path / "one")]).assert_ok()
    for name in ("eval/loss", "eval/accuracy"):
        on_one = series(tmp_path / "one", name)
        assert [*on_one] == [0, 4]
        assert series(tmp_path / "two", name) == pytest.approx(on_one, rel=1e-4)


@long_form
def test_two_processes_measure_what_one_does(recipe: Path, tmp_path: Path) -> None:
    run_forked([*PYTHON, str(recipe), *FLAGS, str(tmp_path / "one")]).assert_ok()
    run_forked([*torchrun(2), str(recipe), *FLAGS, str(tmp_path / "two")]).assert_ok()
    for key in ("train/loss", "eval/loss", "eval/accuracy"):
        assert series(tmp_path / "two", key) == pytest.approx(
            series(tmp_path / "one", key), rel=1e-4
        )
    run([str(BIN / "llmtrain"), "verify", "layout", str(recipe)], timeout=200).assert_ok()


def test_what_a_function_yields_is_tokenised_anew_when_it_changes_and_bad_records_are_one_line() -> (
    None
):
    data = DataConfig(tokenizer="byte", eval_fraction=0.0)
    texts = ["one", "two"]
    first = tokenize(data, 8, records=lambda: iter(texts)).metadata
    assert (first.records, first.train_tokens) == (2, 2 * 4)
    texts.append("three")
    assert tokenize(data, 8, records=lambda: iter(texts)).metadata.records == 3
    assert (
        tokenize(data, 8, records=lambda: iter([{"text": "one"}, {"text": "two"}])).metadata.records
        == 2
    )
    for bad, says in (
        ([3], "record 0 is 3, neither text nor a dictionary of fields"),
        ([{"body": "a"}], "no field 'text'"),
    ):
        with pytest.raises(UserError, match=says):
            tokenize(data, 8, records=lambda bad=bad: iter(bad))
