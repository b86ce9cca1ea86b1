"""A few real updates on this machine, by processes that compute side by side and send nothing."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

from llmtrain.commands.trial import gpus, kill, launcher_of, why_it_failed
from llmtrain.errors import UserError
from llmtrain.plan.speed import Compute

_UPDATES = 12  # the first of which a reading leaves out


def calibrated(recipe: str, flags: list[str], processes: int, rows: int, precision: str) -> Compute:
    """What ``processes`` processes need for micro-batches of ``rows`` rows, the slowest of them. Raises
    :class:`UserError` with what the recipe said, where it failed."""
    forced = {"max_steps": _UPDATES, "logging_steps": _UPDATES, "report_to": "none", "resume_from_checkpoint": "never"}
    forced |= {"global_batch_size": rows * processes, "per_device_train_batch_size": rows}
    forced |= {"sync_every": 10**6, "ddp_comm_hook": "none", "pipeline_stages": 1} if processes > 1 else {}
    with tempfile.TemporaryDirectory(prefix="llmtrain-plan-") as folder:
        run, said = Path(folder) / "run", Path(folder) / "err"
        words = [word for name, value in forced.items() for word in (f"--{name}", str(value))]
        command = [*launcher_of(processes, None), recipe, *flags, *words, "--output_dir", str(run)]
        env = dict(os.environ) | {"ACCELERATE_MIXED_PRECISION": precision}
        env |= {"ACCELERATE_USE_CPU": "true"} if processes > gpus() else {}
        with said.open("wb") as err:
            process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=err, start_new_session=True)
        try:
            process.wait()
        finally:
            kill(process)
        if process.returncode:
            raise UserError(f"calibrating failed: {why_it_failed(said)}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reading = next(line["phases"] for line in reversed(lines) if "phases" in line)

    def seconds(*phases: str) -> float:
        return max(sum(ranks) for ranks in zip(*(reading[phase] for phase in phases), strict=True))

    return Compute(
        seconds("forward") / rows,
        seconds("backward") / rows,
        optimizer=seconds("optimizer"),
        other=seconds("data", "other"),
    )
