"""Epochs and fractions of the run become steps once the rows are known."""

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.config.command_line import parse
from llmtrain.data.config import DataConfig
from llmtrain.data.shuffle import Mixture
from llmtrain.errors import UserError
from llmtrain.launching.children import short_run_flags
from llmtrain.training.recipe_model import build_recipe_model
from llmtrain.training.settings import OptimConfig, Settings
from llmtrain.training.steps import describe_steps, settle
from tests.launching import FINETUNE, GPT, ROOT, SMALL_LLAMA, TINY, metrics, read_json, write_chats

DEFAULTS = Settings(
    data=DataConfig(global_batch_size=8),
    optim=OptimConfig(max_steps=400, warmup_steps=20),
)


def rows_of(count: int, **attributes: Any) -> Any:
    """Rows without content, each with 10 target tokens."""
    metadata = SimpleNamespace(train_tokens=10 * count)
    rows = {
        "train": range(count),
        "mixture": None,
        "in_order": False,
        "metadata": metadata,
        "positions": 16,
        "train_names": (),
    }
    return SimpleNamespace(**{**rows, **attributes})


def settled(*argv: str, rows: Any = None, defaults: Settings = DEFAULTS) -> Settings:
    settings = parse(defaults, list(argv))
    settle(settings, rows or rows_of(98))
    return settings


# --- epochs


@pytest.mark.parametrize(
    ("epochs", "steps"),
    [("1", 13), ("3", 39), ("0.5", 7), ("2.5", 33), ("0.001", 1)],
)
def test_an_epoch_ends_with_a_batch_that_may_be_filled_up(epochs: str, steps: int) -> None:
    settings = settled("--num_train_epochs", epochs)
    assert settings.optim.max_steps == steps


def test_an_epoch_of_a_mixture_is_as_many_rows_as_its_sources_hold() -> None:
    rows = rows_of(98, mixture=Mixture([90, 8], [1, 1]))
    assert settled("--num_train_epochs", "2", rows=rows).optim.max_steps == 25  # 196 rows / 8


def test_a_mixture_is_not_ignored_if_rows_keep_their_order() -> None:
    rows = rows_of(98, mixture=Mixture([90, 8], [1, 1]), in_order=True)
    with pytest.raises(UserError, match="--mixture draws rows of its data sets at random"):
        settled(rows=rows)


def test_max_steps_overrides_epochs_with_one_line() -> None:
    settings = settled("--num_train_epochs", "3", "--max_steps", "100")
    assert settings.optim.max_steps == 100
    assert describe_steps(settings, rows_of(98)) == (
        "100 steps = 7.69 epochs of 98 rows, 8 rows per step; 980 target tokens per epoch; "
        "--max_steps overrides --num_train_epochs 3"
    )


def test_epochs_on_the_command_line_override_steps_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("max_steps: 100\n")
    config = ["--config", str(file)]
    assert settled(*config, "--num_train_epochs", "3").optim.max_steps == 39

    file.write_text("max_steps: 100\nnum_train_epochs: 3\n")
    assert settled(*config).optim.max_steps == 100
    file.write_text("num_train_epochs: 3\n")
    assert settled(*config, "--max_steps", "100").optim.max_steps == 100
    assert settled(*config).optim.max_steps == 39


def test_the_log_says_steps_epochs_rows_and_target_tokens() -> None:
    rows = rows_of(3040)
    assert describe_steps(settled("--num_train_epochs", "3", rows=rows), rows) == (
        "1,140 steps = 3 epochs of 3,040 rows, 8 rows per step; 30,400 target tokens per epoch"
    )
    assert describe_steps(settled(rows=rows_of(98)), rows_of(98)).startswith(
        "400 steps = 30.77 epochs of 98 rows"
    )
    assert describe_steps(settled("--max_steps", "1", rows=rows), rows).startswith(
        "1 step = 0.0026 epochs of"
    )


def test_target_tokens_of_a_mixture_follow_its_weights() -> None:
    metadata = SimpleNamespace(source_rows=[60, 40], source_targets=[600, 4000])
    rows = rows_of(100, mixture=Mixture([60, 40], [3, 1]), metadata=metadata)
    # 100 rows, of which 75 have 10 tokens each and 25 have 100.
    assert "; 3,250 target tokens per epoch" in describe_steps(settled(rows=rows), rows)


@pytest.mark.parametrize("epochs", ["0", "-1", "nan", "inf"])
def test_a_number_of_epochs_is_above_0(epochs: str) -> None:
    with pytest.raises(UserError, match="--num_train_epochs"):
        parse(DEFAULTS, ["--num_train_epochs", epochs])


def test_a_data_set_that_the_user_names_is_trained_on_for_the_default_epochs(
    capsys: pytest.CaptureFixture,
) -> None:
    def epochs(*argv: str) -> float | None:
        settings = parse(DEFAULTS, list(argv))
        settings.default_epochs(3.0)
        return settings.optim.num_train_epochs

    assert epochs() is None
    assert epochs("--dataset", "x", "--max_steps", "9") is None
    assert epochs("--dataset", "x", "--num_train_epochs", "2") == 2
    assert capsys.readouterr().out == ""
    assert epochs("--dataset", "x") == 3
    assert capsys.readouterr().out == (
        "default   --num_train_epochs 3 (default for your own data)\n"
    )


# --- fractions of the run


def test_numbers_below_1_are_fractions_of_the_run() -> None:
    names = ("logging_steps", "eval_steps", "save_steps", "warmup_steps")
    settings = settled(*(word for name in names for word in (f"--{name}", "0.07")))
    assert settings.log.logging_steps == 28
    assert settings.eval.eval_steps == 28
    assert settings.run.save_steps == 28
    assert settings.optim.warmup_steps == 28


def test_a_fraction_is_rounded_up_from_the_number_that_was_written() -> None:
    steps = ["--max_steps", "100", "--eval_steps"]
    assert settled(*steps, "0.07").eval.eval_steps == 7  # 0.07 * 100 is a little above 7
    assert settled(*steps, "0.071").eval.eval_steps == 8
    assert settled(*steps, "0.0001").eval.eval_steps == 1


def test_whole_numbers_and_0_keep_their_meaning() -> None:
    settings = settled("--eval_steps", "0", "--save_steps", "1", "--warmup_steps", "0")
    assert settings.eval.eval_steps == 0
    assert settings.run.save_steps == 1
    assert settings.optim.warmup_steps == 0


def test_fractions_follow_the_epochs_and_settling_again_changes_nothing() -> None:
    settings = settled("--num_train_epochs", "3", "--eval_steps", "0.5", "--warmup_steps", "0.1")
    assert (settings.eval.eval_steps, settings.optim.warmup_steps) == (20, 4)
    assert all(
        isinstance(number, int)
        for number in (
            settings.optim.max_steps,
            settings.optim.warmup_steps,
            settings.log.logging_steps,
            settings.eval.eval_steps,
            settings.run.save_steps,
        )
    )
    before = [vars(settings.optim), vars(settings.eval), vars(settings.log), vars(settings.run)]
    settle(settings, rows_of(98))
    assert [
        vars(settings.optim),
        vars(settings.eval),
        vars(settings.log),
        vars(settings.run),
    ] == before


def test_the_default_micro_batch_and_the_data_sets_follow_the_rows() -> None:
    rows = rows_of(98, positions=1024, train_names=("made by the recipe",))
    settings = settled(rows=rows)
    assert settings.data.per_device_train_batch_size == 4  # 4,096 tokens
    assert settings.data.dataset == ["made by the recipe"]
    assert settled("--per_device_train_batch_size", "8", rows=rows).data.is_set(
        "per_device_train_batch_size"
    )
    assert DEFAULTS.data.per_device_train_batch_size == 16
    assert settled().data.dataset == DEFAULTS.data.dataset  # rows without names


def test_the_defaults_of_a_recipe_stay_as_they_are() -> None:
    defaults = Settings(data=DataConfig(), optim=OptimConfig(num_train_epochs=1.0))
    for count, steps in ((32, 1), (3200, 100)):
        settings = Settings(data=DataConfig(), optim=defaults.optim)
        settle(settings, rows_of(count))
        assert settings.optim.max_steps == steps
    assert defaults.optim == OptimConfig(num_train_epochs=1.0)


def test_minus_one_step_is_answered_with_epochs() -> None:
    """Trainer has -1 as the default, which means that the epochs decide."""
    with pytest.raises(UserError) as error:
        parse(DEFAULTS, ["--max_steps", "-1", "--num_train_epochs", "3"])
    assert str(error.value) == (
        "--max_steps -1 is out of range: it must be at least 1; to train for some epochs, use "
        "--num_train_epochs and leave --max_steps out."
    )


@pytest.mark.parametrize("value", ["1.5", "-0.5", "nan", "inf", "many"])
@pytest.mark.parametrize("name", ["warmup_steps", "eval_steps", "save_steps", "logging_steps"])
def test_what_is_neither_steps_nor_a_fraction_is_one_line(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"--{name}"):
        parse(DEFAULTS, [f"--{name}={value}"])


# --- the warmup


@pytest.mark.parametrize("warmup", ["10", "11", "1000"])
def test_a_warmup_as_long_as_the_run_is_an_error_that_says_what_to_do(warmup: str) -> None:
    with pytest.raises(UserError) as error:
        settled("--max_steps", "10", "--warmup_steps", warmup)
    assert str(error.value) == (
        f"--warmup_steps {warmup} leaves no step after the warmup: the run has 10 steps. "
        "Use at most 9, or a fraction of the run such as 0.1."
    )
    assert settled("--max_steps", "10", "--warmup_steps", "9").optim.warmup_steps == 9


def test_a_warmup_as_long_as_the_steps_of_the_user_is_an_error_before_any_data_are_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_steps: 10\nwarmup_steps: 12\n")
    config = ["--config", str(file)]
    with pytest.raises(UserError) as error:
        parse(DEFAULTS, config)
    assert str(error.value) == (
        "--warmup_steps 12 leaves no step after the warmup: the run has 10 steps. Use at most 9, "
        f"or a fraction of the run such as 0.1. ({file})"
    )
    parse(DEFAULTS, [*config, "--max_steps", "13"])
    parse(DEFAULTS, [*config, "--num_train_epochs", "3"])  # they override the file's steps
    parse(DEFAULTS, ["--warmup_steps", "500"])  # a data set may give the run more steps


def test_a_warmup_that_nobody_asked_for_never_fills_the_run(capsys: pytest.CaptureFixture) -> None:
    assert settled("--max_steps", "20").optim.warmup_steps == 2  # the recipe's are 20
    assert capsys.readouterr().out == "default   --warmup_steps 2 (the run has only 20 steps)\n"
    assert settled("--max_steps", "1").optim.warmup_steps == 0
    assert settled("--max_steps", "21").optim.warmup_steps == 20
    assert settled("--max_steps", "1", "--warmup_steps", "0.5").optim.warmup_steps == 0


@pytest.mark.parametrize("steps", [1, 5])
def test_a_short_run_of_a_recipe_shortens_a_warmup_of_the_user(steps: int) -> None:
    """As `llmtrain verify`, `xray` and `plan --calibrate` make them."""
    words = [f"--{name}={value}" for name, value in short_run_flags(steps).items()]
    settings = settled("--warmup_steps", "500", *words)
    assert settings.optim.warmup_steps < settings.optim.max_steps == steps


# --- whole runs


@pytest.fixture(autouse=True)
def _one_after_the_other() -> Iterator[None]:
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Path]:
    """Train with a recipe, without any number of steps; returns the run folder."""

    def train(recipe: str, *flags: str) -> Path:
        without_steps = [*flags]
        for name in ("--max_steps", "--warmup_steps"):
            if name in without_steps:
                start = without_steps.index(name)
                del without_steps[start : start + 2]
        folder = tmp_path / Path(recipe).stem
        main = runpy.run_path(str(ROOT / recipe))["main"]
        main([*without_steps, "--output_dir", str(folder)])
        return folder

    return train


def test_fine_tuning_on_ones_own_data_takes_three_epochs(
    train: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", count=12)
    flags = [*SMALL_LLAMA, "--from_config", "llama", "--dataset", str(chats)]

    folder = train(FINETUNE, *flags, "--eval_steps", "0.5")

    rows = read_json(folder / "run.json")["train_rows"]
    steps = 3 * -(-rows // 8)
    out = capsys.readouterr().out
    assert "default   --num_train_epochs 3 (default for your own data)" in out
    assert f"\nsteps     {steps} steps = 3 epochs of {rows} rows, 8 rows per step; " in out
    assert "; --per_device_train_batch_size limits memory only: the global batch is 8 rows" in out
    assert read_json(folder / "status.json")["step"] == steps

    settings = read_json(folder / "run.json")["settings"]
    assert settings["max_steps"]["value"] == steps
    assert settings["eval_steps"]["value"] == -(-steps // 2)
    epochs = {entry["step"]: entry["epoch"] for entry in metrics(folder)}
    assert epochs == {step: round(step / steps * 3, 4) for step in range(steps + 1)}


def test_a_run_of_some_epochs_is_the_run_of_as_many_steps(
    train: Callable[..., Path], text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file), "--num_train_epochs", "0.01"]
    first = train(GPT, *flags, "--eval_steps", "0.9")
    record = read_json(first / "run.json")
    steps = record["settings"]["max_steps"]["value"]
    assert record["settings"]["num_train_epochs"]["value"] == 0.01
    assert read_json(first / "status.json")["step"] == steps

    main = runpy.run_path(str(ROOT / GPT))["main"]
    second = tmp_path / "by-steps"
    warmup = record["settings"]["warmup_steps"]["value"]
    flags = [*TINY, "--dataset", str(text_file), "--max_steps", str(steps)]
    main([*flags, "--warmup_steps", str(warmup), "--output_dir", str(second)])
    assert read_json(second / "run.json")["fingerprint"] == record["fingerprint"]


def test_a_recipe_with_rows_of_its_own_trains_for_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 4 of docs/guides/migrate.md has rows from `Tokenized.of`."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "migrate"))
    monkeypatch.chdir(tmp_path)
    recipe = runpy.run_path(str(ROOT / "docs" / "migrate" / "4_llmtrain.py"), run_name="migrate")

    flags = ["--num_train_epochs", "0.25", "--report_to", "none"]
    recipe["main"]([*flags, "--output_dir", str(tmp_path / "run")])

    record = read_json(tmp_path / "run" / "run.json")
    epoch = record["train_rows"] / record["settings"]["global_batch_size"]["value"]
    assert read_json(tmp_path / "run" / "status.json")["step"] == epoch / 4
    assert metrics(tmp_path / "run")[-1]["epoch"] == 0.25


def test_a_plan_counts_the_steps_of_the_epochs(text_file: Path) -> None:
    flags = [*TINY[:10], "--dataset", str(text_file), "--global_batch_size", "8"]
    one, two = (
        build_recipe_model(str(ROOT / GPT), [*flags, "--num_train_epochs", epochs], "no").settings
        for epochs in ("1", "2")
    )
    assert two.optim.max_steps == 2 * one.optim.max_steps != 2 * 120
    assert isinstance(one.optim.warmup_steps, int)
