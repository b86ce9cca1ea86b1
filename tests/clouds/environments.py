"""Virtual environments with the packages of a cloud, in which its file is read by its own schema."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import filelock
import pytest

from tests.launching import Ended

_INSTALL_SECONDS = 400


def environment_with(*requirements: str) -> Path:
    """Return the folder of the programs of an environment with these packages.

    It is kept in the temporary directory, so that later tests find it there. The test is skipped
    if the packages cannot be installed.
    """
    name = hashlib.sha256(" ".join([sys.version, *requirements]).encode()).hexdigest()[:16]
    kept = Path(tempfile.gettempdir()) / f"llmtrain-test-environments-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    folder = kept / name
    ready = folder / ".ready"
    with filelock.FileLock(kept / f"{name}.lock"):
        if not ready.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True, symlinks=True)
            _install(folder, requirements)
            ready.touch()
    return folder / "bin"


def _install(folder: Path, requirements: tuple[str, ...]) -> None:
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet"]
    try:
        ended = subprocess.run(
            [*pip, "install", "--no-compile", *requirements],
            capture_output=True,
            text=True,
            timeout=_INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirements} were not installed in {_INSTALL_SECONDS} s")
    if ended.returncode != 0:
        *_, reason = ended.stderr.strip().splitlines() or ["pip failed"]
        pytest.skip(f"{requirements} cannot be installed here: {reason}")


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
