"""Measures how fast this machine computes: by a few real steps, or by products of matrices.

For the steps one ordinary run is enough. In some phases of a step every process computes by itself:
``OWN_PHASES`` in :mod:`llmtrain.phase_names`. They measure computing. In the other phases,
``SYNC_PHASES``, processes also wait for each other. They measure how much of the processors' time
it takes to send.
"""

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from llmtrain.json_types import JsonObject
from llmtrain.lab.plan.speed import Compute
from llmtrain.launching.children import (
    has_too_few_gpus,
    recipe_command,
    run_command,
    short_run_flags,
)
from llmtrain.phase_names import OWN_PHASES
from llmtrain.record.history import read_lines

_STEPS = 12  # the first one is not measured

# Sizes of the square matrices whose product measures a device, and how often it is computed.
_MATRIX_SIZES_CPU = (192, 768)
_MATRIX_SIZES_GPU = (1024, 4096)
_PRODUCTS = 20


def calibrate(
    recipe: str,
    flags: list[str],
    processes: int,
    rows: int,
    precision: str,
    trained_numel: int,
) -> Compute:
    """Run a few steps of a recipe, and return how long its computing takes.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        processes: how many processes compute side by side.
        rows: rows per micro-batch. Each process has one micro-batch per step.
        precision: mixed precision, as Accelerate calls it.
        trained_numel: the number of trained parameters of the model.

    Returns:
        The seconds of the slowest process.

    Raises:
        UserError: if the recipe failed, with its own message.
    """
    forced: JsonObject = {
        "global_batch_size": rows * processes,
        "per_device_train_batch_size": rows,
        "mixed_precision": precision,
    }
    phases = _run_steps(recipe, flags, processes, forced)

    compute = compute_from_phases(phases, rows)
    if processes == 1 or not has_too_few_gpus(processes):
        return compute

    # The threads of gloo share the cores with those that compute. All that a step takes beyond
    # computing is charged to the bytes that it sends.
    step_seconds = _slowest(phases, [*phases])
    compute_seconds = _slowest(phases, OWN_PHASES) + min(phases["norm"])
    bytes_sent = 2 * (processes - 1) / processes * 4 * trained_numel
    return compute._replace(per_sent_byte=max(0.0, step_seconds - compute_seconds) / bytes_sent)


def compute_from_phases(phases: dict[str, list[float]], rows: int) -> Compute:
    """Return the seconds of computing.

    The norm of the gradient is a meeting in which processes also compute. The last process to come
    waits for no other, so the shortest time is that of computing the norm.

    Args:
        phases: the mean seconds of a step in each phase, by rank.
        rows: rows of a process in each step.
    """
    return Compute(
        forward=_slowest(phases, ["forward"]) / rows,
        backward=_slowest(phases, ["backward"]) / rows,
        optimizer=_slowest(phases, ["optimizer"]) + min(phases["norm"]),
        other=_slowest(phases, ["data", "other"]),
    )


def _slowest(phases: dict[str, list[float]], names: Sequence[str]) -> float:
    """Return the seconds that the slowest rank spends in some phases."""
    by_rank = zip(*(phases[name] for name in names), strict=True)
    return max(math.fsum(seconds) for seconds in by_rank)


def _run_steps(
    recipe: str,
    flags: list[str],
    processes: int,
    forced: JsonObject,
) -> dict[str, list[float]]:
    """Run a few steps; return the mean seconds of a step in each phase, by rank.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        processes: the number of processes.
        forced: values of flags that replace those in ``flags``.
    """
    with tempfile.TemporaryDirectory(prefix="llmtrain-plan-") as folder:
        output_dir = Path(folder) / "run"
        forced = forced | short_run_flags(_STEPS)
        forced |= {
            "logging_steps": _STEPS,
            "eval_steps": 0,
            "resume_from_checkpoint": "never",
            "output_dir": output_dir,
        }
        command = recipe_command([recipe, *flags], forced, processes)
        on_cpu = has_too_few_gpus(processes)
        run_command(command, on_cpu)
        entries = [line for line in read_lines(output_dir / "metrics.jsonl") if "phases" in line]
    return dict(entries[-1]["phases"])


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of a square matrix product, the best of several."""
    best = 0.0
    for size in _MATRIX_SIZES_GPU if device.type == "cuda" else _MATRIX_SIZES_CPU:
        flops = 2 * size**3
        # If the larger product would take more than a second, this precision is emulated here.
        if best and _PRODUCTS * flops / best > 1:
            break

        a = torch.ones(size, size, device=device, dtype=dtype)
        b = torch.ones(size, size, device=device, dtype=dtype)
        float((a @ b)[0, 0])  # the first product loads the kernel
        for _ in range(_PRODUCTS):
            start = time.perf_counter()
            float((a @ b)[0, 0])  # reading the result waits for the device
            best = max(best, flops / (time.perf_counter() - start))
    return best
