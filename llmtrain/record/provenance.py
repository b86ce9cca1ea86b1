"""The identity of a run, and what it ran on: the content of ``run.json``, and what all ranks must agree on."""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from llmtrain._version import __version__
from llmtrain.contract import Facts
from llmtrain.errors import UserError
from llmtrain.record.format import read_versioned, with_version
from llmtrain.record.team import Team
from llmtrain.secrets import redacted

if TYPE_CHECKING:
    from llmtrain.record.resume import Choice

_PACKAGES = ("torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")
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
    """Return one sha256 over this package's sources and the script that was started."""
    total = hashlib.sha256()
    for path in [*sorted(Path(__file__).resolve().parents[1].rglob("*.py")), Path(sys.argv[0])]:
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
    """Return what this rank is about to train, and with what; ``settings`` are every flag with its value and origin."""
    flags = {
        name: setting["value"] for name, setting in settings.items() if name not in _LOCAL_FLAGS
    }
    return {
        "flags": flags,
        **identity,
        "precision": precision,
        "versions": versions(),
        "code": code_digest(),
    }


def check_same_everywhere(team: Team, mine: Facts) -> None:
    """Raise :class:`UserError`, on all ranks, where one of them is about to train something else than rank 0.

    Each machine may have its own command, data, packages and code. ``mine`` is of :func:`what_runs`.
    """
    first, *others = team.each(lambda: mine)
    for rank, theirs in enumerate(others, 1):
        for key, value in first.items():
            if theirs.get(key) != value:
                raise UserError(
                    f"rank {rank} differs from rank 0 in {key}: {difference(theirs.get(key), value)}."
                )


def run_record(
    folder: Path,
    identity: Facts,
    settings: dict[str, Facts],
    details: Facts,
    choice: "Choice",
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
        "step": choice.step,
        "from": str(choice.checkpoint) if choice.checkpoint else None,
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
        "git_sha": _git_sha(),
        "code_sha256": code_digest(),
    }
    record = {
        "run_id": choice.run_id,
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


def _git_sha() -> str | None:
    """Return the commit of the repository that the started script stands in, where there is one."""
    command = ["git", "-C", str(Path(sys.argv[0]).resolve().parent), "rev-parse", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(
            command, capture_output=True, text=True, timeout=5, check=True
        ).stdout.strip()
    return None
