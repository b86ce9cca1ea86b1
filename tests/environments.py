"""Environments of their own, for packages that the tests' own environment must not have."""

import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock


def environment_with(*requirements: str) -> Path:
    """Make an environment that adds packages to those of this one, and return its Python.

    It is kept for later tests of the same requirements. A test that calls this is skipped if the
    packages cannot be installed.
    """
    key = hashlib.sha256(repr((sys.prefix, requirements)).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"llmtrain-environment-{os.getuid()}-{key}"
    python = folder / "bin" / "python"
    ready = folder / "ready"
    with FileLock(f"{folder}.lock"):
        if not ready.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            version = f"python{sys.version_info.major}.{sys.version_info.minor}"
            inherited = folder / "lib" / version / "site-packages" / "inherited.pth"
            inherited.write_text(sysconfig.get_path("purelib") + "\n")
            command = [python, "-m", "pip", "install", "-q", "--no-compile", *requirements]
            installed = subprocess.run(command, capture_output=True, text=True, check=False)
            if installed.returncode:
                pytest.skip(f"cannot install {' '.join(requirements)}: {installed.stderr[-300:]}")
            ready.touch()
    return python
