"""A process dies: the launcher stops the others and starts all of them again, and the run goes on.

A group that has lost a process cannot go on without it: the others wait in a collective that it will never join. So
they are ended, and torchrun, told so (--max-restarts), starts the program anew; it finds its newest whole checkpoint.
"""

import json
import tempfile
import time
from pathlib import Path

import psutil

from llmtrain.launch.children import kill
from llmtrain.lessons.stage import TINY_RUN, begin_recipe, finish, show

PROCESSES = 1


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        flags = [*TINY_RUN, "--max_steps", "60", "--save_steps", "5", "--output_dir", str(folder)]
        process = begin_recipe(2, *flags, launcher_flags=("--max-restarts", "1"))
        try:
            while last_checkpoint(folder) < 10:
                assert process.poll() is None, "the run ended too early"
                time.sleep(0.01)
            _rank_1_of(process.pid).kill()
            show("rank 1 was killed with SIGKILL, in a run that had saved at least step 10")
            finish(process)
        finally:
            kill(process)
        first, second = json.loads((folder / "run.json").read_text())["starts"]
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines if "train/loss" in line]
        show(f"the run began at step {first['step']}, and again at step 10 or later: {second['step'] >= 10}")
        show(f"every update is there once: {steps == list(range(1, 61))}; the last is {steps[-1]}")
        assert second["step"] >= 10
        assert steps == list(range(1, 61))


def last_checkpoint(folder: Path) -> int:
    found = sorted((folder / "checkpoints").glob("step-*"))
    return int(found[-1].name.removeprefix("step-")) if found else 0


def _rank_1_of(launcher: int) -> psutil.Process:
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            if child.environ().get("RANK") == "1":
                return child
        except psutil.Error:
            continue
    raise AssertionError("there is no rank 1")
