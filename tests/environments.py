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
from importlib.metadata import Distribution, distribution
from pathlib import Path

import filelock
import pytest
from packaging.requirements import Requirement

# What pip says of a package that no index has. It lists versions if only this version is missing.
_NO_INDEX = "(from versions: none)"


def environment_with(
    name: str, requirements: Sequence[str], *, adds_to_ours: bool = False, is_optional: bool = False
) -> Path:
    """Return the folder of an environment with these packages; the first call installs them.

    The test is skipped if pip reaches no index. It fails if the packages do not fit together.

    Args:
        name: a name for the folder.
        requirements: the packages, as pip takes them.
        adds_to_ours: whether the environment also has the packages of this one.
        is_optional: skip the test for whatever reason the packages cannot be installed.
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
            _install(folder, requirements, is_optional)
            (folder / "complete").touch()
    return folder


def _install(folder: Path, requirements: Sequence[str], is_optional: bool) -> None:
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

    reason = ended.stderr.strip().splitlines()[-1]
    if _NO_INDEX in ended.stderr:
        pytest.skip(f"pip reaches no index that has the packages: {reason}")
    if is_optional:
        pytest.skip(f"the packages cannot be installed here: {reason}")
    pytest.fail(ended.stderr)


def environment_with_extras(folder: Path, *extras: str) -> Path:
    """Make an environment with only the packages that ``pip install 'llmtrain[EXTRAS]'`` installs.

    They are links to those of this environment, so nothing is installed.

    Args:
        folder: the folder of the new environment.
        extras: the names of extras.

    Returns:
        The environment's Python.
    """
    venv.create(folder, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    ours = Path(sysconfig.get_path("purelib"))

    for name in sorted(_installed_with("llmtrain", extras)):
        files = distribution(name).files
        assert files, f"{name} has no list of files"
        for entry in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            link = packages / entry
            # Several packages may share a folder, such as google.
            if not link.is_symlink():
                link.symlink_to(ours / entry)
    return folder / "bin" / "python"


def _installed_with(name: str, extras: Sequence[str]) -> set[str]:
    """Return the names of the packages that pip installs for a package, and of the package."""
    names = set()
    open_requirements = [(name, frozenset(extras))]
    seen = set(open_requirements)
    while open_requirements:
        name, chosen = open_requirements.pop()
        package = distribution(name)
        names.add(package.name)
        for required in _requirements_of(package, chosen):
            further = (required.name, frozenset(required.extras))
            if further not in seen:
                seen.add(further)
                open_requirements.append(further)
    return names


def _requirements_of(package: Distribution, extras: frozenset[str]) -> list[Requirement]:
    """Return the requirements of a package that hold on this machine with these extras."""
    requirements = [Requirement(line) for line in package.requires or []]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]
