"""Measure the memory of a run with the operating system, to compare it with a plan."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.launching import read_json, run

SCRIPT = "tests/system/memory_ranks.py"


class MeasuredMemory(NamedTuple):
    """Bytes of one process."""

    weights: int
    frozen: int  # weights of frozen models
    gradients: int  # the most at any time
    optimizer: int
    added_by_step: float  # the most during a step, minus the memory before that step

    @property
    def total(self) -> float:
        return self.weights + self.frozen + self.optimizer + self.added_by_step


def measure_run(
    launcher: list[str], recipe: str, flags: list[str], folder: Path, timeout: float = 400
) -> MeasuredMemory:
    """Train in a new folder, and return the memory of the process that holds the most."""
    folder.mkdir()
    command = [*launcher, SCRIPT, str(folder), recipe, *flags, "--output_dir", str(folder / "run")]
    # With this threshold, malloc returns freed memory to the system.
    variables = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    variables["PYTHONWARNINGS"] = "default"  # the benchmarks measure with other versions, too
    run(command, variables, timeout).assert_ok()

    ranks = [MeasuredMemory(**read_json(path)) for path in folder.glob("*.json")]
    return max(ranks, key=lambda memory: memory.weights + memory.optimizer)


def planned_step(layout: dict[str, Any]) -> int:
    """Return the bytes that a step adds, by a layout of `llmtrain plan --json`.

    DDP keeps its gradients between steps. Other layouts release them.
    """
    memory = layout["bytes"]
    kept = memory["weights"] + memory["frozen"] + memory["optimizer"]
    if layout["name"] == "DDP":
        kept += memory["gradients"]
    return memory["total"] - kept


def resident(key: str) -> int:
    """Return how many bytes of this process are in memory, by proc(5).

    Args:
        key: ``VmRSS`` for the memory now, or ``VmHWM`` for its peak.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(key)]
    kilobytes = int(line.split()[1])
    return 1024 * kilobytes


def can_measure() -> bool:
    """Return whether this process may reset its peak."""
    return os.access("/proc/self/clear_refs", os.W_OK)
