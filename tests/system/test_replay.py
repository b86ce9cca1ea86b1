"""`llmtrain replay` repeats a step with the same bits, and shows the loss of each of its rows."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from llmtrain.lab.commands import replay
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, long_form, metrics, read_json, torchrun

FLAGS = [*TINY, *shlex.split("--max_steps 12 --save_steps 5 --dropout 0.1 --log_rows")]


def train(folder: Path, dataset: Path, launcher: list[str] = PYTHON) -> Path:
    flags = shlex.split(f"--dataset {dataset} --output_dir {folder}")
    run_forked([*launcher, GPT, *FLAGS, *flags]).assert_ok()
    return folder


@pytest.fixture(scope="module")
def trained(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("replay") / "run", text_file)


@pytest.fixture
def changeable(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run, whose records a test may change."""
    return shutil.copytree(trained, tmp_path / "copy")


def replayed(capsys: pytest.CaptureFixture[str], folder: Path, step: int) -> dict[str, Any]:
    status, out, err = run_cli(capsys, "replay", str(folder), "--step", str(step), "--json")
    assert status == 0, err
    return json.loads(out)


def assert_rows_of_step(
    rows: list[dict[str, Any]], folder: Path, step: int, text_file: Path
) -> None:
    """Assert that rows are those of a step, and that their losses add up to its loss."""
    targets = sum(row["targets"] for row in rows)
    mean_loss = sum(row["loss"] * row["targets"] for row in rows) / targets
    losses_by_step = {
        entry["step"]: entry["train/loss"] for entry in metrics(folder) if "train/loss" in entry
    }
    assert mean_loss == pytest.approx(losses_by_step[step], rel=1e-5)

    lines = (folder / "rows.jsonl").read_text().splitlines()
    recorded_rows = json.loads(lines[step - 1])["rows"]
    assert sorted(row["row"] for row in rows) == sorted(recorded_rows)

    losses = [row["loss"] for row in rows]
    assert losses == sorted(losses, reverse=True)

    # The first row of the text begins with a special token.
    text = text_file.read_text()
    rows_of_text = [row for row in rows if row["text"] in text]
    assert len(rows_of_text) >= len(rows) - 1


def test_a_step_with_dropout_is_repeated_with_the_same_bits_and_changes_nothing(
    trained: Path,
    text_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    paths_before = sorted(trained.rglob("*"))
    # Relative paths are relative to the folder in which the run was started.
    monkeypatch.chdir(tmp_path)

    result = replayed(capsys, trained, step=12)

    assert result["from"] == 10
    assert result["same"] is True
    assert len(result["rows"]) == 8
    assert_rows_of_step(result["rows"], trained, 12, text_file)
    assert sorted(trained.rglob("*")) == paths_before


@long_form
def test_a_step_of_two_processes_is_repeated_with_the_same_bits(
    text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = train(tmp_path / "run", text_file, launcher=torchrun(2))

    result = replayed(capsys, folder, step=11)

    assert result["from"] == 10
    assert result["same"] is True
    assert_rows_of_step(result["rows"], folder, 11, text_file)


@long_form
def test_a_step_with_another_gradient_norm_is_not_called_the_same(
    changeable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries = metrics(changeable)
    for entry in entries:
        if entry["step"] == 3 and "train/grad_norm" in entry:
            entry["train/grad_norm"] *= 1 + 1e-15
    lines = [json.dumps(entry) + "\n" for entry in entries]
    (changeable / "metrics.jsonl").write_text("".join(lines))

    command = f"replay {changeable} --step 3 --rows 2"
    status, out, _ = run_cli(capsys, *shlex.split(command))

    assert status == 0
    assert "step      3, repeated from step 0" in out
    assert "differs   gradient norm" in out
    assert "loss:" not in out
    assert len(out.splitlines()) == 5


# --- errors


def replay_error(capsys: pytest.CaptureFixture[str], folder: Path, step: int) -> str:
    status, _, err = run_cli(capsys, "replay", str(folder), "--step", str(step))
    assert status == 2
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("step", [0, 13])
def test_a_step_that_the_run_has_not_made_is_an_error(
    step: int, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "steps 1 to 12" in replay_error(capsys, trained, step)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"sharded": "1x2"}, "--config_file", id="sharded run"),
        pytest.param({"directory": "/absent/folder"}, "does not exist here", id="folder is gone"),
    ],
)
def test_a_run_that_cannot_be_started_again_is_an_error(
    change: dict[str, str],
    message: str,
    changeable: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "run_command", None)  # nothing is started
    monkeypatch.chdir(tmp_path)  # has no recipe
    record = read_json(changeable / "run.json")
    record["starts"][0] |= change
    (changeable / "run.json").write_text(json.dumps(record))

    assert message in replay_error(capsys, changeable, step=3)
