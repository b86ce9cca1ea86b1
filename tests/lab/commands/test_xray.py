"""The command line of `llmtrain xray`.

Runs with real processes are in tests/system/test_xray.py.
"""

import json
from pathlib import Path

import pytest

from tests.command_line import run_cli
from tests.launching import GPT, ROOT

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
    "flags",
    [
        "--output_dir first --output_dir last",
        "--output_dir first --output_dir=last",
        "--output_dir=first --output_dir last",
        "--output_dir=first --output-dir last",
        "--output-dir=last",
    ],
)
def test_the_last_output_dir_counts_as_it_does_for_the_recipe(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    folders: list[str] = []

    def run_command(command: list[str], **_: object) -> None:
        folder = Path(command[-1])
        folders.append(folder.name)
        (folder / "xray").mkdir(parents=True)
        (folder / "xray" / "recording.json").write_text(json.dumps(RECORDING))

    monkeypatch.setattr("llmtrain.lab.commands.xray.run_command", run_command)

    status, _, err = run_cli(capsys, "xray", str(ROOT / GPT), *flags.split())

    assert status == 0
    assert err == ""
    assert folders == ["last"]


@pytest.mark.parametrize(
    "content", [pytest.param(None, id="absent"), pytest.param('{"a', id="damaged")]
)
def test_the_error_without_a_recording_says_how_to_make_one(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if content is not None:
        (tmp_path / "xray").mkdir()
        (tmp_path / "xray" / "recording.json").write_text(content)

    status, _, err = run_cli(capsys, "xray", str(tmp_path))

    assert status == 2
    assert "has no readable recording of steps: start the run with --xray_steps A:B" in err
    assert err.count("\n") == 1


def test_a_run_folder_takes_no_flags_of_a_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, _, err = run_cli(capsys, "xray", str(tmp_path), "--n_layer", "2")

    assert status == 2
    assert "--n_layer is for a recipe" in err
