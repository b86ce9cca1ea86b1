"""Whole runs in real processes. Launches cost seconds: each test keeps several promises."""

import json
import re
from pathlib import Path

import pytest

from llmtrain.launching.accelerator import cpu_has_bfloat16
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
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
def plain_run(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe on one process, the run that others are compared with."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]
    run_forked([*PYTHON, GPT, *flags]).assert_ok()
    return folder


def test_two_processes_are_one_run_that_looks_like_one(
    text_file: Path, plain_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [
        *TINY,
        "--dataset",
        str(text_file),
        "--output_dir",
        str(folder),
        "--report_to",
        "wandb",
    ]
    ended = run([*accelerate("cpu_ddp"), GPT, *flags]).assert_ok()

    record = read_json(folder / "run.json")
    assert record["processes"] == 2
    assert record["starts"][0]["processes"] == 2
    assert ended.out.count("8 rows per step = 2 processes x 2 micro-batches x 2 rows") == 1
    assert ended.out.count("2 processes on cpu") == 1
    # A log file gets no bar, but a line for each entry that the flags ask for.
    matches = [re.match(r"step +(\d)/6  loss ", line) for line in ended.err.splitlines()]
    assert [match and match[1] for match in matches] == [*"123456"], ended.err
    assert "not logged in, so logging offline" in ended.out
    assert "wandb sync" in ended.out
    assert read_json(folder / "status.json")["state"] == "finished"

    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1
    history = read_history(files[0])
    mirrored = {int(line["step"]): line["train/loss"] for line in history if "train/loss" in line}
    assert mirrored == series(folder, "train/loss")
    assert len(mirrored) == 6
    assert {line["eval/loss"] for line in history if "eval/loss" in line} == set(
        series(folder, "eval/loss").values()
    )

    assert_same_losses(folder, plain_run)


@long_form
def test_torchrun_gives_the_losses_of_one_process(
    text_file: Path, plain_run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]
    run([*torchrun(2), GPT, *flags]).assert_ok()
    assert read_json(folder / "run.json")["processes"] == 2
    assert_same_losses(folder, plain_run)


def assert_same_losses(folder: Path, reference: Path) -> None:
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        ours, theirs = series(folder, key), series(reference, key)
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-5)
    for key in ("train/learning_rate", "tokens"):
        assert series(folder, key) == series(reference, key)


def test_losses_differ_where_the_run_differs(
    text_file: Path, plain_run: Path, tmp_path: Path
) -> None:
    """The comparison above can fail: another seed is another run."""
    folder = tmp_path / "run"
    run_forked(
        [
            *PYTHON,
            GPT,
            *TINY,
            "--seed",
            "1",
            "--dataset",
            str(text_file),
            "--output_dir",
            str(folder),
        ]
    ).assert_ok()
    with pytest.raises(AssertionError):
        assert_same_losses(folder, plain_run)


def test_what_a_run_leaves(plain_run: Path) -> None:
    assert {path.name for path in plain_run.iterdir()} >= {
        "run.json",
        "status.json",
        "metrics.jsonl",
        "model",
    }
    checkpoint = plain_run / "checkpoints" / "step-00000006"
    assert {path.name for path in checkpoint.iterdir()} == {
        "model",
        "optimizer",
        "state.json",
        "MANIFEST.json",
    }
    record = read_json(plain_run / "run.json")
    assert record["settings"]["n_layer"] == {
        "value": 2,
        "from": "command line",
        "affects": "model",
    }
    assert record["settings"]["dropout"] == {
        "value": 0.0,
        "from": "recipe",
        "affects": "pass",
    }
    assert record["fingerprint"]["global_batch_size"] == 8
    before, first, second, *_ = metrics(plain_run)
    always = {"step", "epoch", "tokens", "time"}
    assert set(before) == {*always, "train/weight_norm"}
    assert set(first) == {*always, "eval/loss", "eval/perplexity", "eval/bits_per_byte"}
    assert set(second) == {
        *(
            *always,
            "train/loss",
            "train/grad_norm",
            "train/weight_norm",
            "train/learning_rate",
            "batch",
        ),
        *("train/tokens_per_second", "phases", "memory"),
    }  # no train/mfu: the peak of a CPU is not known
    assert not list(plain_run.rglob(".tmp-*"))
    assert not [path for path in plain_run.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]


@pytest.mark.parametrize(
    "config",
    ["single_gpu", *(pytest.param(name, marks=long_form) for name in ("cpu", "multi_gpu"))],
)
def test_every_shipped_config_starts_the_recipe(
    config: str, text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [*TINY, "--max_steps", "2", "--warmup_steps", "1", "--dataset", str(text_file)]
    flags += ["--output_dir", str(folder)]
    ended = run([*accelerate(config), GPT, *flags]).assert_ok()
    start = read_json(folder / "run.json")["starts"][0]
    if config == "multi_gpu":
        assert start["processes"] == 2
        assert start["mixed_precision"] == "bf16"
        if start["device"] == "cpu":
            assert "over gloo (no GPU here)" in ended.out
            assert (
                cpu_has_bfloat16() or "which this CPU emulates: --mixed_precision no" in ended.out
            )
    else:
        assert start["processes"] == 1


def test_a_plain_launch_without_any_config(text_file: Path, tmp_path: Path) -> None:
    flags = [
        *TINY,
        "--max_steps",
        "2",
        "--warmup_steps",
        "1",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    run(
        [*accelerate("x")[:2], "--num_processes", "1", GPT, *flags, "--eval_steps", "0"]
    ).assert_ok()
    assert read_json(tmp_path / "run" / "status.json")["state"] == "finished"
    assert not series(tmp_path / "run", "eval/loss"), "and nothing is held against what is held out"


def test_one_line_of_the_file_is_one_reading(plain_run: Path) -> None:
    for line in (plain_run / "metrics.jsonl").read_text().splitlines():
        assert isinstance(json.loads(line)["step"], int)
