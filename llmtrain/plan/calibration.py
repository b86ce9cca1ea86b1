"""A few real updates on this machine, from which a plan takes its seconds.

Processes compute side by side and send nothing; then, over gloo, the same ones send, which shows what sending takes
from those that compute.
"""

import math
import tempfile
from pathlib import Path

from llmtrain.contract import Facts
from llmtrain.launching.children import command_of, gpus, run_to_end
from llmtrain.observe.phases import OWN
from llmtrain.plan.speed import Compute
from llmtrain.record.history import read_lines

_UPDATES = 12  # the first of which a reading leaves out


def calibrated(
    recipe: str, flags: list[str], processes: int, rows: int, precision: str, numbers: int
) -> Compute:
    """Return the seconds of the slowest of some processes, with micro-batches of ``rows`` rows.

    ``numbers`` of the model are trained. Raises :class:`UserError` with what the recipe said, where it failed.
    """
    common: Facts = {"global_batch_size": rows * processes, "per_device_train_batch_size": rows}
    common |= {"pipeline_stages": 1} if "--pipeline_stages" in flags else {}
    alone = {"sync_every": 10**6, "ddp_comm_hook": "none"} if processes > 1 else {}
    phases = _updates(recipe, flags, processes, precision, common | alone)
    forward, backward = (_slowest(phases, name) / rows for name in ("forward", "backward"))
    found = Compute(
        forward,
        backward,
        _slowest(phases, "norm", "optimizer"),
        other=_slowest(phases, "data", "other"),
    )
    if processes == 1 or gpus() >= processes:
        return found
    together = _updates(recipe, flags, processes, precision, common)
    more = _slowest(together, *together) - _slowest(phases, *OWN)
    return found._replace(handling=max(0.0, more) / (2 * (processes - 1) / processes * 4 * numbers))


def _slowest(phases: dict[str, list[float]], *names: str) -> float:
    return max(map(math.fsum, zip(*(phases[name] for name in names), strict=True)))


def _updates(
    recipe: str, flags: list[str], processes: int, precision: str, forced: Facts
) -> dict[str, list[float]]:
    """Return the mean seconds of an update in each phase, by rank."""
    forced = forced | {
        "max_steps": _UPDATES,
        "logging_steps": _UPDATES,
        "resume_from_checkpoint": "never",
    }
    with tempfile.TemporaryDirectory(prefix="llmtrain-plan-") as folder:
        run = Path(folder) / "run"
        forced |= {"report_to": "none", "eval_steps": 0, "output_dir": run}
        command = command_of([recipe, *flags], forced, processes)
        run_to_end(command, processes > gpus(), ACCELERATE_MIXED_PRECISION=precision)
        return dict(
            next(
                line["phases"]
                for line in reversed(read_lines(run / "metrics.jsonl"))
                if "phases" in line
            )
        )
