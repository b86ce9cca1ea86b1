"""A few real steps on this machine, from which a plan takes its seconds.

One ordinary run is enough. In some phases of a step every process computes by itself; in the others, the meetings, it
also waits (``MEETINGS`` and ``OWN`` of ``observe/phases.py``). The seconds of computing come from the first, and what
sending takes from the processors comes from the second.
"""

import math
import tempfile
from pathlib import Path

from llmtrain.launching.children import command_of, gpus, run_to_end
from llmtrain.observe.phases import OWN
from llmtrain.plan.speed import Compute
from llmtrain.record.history import read_lines
from llmtrain.types import Facts

_STEPS = 12  # the first of which is not measured


def calibrated(
    recipe: str, flags: list[str], processes: int, rows: int, precision: str, numbers: int
) -> Compute:
    """Run a few steps of a recipe and return how long its computing takes.

    Args:
        recipe: path of the recipe.
        flags: its flags.
        processes: how many processes compute side by side.
        rows: rows of a micro-batch; each process has one micro-batch a step.
        precision: mixed precision, as Accelerate calls it.
        numbers: trained parameters of the model.

    Returns:
        The seconds of the slowest process.

    Raises:
        UserError: with the recipe's message, if it failed.
    """
    forced: Facts = {
        "global_batch_size": rows * processes,
        "per_device_train_batch_size": rows,
        "ddp_comm_hook": "none",
    }
    if "--pipeline_stages" in flags:
        forced["pipeline_stages"] = 1
    phases = _phases(recipe, flags, processes, precision, forced)
    compute = compute_of(phases, rows)
    if processes == 1 or gpus() >= processes:
        return compute

    # gloo's threads share the cores with those that compute. All that a step takes beyond
    # computing is charged to the bytes that it sends.
    whole_step = _slowest(phases, *phases)
    computing = _slowest(phases, *OWN) + min(phases["norm"])
    bytes_sent = 2 * (processes - 1) / processes * 4 * numbers
    return compute._replace(handling=max(0.0, whole_step - computing) / bytes_sent)


def compute_of(phases: dict[str, list[float]], rows: int) -> Compute:
    """Return the seconds of computing, given those of each phase by rank.

    The norm of the gradient is a meeting that also computes. The process that comes last to it
    waits for nobody, so the shortest time is what computing it takes.
    """
    return Compute(
        forward=_slowest(phases, "forward") / rows,
        backward=_slowest(phases, "backward") / rows,
        optimizer=_slowest(phases, "optimizer") + min(phases["norm"]),
        other=_slowest(phases, "data", "other"),
    )


def _slowest(phases: dict[str, list[float]], *names: str) -> float:
    """Return the seconds that the slowest rank spends in some phases."""
    by_rank = zip(*(phases[name] for name in names), strict=True)
    return max(math.fsum(seconds) for seconds in by_rank)


def _phases(
    recipe: str, flags: list[str], processes: int, precision: str, forced: Facts
) -> dict[str, list[float]]:
    """Run a few steps; return the mean seconds of a step in each phase, by rank."""
    with tempfile.TemporaryDirectory(prefix="llmtrain-plan-") as folder:
        run = Path(folder) / "run"
        forced = forced | {
            "max_steps": _STEPS,
            "logging_steps": _STEPS,
            "eval_steps": 0,
            "resume_from_checkpoint": "never",
            "report_to": "none",
            "output_dir": run,
        }
        command = command_of([recipe, *flags], forced, processes)
        run_to_end(command, processes > gpus(), ACCELERATE_MIXED_PRECISION=precision)
        entries = [line for line in read_lines(run / "metrics.jsonl") if "phases" in line]
    return dict(entries[-1]["phases"])
