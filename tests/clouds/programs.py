"""Runs programs of other environments, in which a cloud's file is read by its own schema."""

import os
import subprocess
from pathlib import Path

from tests.launching import Ended


def run_program(command: list[str | Path], text: str = "", home: Path | None = None) -> Ended:
    """Run a program of such an environment, which sees neither this checkout nor its packages."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if home is not None:
        environment["HOME"] = str(home)
    ended = subprocess.run(
        command,
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)
