"""What a run really holds: its updates from the third on, watched by the operating system."""

import os
from pathlib import Path
from typing import Any

from tests.launching import read_json, run

SCRIPT = "tests/system/memory_ranks.py"


def measured(launcher: list[str], recipe: str, flags: list[str], folder: Path) -> dict[str, float]:
    """Bytes of ``weights``, ``gradients`` and ``optimizer`` state, and the ``most`` that was added to what stayed from
    the update before; of the process that holds most."""
    folder.mkdir()
    env = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "OMP_NUM_THREADS": "1",
    }  # what is freed goes back to the system
    run(
        [*launcher, SCRIPT, str(folder), recipe, *flags, "--output_dir", str(folder / "run")],
        env,
        400,
    ).assert_ok()
    ranks: list[dict[str, float]] = [read_json(path) for path in folder.glob("*.json")]
    return max(ranks, key=lambda found: found["weights"] + found["optimizer"])


def predicted_most(way: dict[str, Any]) -> float:
    """The same of a plan's way: DDP's gradients stay where they are."""
    held = way["bytes"]
    stays = held["weights"] + held["optimizer"] + (held["gradients"] if way["name"] == "DDP" else 0)
    return held["total"] - stays


def resident(key: str) -> int:
    """Bytes of this process that are in memory (``VmRSS``), or were at most (``VmHWM``): proc(5)."""
    [line] = [
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)
    ]
    return 1024 * int(line.split()[1])


def can_measure() -> bool:
    return os.access("/proc/self/clear_refs", os.W_OK)
