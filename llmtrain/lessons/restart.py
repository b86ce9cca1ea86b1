"""A process dies: the launcher stops the others and starts all of them again, and the run goes on.

A group that has lost a process cannot go on without it: the others wait in a collective that it will never join. So
they are ended, and torchrun, told so (--max-restarts), starts the program anew; it finds its newest whole checkpoint.
"""

import json
import tempfile
import time
from pathlib import Path

import psutil

from llmtrain.lessons.stage import claim, show, training
from llmtrain.record.history import read_lines

PROCESSES = 1


def main() -> None:
    """Kill a rank in the middle of a run, and look at what the run has logged at its end."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, restarts = Path(scratch) / "run", ("--standalone", "--max-restarts", "1")
        with training(folder, 60, "--save_steps", "5", processes=2, launcher=restarts) as launcher:
            while not any((folder / "checkpoints").glob("step-*[1-9]0")):
                assert launcher.poll() is None, "the run ended too early"
                time.sleep(0.01)
            workers = psutil.Process(launcher.pid).children()
            next(worker for worker in workers if worker.environ().get("RANK") == "1").kill()
            show("rank 1 was killed with SIGKILL, in a run that had saved step 10 or a later one")
        first, second = json.loads((folder / "run.json").read_text())["starts"]
        steps = [
            line["step"] for line in read_lines(folder / "metrics.jsonl") if "train/loss" in line
        ]
        claim(
            "the run began at step 0, and again at step 10 or later",
            first["step"] == 0 and second["step"] >= 10,
        )
        claim("every update from 1 to 60 is logged once", steps == list(range(1, 61)))
