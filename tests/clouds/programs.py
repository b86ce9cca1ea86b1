"""Run programs of other environments, in which a cloud's own schema reads its file."""

import os
import subprocess
from pathlib import Path

from tests.launching import Ended


def run_program(command: list[str | Path], text: str = "", home: Path | None = None) -> Ended:
    """Run a program of another environment. It finds neither this checkout nor its packages.

    Args:
        command: the program and its arguments.
        text: its standard input.
        home: its home folder; by default that of this process.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if home is not None:
        environment["HOME"] = str(home)

    result = subprocess.run(
        command,
        input=text,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Ended(result.returncode, result.stdout, result.stderr)
