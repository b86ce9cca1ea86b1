"""A process dies: the launcher starts all processes again, and the run resumes.

A group that has lost a process cannot continue without it: the others wait in a collective that it
will never join. So they are ended. With --max-restarts, torchrun then starts the program again, and
the program finds its newest complete checkpoint.
"""

import json
import tempfile
import time
from pathlib import Path

import psutil

from llmtrain.lessons.common import claim, show, training_run

STEPS = 60


def main() -> None:
    """Kill a rank in the middle of a run, and check which steps the run has logged."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        with training_run(folder, STEPS, "--save_steps=5", processes=2, restarts=1) as launcher:
            while not any((folder / "checkpoints").glob("step-*[1-9]0")):
                assert launcher.poll() is None, "the run ended too early"
                time.sleep(0.01)
            workers = psutil.Process(launcher.pid).children()
            next(worker for worker in workers if worker.environ().get("RANK") == "1").kill()
            show("rank 1 was killed with SIGKILL, in a run that had saved step 10 or a later one")

        first_start, second_start = json.loads((folder / "run.json").read_text())["starts"]
        entries = [json.loads(line) for line in (folder / "metrics.jsonl").open()]

    claim(
        "the run began at step 0, and again at step 10 or later",
        first_start["step"] == 0 and second_start["step"] >= 10,
    )
    logged_steps = [entry["step"] for entry in entries if "train/loss" in entry]
    claim(
        f"every step from 1 to {STEPS} is logged once",
        logged_steps == list(range(1, STEPS + 1)),
    )
