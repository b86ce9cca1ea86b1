"""Whole runs of recipes/gpt.py in real processes, and the folder that a run leaves."""

import re
import shlex
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    Ended,
    accelerate,
    long_form,
    metrics,
    read_json,
    run,
    series,
    torchrun,
)
from tests.wandb_file import read_history


@pytest.fixture(scope="module")
def on_one_process(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that others are compared with."""
    folder = tmp_path_factory.mktemp("on-one-process") / "run"
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder}")
    run_forked([*PYTHON, GPT, *TINY, *flags]).assert_ok()
    return folder


# --- two processes


@pytest.fixture(scope="module")
def two_processes(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A run on two processes that logs to W&B, and its output."""
    folder = tmp_path_factory.mktemp("two-processes") / "run"
    flags = shlex.split(f"--dataset {text_file} --output_dir {folder} --report_to wandb")
    ended = run([*accelerate("cpu_ddp"), GPT, *TINY, *flags]).assert_ok()
    return folder, ended


def test_two_processes_make_the_run_of_one(
    two_processes: tuple[Path, Ended], on_one_process: Path
) -> None:
    folder, _ = two_processes
    assert read_json(folder / "run.json")["starts"][0]["processes"] == 2
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(folder, key) == pytest.approx(series(on_one_process, key), rel=1e-5)
    for key in ("train/learning_rate", "tokens", "tokens_seen"):
        assert series(folder, key) == series(on_one_process, key)


def test_two_processes_print_everything_once_and_a_line_for_each_log_entry(
    two_processes: tuple[Path, Ended],
) -> None:
    _, ended = two_processes
    assert ended.out.count("8 rows per step = 2 processes x 2 micro-batches x 2 rows") == 1
    lines = [line for line in ended.err.splitlines() if "reading and tokenising" not in line]
    steps = [re.match(r"step +(\d)/6  loss ", line) for line in lines]
    assert all(steps), ended.err
    assert [match[1] for match in steps if match] == ["1", "2", "3", "4", "5", "6"]


def test_wandb_without_a_login_has_all_losses_offline(two_processes: tuple[Path, Ended]) -> None:
    folder, _ = two_processes
    [file] = folder.glob("wandb/offline-run-*/*.wandb")
    history = read_history(file)
    for key in ("train/loss", "eval/loss"):
        assert {row["step"]: row[key] for row in history if key in row} == series(folder, key)


# --- two runs of one process

TWO_RUNS = """
from llmtrain import launch
from recipes.gpt import main

def two_runs():
    main({first})
    return main({second})

launch(two_runs)
"""


@pytest.fixture
def two_runs(text_file: Path, tmp_path: Path) -> Path:
    """A script that makes the runs `first` and `second` in `tmp_path`."""
    flags = [*TINY, "--max_steps", "3", "--dataset", str(text_file), "--output_dir"]
    script = tmp_path / "two_runs.py"
    script.write_text(
        TWO_RUNS.format(
            first=[*flags, str(tmp_path / "first"), "--mixed_precision", "bf16"],
            second=[*flags, str(tmp_path / "second")],
        )
    )
    return script


def test_one_process_may_make_two_runs(two_runs: Path, tmp_path: Path) -> None:
    run_forked([*PYTHON, str(two_runs)]).assert_ok()

    for name, precision in (("first", "bf16"), ("second", "no")):
        [start] = read_json(tmp_path / name / "run.json")["starts"]
        assert start["mixed_precision"] == precision


def test_several_processes_make_one_run(two_runs: Path, tmp_path: Path) -> None:
    ended = run_forked([*torchrun(2), str(two_runs)])

    assert read_json(tmp_path / "first" / "status.json")["state"] == "finished"
    assert ended.status != 0
    [line] = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert "can do only one run" in line
    assert "Traceback" not in ended.err
    assert [*tmp_path.glob("second*")] == []


# --- the folder of a run


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_run_leaves_its_records_its_model_and_checkpoints(on_one_process: Path) -> None:
    records = {"run.json", "status.json", "metrics.jsonl"}
    assert names_in(on_one_process) >= {*records, "model", "checkpoints"}
    checkpoint = on_one_process / "checkpoints" / "step-00000006"
    assert names_in(checkpoint) == {"model", "optimizer", "state.json", "MANIFEST.json"}

    paths = [*on_one_process.rglob("*")]
    assert not [path for path in paths if path.name.startswith(".tmp-")]
    assert not [path for path in paths if path.suffix in (".pkl", ".pt", ".bin")]


def test_each_log_entry_has_the_keys_of_its_kind(on_one_process: Path) -> None:
    first_weights, first_eval, first_step, *_ = metrics(on_one_process)

    common = {"step", "epoch", "tokens", "tokens_seen", "time"}
    assert first_weights.keys() == {*common, "train/weight_norm"}
    eval_keys = {"eval/loss", "eval/perplexity", "eval/bits_per_byte"}
    assert first_eval.keys() == common | eval_keys
    # There is no train/mfu, since the peak of a CPU is not known.
    assert first_step.keys() == {
        *common,
        "batch",
        "memory",
        "phases",
        "train/grad_norm",
        "train/learning_rate",
        "train/loss",
        "train/tokens_per_second",
        "train/weight_norm",
    }
    assert first_step["tokens_seen"] == 8 * 32


# --- configs


@long_form
@pytest.mark.parametrize(
    ("config", "processes"),
    [
        ("cpu", 1),
        ("single_gpu", 1),
        ("multi_gpu", 2),
    ],
)
def test_a_shipped_config_starts_the_recipe(
    config: str, processes: int, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(
        f"--max_steps 2 --warmup_steps 1 --dataset {text_file} --output_dir {folder}"
    )

    run([*accelerate(config), GPT, *TINY, *flags]).assert_ok()

    [start] = read_json(folder / "run.json")["starts"]
    assert start["processes"] == processes
