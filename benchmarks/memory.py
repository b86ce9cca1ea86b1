"""Measure the memory of a process, and of a training run."""

import json
from pathlib import Path
from typing import Any

from benchmarks.comparison import Figures
from benchmarks.runs import flags, run


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most bytes that were in memory since ``reset_peak``."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let the peak of this process start again; see proc(5)."""
    Path("/proc/self/clear_refs").write_text("5")


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            kilobytes = line.split()[1]
            return 1024 * int(kilobytes)
    raise ValueError(f"/proc/self/status has no {key}")


def measure_run(launch: list[str], recipe: str, recipe_flags: list[str], folder: Path) -> Figures:
    """Run a recipe, and return the bytes of the process that holds most.

    Args:
        launch: the command that launches a Python script.
        recipe: the file of the recipe.
        recipe_flags: its flags, without the run folder.
        folder: a new folder, for the run and the figures.

    Returns:
        The bytes of ``weights``, ``gradients`` and ``optimizer`` state, and ``rise``: the peak
        during a step, above the memory before the step.
    """
    folder.mkdir()
    output_dir = flags(output_dir=folder / "run")
    run(
        [*launch, "-m", "benchmarks.memory_run", folder, recipe, *recipe_flags, *output_dir],
        threads=1,
        MALLOC_MMAP_THRESHOLD_="65536",  # freed memory goes back to the system
    )
    ranks: list[Figures] = [json.loads(file.read_text()) for file in folder.glob("rank-*.json")]
    return max(ranks, key=lambda rank: rank["weights"] + rank["optimizer"])


def predicted_rise(layout: dict[str, Any]) -> float:
    """Return what ``llmtrain plan`` predicts for the ``rise`` of a layout.

    DDP keeps the gradients from step to step, so they are not part of the rise.
    """
    sizes = layout["bytes"]
    rise: float = sizes["total"] - sizes["weights"] - sizes["optimizer"]
    if layout["name"] == "DDP":
        rise -= sizes["gradients"]
    return rise
