"""Run the command `llmtrain` in this process."""

import pytest

from llmtrain.cli import main


def run_cli(capsys: pytest.CaptureFixture, *argv: str) -> tuple[int, str, str]:
    """Run a command in this process, and return its exit status, output and errors."""
    status = 0
    try:
        main(list(argv))
    except SystemExit as end:
        status = int(end.code or 0)
    return status, *capsys.readouterr()
