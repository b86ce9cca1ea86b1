"""Who a run is, and what it ran on: the parts of ``run.json``."""

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
from typing import Any

import torch
from accelerate import Accelerator

from llmtrain._version import __version__
from llmtrain.parallel.mesh import sharding_of
from llmtrain.secrets import redacted

_PACKAGES = ("llmtrain", "torch", "accelerate", "transformers", "datasets", "tokenizers", "numpy", "wandb")


def digest(identity: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Of Python and of every package that the numbers depend on."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = __version__ if package == "llmtrain" else "absent"
    return found


def code_digest() -> str:
    """One sha256 over this package's sources and the script that was started."""
    total = hashlib.sha256()
    package = Path(__file__).resolve().parent.parent
    for path in [*sorted(package.rglob("*.py")), Path(sys.argv[0])]:
        with contextlib.suppress(OSError):
            total.update(path.read_bytes())
    return total.hexdigest()


def difference(before: Any, now: Any) -> str:
    """Two values of one identity key, for a person; of dictionaries only what differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        return ", ".join(f"{key} {before.get(key)} there, {now.get(key)} here" for key in sorted(keys))
    return f"{before} there, {now} here"


def run_record(
    accelerator: Accelerator,
    folder: Path,
    identity: dict[str, Any],
    settings: dict[str, dict[str, Any]],
    details: dict[str, Any],
    choice: dict[str, Any],
) -> dict[str, Any]:
    starts = []
    with contextlib.suppress(OSError, ValueError):
        starts = json.loads((folder / "run.json").read_text()).get("starts", [])
    start = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "step": choice["step"],
        "from": choice["checkpoint"],
        "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),  # by the launcher (--max_restarts)
        "job": os.environ.get("SLURM_JOB_ID"),
        "command": [] if "ipykernel" in sys.modules else redacted(sys.argv),  # which a notebook's is not
        "host": platform.node(),
        "processes": accelerator.num_processes,
        "sharded": _sharded(accelerator),
        "device": str(accelerator.device.type),
        "threads": torch.get_num_threads(),
        "mixed_precision": accelerator.mixed_precision,
        "versions": versions(),
        "git_sha": _git_sha(),
        "code_sha256": code_digest(),
    }
    return {
        "run_id": choice["run_id"],
        "identity": identity,
        "identity_sha256": digest(identity),
        "processes": accelerator.num_processes,
        "settings": {k: {**redacted(v), "value": redacted(v["value"], k)} for k, v in settings.items()},
        **redacted(details),
        "starts": [*starts, start],
    }


def _sharded(accelerator: Accelerator) -> str | None:
    """Replicas x processes that share one, x those that compute with parts of it; and the stages of a pipeline."""
    sharding = sharding_of(accelerator)
    if sharding is None:
        return None
    stages = f" in {sharding.stages} stages" if sharding.stages > 1 else ""
    return f"{sharding.replicas}x{sharding.shards}" + (f"x{sharding.tensor}" if sharding.tensor > 1 else "") + stages


def _git_sha() -> str | None:
    """Of the repository that the started script stands in."""
    folder = Path(sys.argv[0]).resolve().parent
    try:
        out = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return out.stdout.strip()
