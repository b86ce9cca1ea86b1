"""Epochs, tokens and fractions of the run become steps once the rows are known."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from llmtrain.config.command_line import parse
from llmtrain.data.config import DataConfig
from llmtrain.data.order import Mixture
from llmtrain.errors import UserError
from llmtrain.training.layout import Layout, describe_steps, fit_to_rows
from llmtrain.training.settings import OptimConfig, Settings
from recipes import finetune
from tests.launching import BYTE_DATA, SMALL_SIZE, metrics, read_json, write_chats

DEFAULTS = Settings(
    data=DataConfig(global_batch_size=8),
    optim=OptimConfig(max_steps=400, warmup_steps=20),
)


def rows_of(count: int, **attributes: Any) -> Any:
    """Rows without content."""
    rows = {
        "train": range(count),
        "mixture": None,
        "in_order": False,
        "positions": 16,
        "decided": {},
    }
    return SimpleNamespace(**{**rows, **attributes})


def settled(*argv: str, rows: Any = None, defaults: Settings = DEFAULTS) -> Settings:
    settings = parse(defaults, list(argv))
    fit_to_rows(settings, rows or rows_of(98))
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
    mixture = Mixture([90, 8], [1, 1])
    settings = settled("--num_train_epochs", "2", rows=rows_of(98, mixture=mixture))
    assert settings.optim.max_steps == 25  # 196 rows / 8

    with pytest.raises(UserError, match="--mixture draws rows"):
        settled(rows=rows_of(98, mixture=mixture, in_order=True))


def test_steps_and_the_command_line_override_epochs_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("max_steps: 100\n")
    config = ["--config", str(file)]
    assert settled(*config, "--num_train_epochs", "3").optim.max_steps == 39

    file.write_text("max_steps: 100\nnum_train_epochs: 3\n")
    assert settled(*config).optim.max_steps == 100
    file.write_text("num_train_epochs: 3\n")
    assert settled(*config, "--max_steps", "100").optim.max_steps == 100
    assert settled(*config).optim.max_steps == 39


@pytest.mark.parametrize(
    ("tokens", "positions", "steps"),
    [
        ("20000000", 1, 2_500_000),
        ("20_000_001", 1, 2_500_001),
        ("2e9", 1023, 244_380),  # 244,379.28
        ("9_007_199_254_737", 1, 1_125_899_906_843),
        ("1", 16, 1),
    ],
)
def test_the_last_step_of_a_number_of_tokens_is_made_in_full(
    tokens: str, positions: int, steps: int
) -> None:
    settings = settled("--max_tokens", tokens, rows=rows_of(98, positions=positions))
    assert settings.optim.max_steps == steps
    assert "max_tokens" not in settings.optim.fingerprint


@pytest.mark.parametrize("other", ["max_steps", "num_train_epochs"])
def test_a_number_of_tokens_and_another_length_are_refused_if_the_user_set_both(
    other: str, tmp_path: Path
) -> None:
    one_line = rf"^--max_tokens 160 and --{other} both say how long the run is; set one of them\."
    file = tmp_path / "my.yaml"
    file.write_text(f"{other}: 3\nmax_tokens: 160\n")
    both = ["--max_tokens", "160", f"--{other}", "3"]
    for argv in (both, ["--config", str(file)]):
        with pytest.raises(UserError, match=one_line):
            parse(DEFAULTS, argv)

    # The command line overrides a file, and both override a recipe.
    file.write_text(f"{other}: 3\n")
    assert settled("--config", str(file), *both[:2]).optim.max_steps == 2
    file.write_text("max_tokens: 160\n")
    by_other = settled(f"--{other}", "3").optim.max_steps
    assert settled("--config", str(file), *both[2:]).optim.max_steps == by_other
    recipe = Settings(data=DEFAULTS.data, optim=OptimConfig(max_tokens=160, num_train_epochs=9))
    assert settled(defaults=recipe).optim.max_steps == 2
    assert settled(*both[2:], defaults=recipe).optim.max_steps == by_other
    assert settled(*both, "--max_tokens", "0").optim.max_steps == by_other


def test_the_log_says_steps_epochs_and_rows() -> None:
    rows = rows_of(3040)
    both = settled("--num_train_epochs", "3", "--max_steps", "1", rows=rows)
    assert describe_steps(both, rows) == (
        "1 step = 0.0026 epochs of 3,040 rows, 8 rows per step; "
        "--max_steps overrides --num_train_epochs 3"
    )
    assert describe_steps(settled("--max_tokens", "2e4", rows=rows), rows) == (
        "157 steps = 0.41 epochs of 3,040 rows, 8 rows per step; "
        "--max_tokens 20,000 at 16 tokens per row"
    )


def test_a_data_set_that_the_user_names_is_trained_on_for_the_default_epochs() -> None:
    def epochs(*argv: str) -> float | None:
        settings = parse(DEFAULTS, list(argv))
        settings.default_epochs(3.0)
        return settings.optim.num_train_epochs

    assert epochs() is None
    assert epochs("--dataset", "x", "--max_steps", "9") is None
    assert epochs("--dataset", "x", "--max_tokens", "9") is None
    assert epochs("--dataset", "x", "--num_train_epochs", "2") == 2
    assert epochs("--dataset", "x") == 3


# --- fractions of the run


def test_numbers_below_1_are_fractions_of_the_run_rounded_up_as_they_are_written() -> None:
    settings = settled(
        *("--max_steps", "100"),
        *("--logging_steps", "0.07"),  # 0.07 * 100 is a little above 7
        *("--eval_steps", "0.071"),
        *("--save_steps", "0.0001"),
        *("--warmup_steps", "0.1"),
    )
    assert settings.log.logging_steps == 7
    assert settings.eval.eval_steps == 8
    assert settings.run.save_steps == 1
    assert settings.optim.warmup_steps == 10
    assert isinstance(settings.optim.warmup_steps, int)


def test_fractions_follow_the_epochs_and_a_second_call_changes_nothing() -> None:
    settings = settled("--num_train_epochs", "3", "--eval_steps", "0.5", "--save_steps", "1")
    by_tokens = settled("--max_tokens", "4991", "--eval_steps", "0.5", "--save_steps", "1")
    assert by_tokens.optim.max_steps == 39  # 38.99
    assert (by_tokens.eval, by_tokens.run) == (settings.eval, settings.run)
    for _ in range(2):
        assert settings.optim.max_steps == 39
        assert settings.eval.eval_steps == 20
        assert settings.run.save_steps == 1
        fit_to_rows(settings, rows_of(98))
    assert settled("--eval_steps", "0").eval.eval_steps == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--num_train_epochs", "0"),
        ("--num_train_epochs", "nan"),
        ("--max_tokens", "-1"),
        ("--max_tokens", "2e16"),  # a float may be another number
        ("--max_steps", "-1"),  # the default of Trainer, which means that the epochs decide
        ("--warmup_steps", "-0.5"),
        ("--eval_steps", "1.5"),
        ("--save_steps", "many"),
    ],
)
def test_a_value_that_is_neither_steps_nor_a_fraction_is_refused(flag: str, value: str) -> None:
    with pytest.raises(UserError, match=flag) as error:
        parse(DEFAULTS, [f"{flag}={value}"])
    assert "\n" not in str(error.value)


def test_the_default_micro_batch_and_the_data_sets_follow_the_rows() -> None:
    rows = rows_of(98, positions=1024, decided={"dataset": ["made by the recipe"]})
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
        fit_to_rows(settings, rows_of(count))
        assert settings.optim.max_steps == steps
    assert defaults.optim == OptimConfig(num_train_epochs=1.0)


# --- the warmup


def test_a_warmup_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(UserError, match=r"--warmup_steps 10 .* Use at most 9"):
        settled("--max_steps", "10", "--warmup_steps", "10")
    assert settled("--max_steps", "10", "--warmup_steps", "9").optim.warmup_steps == 9


def test_a_warmup_as_long_as_the_steps_in_a_file_is_refused_before_data_are_read(
    tmp_path: Path,
) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_steps: 10\nwarmup_steps: 12\n")
    config = ["--config", str(file)]
    with pytest.raises(UserError, match=rf"--warmup_steps 12 .*{file}"):
        parse(DEFAULTS, config)
    parse(DEFAULTS, [*config, "--max_steps", "13"])
    parse(DEFAULTS, [*config, "--num_train_epochs", "3"])  # they override the file's steps
    parse(DEFAULTS, ["--warmup_steps", "500"])  # a data set may give the run more steps


def test_a_warmup_that_nobody_asked_for_never_fills_the_run(capsys: pytest.CaptureFixture) -> None:
    assert settled("--max_steps", "20").optim.warmup_steps == 2  # the recipe's are 20
    assert capsys.readouterr().out == "default   --warmup_steps 2 (the run has only 20 steps)\n"
    assert settled("--max_steps", "1").optim.warmup_steps == 0
    assert settled("--max_steps", "21").optim.warmup_steps == 20
    assert settled("--max_steps", "1", "--warmup_steps", "0.5").optim.warmup_steps == 0


# --- whole runs


def test_fine_tuning_on_ones_own_data_takes_three_epochs(tmp_path: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", count=12)
    flags = shlex.split(
        f"--from_config llama --config_overrides {SMALL_SIZE} --dataset {chats} --eval_steps 0.5 "
        f"--global_batch_size 8 --logging_steps 1 --report_to none --output_dir {tmp_path}/run"
    )

    folder = finetune.main([*BYTE_DATA, *flags]).folder

    record = read_json(folder / "run.json")
    steps = 3 * -(-record["train_rows"] // 8)
    assert read_json(folder / "status.json")["step"] == steps
    assert record["settings"]["max_steps"]["value"] == steps
    assert record["settings"]["eval_steps"]["value"] == -(-steps // 2)
    epochs = {entry["step"]: entry["epoch"] for entry in metrics(folder)}
    assert epochs == {step: round(step / steps * 3, 4) for step in range(steps + 1)}


# --- the layout: the global batch is divided among processes and micro-batches


def layout_of(rows: int, micro_batch: int, processes: int) -> Layout:
    """Return the layout if the user has set the size of a micro-batch."""
    config = DataConfig(global_batch_size=rows, per_device_train_batch_size=micro_batch)
    config.origins = {"per_device_train_batch_size": "command line"}
    return Layout.of(config, processes)


@pytest.mark.parametrize(
    ("rows", "processes", "micro_batch"),
    [(24, 1, 12), (6, 1, 6), (7, 1, 7), (34, 2, 1), (60, 3, 10)],
)
def test_a_default_micro_batch_is_the_largest_that_divides_the_rows_of_a_rank(
    rows: int, processes: int, micro_batch: int
) -> None:
    config = DataConfig(global_batch_size=rows)
    assert config.per_device_train_batch_size == 16

    assert Layout.of(config, processes).micro_batch == micro_batch


def test_a_layout_computes_the_complete_batch() -> None:
    layout = layout_of(64, 8, 2)
    assert layout == Layout(processes=2, accumulation=4, micro_batch=8)
    assert layout.global_batch_size == 64
    assert str(layout) == "64 rows per step = 2 processes x 4 micro-batches x 8 rows"
    assert layout_of(24, 64, 3) == Layout(processes=3, accumulation=1, micro_batch=8)


def test_the_bits_of_a_bitwise_run_depend_on_the_threads_of_a_cpu() -> None:
    fingerprint = layout_of(64, 8, 2).bitwise_fingerprint(Accelerator(cpu=True))
    assert fingerprint["slot"] == 8
    assert fingerprint["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("rows", "micro_batch", "processes", "flag"),
    [
        (64, 1, 3, "--global_batch_size 64"),
        (2, 1, 4, "--global_batch_size 2"),
        (64, 7, 2, "--per_device_train_batch_size 7"),
        (10, 4, 1, "--per_device_train_batch_size 4"),
        (13, 6, 1, "--per_device_train_batch_size 6"),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_values_that_work(
    rows: int, micro_batch: int, processes: int, flag: str
) -> None:
    with pytest.raises(UserError, match=flag) as error:
        layout_of(rows, micro_batch, processes)

    message = str(error.value)
    [remedy] = re.findall(r"; use ([\d, or]+)", message)
    values = [int(value) for value in re.findall(r"\d+", remedy)]
    assert values
    for value in values:
        if "--global_batch_size" in flag:
            assert layout_of(value, micro_batch, processes).global_batch_size == value
        else:
            assert layout_of(rows, value, processes).micro_batch == value
    for fewer_processes in re.findall(r"--num_processes (\d+)", message):
        assert layout_of(rows, micro_batch, int(fewer_processes)).processes < processes
