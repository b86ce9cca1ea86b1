"""Check a student's function on several processes, by the assertions of its lesson.

The processes are forked from one that has imported torch. Each reports what is wrong. One that is
still busy after some seconds reports the line at which it waits, and ends.
"""

import importlib
import json
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llmtrain.errors import first_line
from llmtrain.files import JsonObject
from llmtrain.lessons import LESSONS

FOLDER = Path(__file__).parent / "exercises"
SECONDS = 20  # after which an answer is endless


def exercises() -> dict[str, str]:
    """Return the exercises by their lessons: files with a function to write."""
    files = {path.stem: path for path in FOLDER.glob("*.txt")}
    return {name: files[name].read_text() for name in LESSONS if name in files}


def check_answer(lesson: str, file: Path, seed: int) -> JsonObject:
    """Run a student's function on 2 and then on 3 processes.

    Args:
        lesson: the name of a lesson that has an exercise.
        file: the student's file.
        seed: chooses the input.

    Returns:
        ``right``. If the answer is wrong, also the number of ``processes``, the ``symptom`` with
        its details, and a ``hint``.
    """
    import yaml

    hints = yaml.safe_load((FOLDER / "hints.yaml").read_text())
    for processes in (2, 3):
        finding = _run_ranks(lesson, str(file.resolve()), seed, processes)
        if finding:
            by_symptom = hints["any"] | hints[lesson]
            hint = by_symptom.get(finding["symptom"], by_symptom["exception"])
            finding = {"right": False, "processes": processes} | finding
            return finding | {"hint": hint.format(**finding).strip()}
    return {"right": True}


def _run_ranks(lesson: str, file: str, seed: int, processes: int) -> JsonObject:
    """Return what is wrong with an answer on some processes; empty if nothing is."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([f"llmtrain.lessons.{name}" for name in exercises()])
    reports: Any = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as scratch:
        arguments = (processes, lesson, file, seed, f"file://{scratch}/store", reports)
        ranks = [context.Process(target=_run_rank, args=(r, *arguments)) for r in range(processes)]
        try:
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                process.kill()

    findings: list[JsonObject] = []
    while not reports.empty():
        findings.append(reports.get())
    if len(findings) < processes:
        findings.insert(0, {"symptom": "died"})
    # The first finding explains the others: a rank that ends makes them lose their connections.
    first: JsonObject = next((finding for finding in findings if finding["symptom"]), {})
    if first.get("symptom") == "waits":
        places = [f"rank {f['rank']} in {f['place']}" for f in findings if f["symptom"] == "waits"]
        first["places"] = ", ".join(sorted(places))
    return first


def _run_rank(
    rank: int, processes: int, lesson: str, file: str, seed: int, store: str, reports: Any
) -> None:
    """Check an answer as one of several ranks, report what is wrong with it, and exit."""
    import torch
    import torch.distributed as dist

    from llmtrain.lessons.common import WrongAnswerError, expect

    def report(symptom: str, stack: Iterable[traceback.FrameSummary] = (), **details: Any) -> None:
        lines = [frame.lineno for frame in stack if frame.filename == file]
        place = f"line {lines[-1]}" if lines else "the check"
        finding = {"symptom": symptom, "rank": rank, "place": place, **details}
        reports.put(json.loads(json.dumps(finding, default=str)))  # no tensors of the student

    def watch() -> None:
        time.sleep(SECONDS)
        main_thread = sys._current_frames()[threading.main_thread().ident or 0]
        report("waits", traceback.extract_stack(main_thread), seconds=SECONDS)
        time.sleep(1)  # so that the other ranks report, too
        os._exit(1)

    sys.stdout = sys.stderr  # stdout has the result only
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=processes)
    threading.Thread(target=watch, daemon=True).start()
    dist.barrier()  # so that no rank ends while another one connects
    try:
        [name] = re.findall(r"^def (\w+)", exercises()[lesson], re.MULTILINE)
        answer = runpy.run_path(file)
        expect(name in answer, "missing", function=name)
        importlib.import_module(f"llmtrain.lessons.{lesson}").check(answer[name], processes, seed)
        report("")
    except WrongAnswerError as wrong:
        report(wrong.args[0], **wrong.args[1])
    except BaseException as error:
        stack = traceback.extract_tb(error.__traceback__)
        report(type(error).__name__, stack, error=first_line(error))
    os._exit(0)
