"""Virtual environments with packages of their own, kept in the temporary directory for the next run of the tests."""

import hashlib
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

import filelock
import pytest

# What pip says of a package that no index has. It lists versions if only this version is missing.
_NO_INDEX = "(from versions: none)"


def environment_with(name: str, requirements: Sequence[str], *, adds_to_ours: bool = False) -> Path:
    """Return the folder of an environment with these packages; the first call installs them.

    The test is skipped if pip reaches no index. It fails if the packages do not fit together.

    Args:
        name: a name for the folder.
        requirements: the packages, as pip takes them.
        adds_to_ours: whether the environment also has the packages of this one.
    """
    ours = sysconfig.get_path("purelib") if adds_to_ours else ""
    content = json.dumps([sys.version, ours, *sorted(requirements)])
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"llmtrain-tests-{name}-{digest}"
    with filelock.FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, symlinks=True, with_pip=True)
            if adds_to_ours:
                version = f"python{sys.version_info.major}.{sys.version_info.minor}"
                packages = folder / "lib" / version / "site-packages"
                (packages / "ours.pth").write_text(f"{ours}\n")
            _install(folder, requirements)
            (folder / "complete").touch()
    return folder


def _install(folder: Path, requirements: Sequence[str]) -> None:
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check"]
    ended = subprocess.run(
        [*pip, "--quiet", "--no-compile", "--retries", "0", *requirements],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if ended.returncode == 0:
        return

    if _NO_INDEX in ended.stderr:
        pytest.skip(f"pip reaches no index that has the packages: {ended.stderr.splitlines()[-1]}")
    pytest.fail(ended.stderr)
