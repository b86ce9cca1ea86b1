"""An update that is made again has the same bits, and its rows add up to its loss."""

import json
from pathlib import Path

import pytest

from llmtrain.lab.commands import replay
from tests.forked import run_forked
from tests.launching import GPT, PYTHON, TINY, long_form, metrics, torchrun
from tests.test_cli import ended

FLAGS = [*TINY, "--max_steps", "12", "--save_steps", "5", "--dropout", "0.1", "--log_rows"]


def made(folder: Path, launcher: list[str], text_file: Path) -> Path:
    run_forked(
        [*launcher, GPT, *FLAGS, "--dataset", str(text_file), "--output_dir", str(folder)]
    ).assert_ok()
    return folder


@pytest.fixture(scope="module")
def folder(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("replay") / "run", PYTHON, text_file)


def again(capsys: pytest.CaptureFixture, folder: Path, step: int) -> dict:
    status, out, err = ended(capsys, "replay", str(folder), "--step", str(step), "--json")
    assert status == 0, err
    return json.loads(out)


def assert_rows_are_those_of_the_update(
    found: dict, folder: Path, step: int, text_file: Path
) -> None:
    line = next(line for line in metrics(folder) if line["step"] == step and "train/loss" in line)
    total = sum(row["loss"] * row["targets"] for row in found["rows"])
    assert total / sum(row["targets"] for row in found["rows"]) == pytest.approx(
        line["train/loss"], rel=1e-5
    )
    ledger = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["row"] for row in found["rows"]) == sorted(ledger[step - 1]["rows"])
    losses = [row["loss"] for row in found["rows"]]
    assert losses == sorted(losses, reverse=True)
    assert (
        sum(row["text"] in text_file.read_text() for row in found["rows"]) >= 7
    )  # the first has a special token, too


def test_an_update_with_dropout_is_made_again_to_the_last_bit_and_shown_by_rows(
    folder: Path, text_file: Path, capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    monkeypatch.chdir(tmp_path)  # paths are relative to the folder in which the run was started
    found = again(capsys, folder, 12)
    assert (found["from"], found["same"]) == (10, True)
    assert_rows_are_those_of_the_update(found, folder, 12, text_file)
    assert sorted(path.name for path in folder.rglob("*")) == before


@long_form
def test_two_processes_make_their_update_again_to_the_last_bit(
    text_file: Path, tmp_path: Path, capsys
) -> None:
    folder = made(tmp_path / "run", torchrun(2), text_file)
    found = again(capsys, folder, 11)
    assert (found["from"], found["same"]) == (10, True)
    assert_rows_are_those_of_the_update(found, folder, 11, text_file)


@long_form
def test_an_update_that_was_another_is_not_called_the_same(
    folder: Path, tmp_path: Path, capsys
) -> None:
    lines = metrics(folder)
    for line in lines:
        if line["step"] == 3 and "train/grad_norm" in line:
            line["train/grad_norm"] *= 1 + 1e-15
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, out, _ = ended(capsys, "replay", str(folder), "--step", "3", "--rows", "2")
    assert status == 0
    assert "step      3, repeated from step 0" in out
    assert "differs   gradient norm" in out
    assert "loss:" not in out
    assert len(out.splitlines()) == 5


def test_what_cannot_be_made_again_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path, capsys
) -> None:
    def told(*words: str) -> str:
        status, _, err = ended(capsys, "replay", str(folder), *words)
        assert (status, err.count("\n")) == (2, 1)
        return err

    assert "steps 1 to 12" in told("--step", "13")
    assert "steps 1 to 12" in told("--step", "0")
    record = json.loads((folder / "run.json").read_text())
    monkeypatch.setattr(replay, "run_command", None)
    record["starts"][0]["sharded"] = "1x2"
    (folder / "run.json").write_text(json.dumps(record))
    assert "--config_file" in told("--step", "3")
    record["starts"][0]["sharded"] = None
    record["starts"][0]["directory"] = str(tmp_path / "gone")
    (folder / "run.json").write_text(json.dumps(record))
    monkeypatch.chdir(tmp_path)
    assert "does not exist here" in told("--step", "3")
