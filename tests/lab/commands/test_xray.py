"""The command line of `llmtrain xray`. Runs with real processes are in tests/system/test_xray.py."""

import json
from pathlib import Path

import pytest

from tests.launching import GPT, ROOT
from tests.test_cli import ended

RECORDING = {
    "processes": 1,
    "spans": [
        {"rank": 0, "step": 1, "micro_batch": 0, "phase": "forward", "start": 0.0, "end": 0.1}
    ],
    "transfers": [],
    "buckets": {},
    "counted_bytes": 0,
    "cost": 0.0,
}


@pytest.mark.parametrize(
    "words",
    [
        ("--output_dir", "first", "--output_dir", "last"),
        ("--output_dir", "first", "--output_dir=last"),
        ("--output_dir=first", "--output_dir", "last"),
        ("--output_dir=first", "--output-dir", "last"),
        ("--output-dir=last",),
    ],
)
def test_the_last_output_dir_counts(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """As it does for the recipe itself, which leaves that to argparse."""
    monkeypatch.chdir(tmp_path)
    folders: list[str] = []

    def run_command(command: list[str], **_: object) -> None:
        folder = Path(command[-1])
        folders.append(folder.name)
        (folder / "xray").mkdir(parents=True)
        (folder / "xray" / "recording.json").write_text(json.dumps(RECORDING))

    monkeypatch.setattr("llmtrain.lab.commands.xray.run_command", run_command)
    status, _, err = ended(capsys, "xray", str(ROOT / GPT), *words)
    assert (status, err) == (0, "")
    assert folders == ["last"]


def test_a_folder_without_a_recording_says_how_to_make_one(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = ended(capsys, "xray", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "has no readable recording of steps: start the run with --xray_steps A:B" in err

    (tmp_path / "xray").mkdir()
    (tmp_path / "xray" / "recording.json").write_text('{"a')
    status, _, err = ended(capsys, "xray", str(tmp_path))
    assert (status, err.count("\n")) == (2, 1)
    assert "has no readable recording of steps" in err


def test_a_run_folder_takes_no_flags_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = ended(capsys, "xray", str(tmp_path), "--n_layer", "2")
    assert status == 2
    assert "--n_layer is for a recipe" in err
