"""recipes/gpt.py that notes when each phase begins, and signals itself or its launcher in one.

The file of the variable MARKS gets a line for each phase: its name and the time. MOMENT is JSON: the
rank that signals, the phase, how often it has begun, seconds after that, the signal, and whether
the launcher gets it.
"""

import functools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

begun: Counter[str] = Counter()
rank = int(os.environ.get("RANK", "0"))
moment = json.loads(os.environ.get("MOMENT", "{}"))


def begin(phase: str) -> None:
    begun[phase] += 1
    if rank == moment.get("rank", 0):
        with Path(os.environ["MARKS"]).open("a") as marks:
            marks.write(f"{phase} {time.monotonic()}\n")
    if (rank, phase, begun[phase]) == (moment.get("rank"), moment["phase"], moment["count"]):
        process = os.getppid() if moment["to_launcher"] else os.getpid()
        threading.Timer(moment["seconds"], os.kill, (process, moment["signal"])).start()


def marked(phase: str, function: Callable, next_phase: str = "") -> Callable:
    """Return a function that begins a phase, and the next one when it returns."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin(phase)
        result = function(*args, **kwargs)
        if next_phase:
            begin(next_phase)
        return result

    return call


begin("import")

import llmtrain as lt  # noqa: E402
from recipes import gpt  # noqa: E402

build = gpt.build


def build_marked(*args: Any) -> Any:
    """Build the model, when everything is imported."""
    from llmtrain.training import loop, opening, periodic, run

    periodic.Evaluation._evaluate = marked("evaluation", periodic.Evaluation._evaluate, "training")
    loop.train_step = marked("step", loop.train_step)
    periodic.save = marked("saving", periodic.save, "training")
    periodic.write_model = marked("export", periodic.write_model)
    periodic.final_sample = marked("sample", periodic.final_sample)
    opening.leave_group = marked("leaving", opening.leave_group)
    run.show_result = marked("showing", run.show_result)
    return build(*args)


if __name__ == "__main__":
    gpt.tokenized = marked("tokenising", gpt.tokenized, "torch")
    gpt.build = marked("building", build_marked, "opening")
    begin("launch")
    lt.launch(gpt.main)
