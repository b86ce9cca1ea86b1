"""The identity of a run, and what it ran on: the content of ``run.json``, and what all ranks must agree on."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from llmtrain._version import __version__
from llmtrain.errors import UserError
from llmtrain.parallel.team import Team
from llmtrain.record.format import read_versioned, with_version
from llmtrain.record.resume_point import ResumePoint
from llmtrain.secrets import redacted
from llmtrain.types import Facts

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")
_INSTALLED = {"site-packages", "dist-packages"}  # folders of installed packages
# Flags that may differ between machines: where things are, and what only rank 0 does.
_LOCAL_FLAGS = {
    "dataset",
    "tokenizer",
    "output_dir",
    "run_name",
    "resume_from_checkpoint",
    "report_to",
}


def digest(identity: Facts) -> str:
    """Return the sha256 of an identity, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def version_of(package: str) -> str:
    """Return the version of an installed package; an empty string where there is none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


def versions() -> dict[str, str]:
    """Return the versions of Python and of every package that the numbers depend on."""
    own = {"python": platform.python_version(), "llmtrain": version_of("llmtrain") or __version__}
    return own | {package: version_of(package) or "absent" for package in _PACKAGES}


def code_digest() -> str:
    """Return one sha256 over all the code of :func:`code_digests`."""
    return digest(code_digests())


def code_digests() -> dict[str, str]:
    """Return the sha256 of the code that runs: ``package``, ``script``, and helper modules by file name.

    Helper modules are those that the process has imported from the script's folder or below it.
    Installed packages are left out: :func:`versions` names the ones that matter.
    """
    package = Path(__file__).resolve().parents[1]
    script = Path(sys.argv[0]).resolve()
    helpers: dict[str, Path] = {}
    if script.is_file():
        helpers = _modules_below(script.parent, leave_out=package)
        helpers.pop(script.name, None)

    digests = {
        "package": _sha256_of(sorted(package.rglob("*.py"))),
        "script": _sha256_of([script]),
    }
    for name, path in sorted(helpers.items()):
        digests[name] = _sha256_of([path])
    return digests


def _modules_below(folder: Path, leave_out: Path) -> dict[str, Path]:
    """Return the files of the imported modules below a folder, by their names relative to it."""
    libraries = Path(sysconfig.get_path("stdlib"))
    files = {}
    for module in list(sys.modules.values()):
        name = getattr(module, "__dict__", {}).get("__file__")  # no lazy import is set off
        if not isinstance(name, str):
            continue
        path = Path(os.path.abspath(name))  # noqa: PTH100 - resolve() is slow for so many files
        is_installed = path.is_relative_to(libraries) or bool(_INSTALLED & {*path.parts})
        is_helper = path.is_relative_to(folder) and not path.is_relative_to(leave_out)
        if is_helper and not is_installed:
            files[str(path.relative_to(folder))] = path
    return files


def _sha256_of(paths: list[Path]) -> str:
    """Return one sha256 over the files that can be read."""
    total = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            total.update(path.read_bytes())
    return total.hexdigest()


def difference(before: object, now: object) -> str:
    """Return two values of one identity key, for a person; of dictionaries only what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        return ", ".join(
            f"{key} {before.get(key)} there, {now.get(key)} here" for key in sorted(keys)
        )
    return f"{before} there, {now} here"


def what_runs(identity: Facts, settings: dict[str, Facts], precision: str) -> Facts:
    """Return what this rank is about to train, and with which code.

    Args:
        identity: the identity of the run.
        settings: every flag with its value and origin (:func:`llmtrain.config.resolved`).
        precision: Accelerate's name of it.
    """
    flags = {
        name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS
    }
    return {
        "flags": flags,
        **identity,
        "precision": precision,
        "versions": versions(),
        "code": code_digests(),
    }


def check_same_everywhere(team: Team, mine: Facts) -> None:
    """Raise :class:`UserError`, on all ranks, if a rank is about to train something else than rank 0.

    Each machine may have its own command, data, packages and code.

    Args:
        mine: what :func:`what_runs` returns on this rank.
    """
    first, *others = team.each(lambda: mine)
    for rank, theirs in enumerate(others, 1):
        for key in first:
            here, there = _comparable(key, first, theirs)
            if here != there:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {key}: {difference(there, here)}."
                )


def _comparable(key: str, first: Facts, other: Facts) -> tuple[Any, Any]:
    """Return the values under a key that two ranks must have in common."""
    here = first[key]
    there: Any = other.get(key)
    if key == "code":  # a rank may import a helper module that the other ranks do not need
        shared = here.keys() & there.keys()
        here = {name: here[name] for name in shared}
        there = {name: there[name] for name in shared}
    return here, there


def run_record(
    folder: Path,
    identity: Facts,
    settings: dict[str, Facts],
    details: Facts,
    resume_point: ResumePoint,
    start: Facts,
) -> Facts:
    """Return the content of ``run.json``: what is there already, and this start.

    Args:
        settings: every flag with its value and origin (:func:`llmtrain.config.resolved`).
        details: what else belongs there: facts of the data.
        start: ``processes``, ``sharded``, ``device`` and ``mixed_precision`` of this start.
    """
    this_start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": resume_point.step,
        "from": str(resume_point.checkpoint) if resume_point.checkpoint else None,
        "restart": int(
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        ),  # by the launcher (--max_restarts)
        "job": os.environ.get("SLURM_JOB_ID"),
        "command": []
        if "ipykernel" in sys.modules
        else redacted(sys.argv),  # which a notebook's is not
        "host": platform.node(),
        **start,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "git_sha": git_commit(),
        "code_sha256": code_digest(),
    }
    record = {
        "run_id": resume_point.run_id,
        "identity": identity,
        "identity_sha256": digest(identity),
        "processes": start["processes"],
        "settings": {
            k: {**redacted(v), "value": redacted(v["value"], k)} for k, v in settings.items()
        },
        **redacted(details),
        "starts": [*read_versioned(folder / "run.json").get("starts", []), this_start],
    }
    return with_version(record)


def git_commit() -> str | None:
    """Return the commit of the repository that holds the script, or ``None`` without a repository.

    It ends in ``-dirty`` if a tracked file has changed since, and in ``-unknown`` if git could not
    tell.
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    changes = _git("status", "--porcelain", "--untracked-files=no")
    if changes is None:
        return f"{commit}-unknown"
    return f"{commit}-dirty" if changes else commit


def _git(*words: str) -> str | None:
    """Return what git prints in the script's folder, or ``None`` if it fails or takes too long."""
    folder = str(Path(sys.argv[0]).resolve().parent)
    command = ["git", "-C", folder, "--no-optional-locks", *words]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return done.stdout.strip()
    return None
