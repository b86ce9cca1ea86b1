"""The command line of `llmtrain xray`. Runs with real processes are in tests/system/test_xray.py."""

from pathlib import Path

import pytest

from tests.launching import GPT, ROOT
from tests.test_cli import ended


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
        (folder / "xray" / "table.txt").write_text("a table")

    monkeypatch.setattr("llmtrain.lab.commands.xray.run_command", run_command)
    status, _, err = ended(capsys, "xray", str(ROOT / GPT), *words)
    assert (status, err) == (0, "")
    assert folders == ["last"]
