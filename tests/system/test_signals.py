"""A signal at any moment of a run, from the first import to the export, loses nothing.

`make torture` tries many moments.
"""

import itertools
import json
import os
import random
import re
import shlex
import signal
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault
from tests.forked import run_forked
from tests.launching import (
    PYTHON,
    TINY,
    Ended,
    bound,
    long_form,
    metrics,
    read_json,
    run,
    torchrun,
    write_text,
)
from tests.record.checkpoint_files import tensors_digest

MOMENTS = int(os.environ.get("LLMTRAIN_MOMENTS", "1"))  # for each number of processes
SEED = int(os.environ.get("LLMTRAIN_MOMENTS_SEED", "0"))
SCRIPT = "tests/system/signalled_gpt.py"
MAX_STEPS = 20
FLAGS = [
    *TINY,
    *shlex.split(f"--max_steps {MAX_STEPS} --save_steps 5 --eval_steps 5 --tokenizer bpe:512"),
]
# Before and after these, no run is open that could save, and a signal ends the process at once.
BEFORE = ["import", "launch", "tokenising", "torch", "building", "opening"]
OPEN = ["evaluation", "training", "step", "saving", "export", "sample"]
AFTER = ["leaving", "showing"]


def lengths_of_phases(marks: Path) -> dict[str, list[float]]:
    """Return for how many seconds each phase lasted that the recipe has noted, each time."""
    lines = [line.split() for line in marks.read_text().splitlines()]
    lengths = defaultdict(list)
    for (name, start), (_, end) in itertools.pairwise(lines):
        lengths[name].append(float(end) - float(start))
    return dict(lengths)


def drawn(lengths: dict[str, list[float]], draw: random.Random, processes: int) -> dict[str, Any]:
    """Draw a moment. Every kind of phase is as likely as the others."""
    phase = draw.choice(sorted(lengths))
    count = draw.randrange(len(lengths[phase]))
    return {
        "rank": draw.randrange(processes),
        "phase": phase,
        "count": count + 1,
        "seconds": draw.uniform(0, lengths[phase][count]),
        "signal": draw.choice([signal.SIGHUP, signal.SIGINT]),
        "to_launcher": processes > 1 and draw.random() < 0.5,
    }


def assert_ended(ended: Ended, folder: Path, moment: dict, has_launcher: bool) -> str:
    """Assert the documented exit status, and return the state of the run."""
    number = moment["signal"]
    state = "not open"
    if (folder / "run.json").exists():
        state = read_json(folder / "status.json")["state"]

    allowed = {
        # Python's own handler, before `launch`, exits as if the signal had killed the process.
        "not open": {130, -number} if number == signal.SIGINT else {-number},
        "running": {130, -number} if number == signal.SIGINT else {-number},
        "preempted": {128 + number},
        # A finished run's process may end before the signal comes, or in the middle of showing it.
        "finished": {0, 130 if number == signal.SIGINT else -number},
    }
    if has_launcher:
        allowed = {"not open": {1}, "running": {1}, "preempted": {0}, "finished": {0, 1}}
        if moment["to_launcher"]:  # it has a status of its own
            allowed = {state: {0, 1} for state in allowed}
    assert ended.status in allowed[state], (state, ended)
    if moment["phase"] in OPEN:
        assert state in ("preempted", "finished"), ended

    if state == "preempted":
        newest = checkpoints(folder / "checkpoints")[-1]
        step = read_json(folder / "status.json")["step"]
        assert newest.name == f"step-{step:08d}"
        assert find_fault(newest) is None
        assert metrics(folder)[-1]["step"] == step
    if moment["phase"] != "import":  # before `launch`, Python prints a traceback
        # A launcher's own traceback has no file of the package. Python prints one that it drops.
        traceback = re.search(r'File ".*(signalled_gpt|/llmtrain/|recipes/)', ended.err)
        assert traceback is None or "Exception ignored" in ended.err, ended.err
    return state


@long_form
@pytest.mark.timeout(120 + 60 * MOMENTS)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_that_is_signalled_at_any_moment_ends_with_the_same_bits(
    processes: int, tmp_path: Path, score: Callable[[str], None]
) -> None:
    text_file = write_text(tmp_path / "text.txt", sentences=20_000)
    launcher = PYTHON if processes == 1 else torchrun(processes)
    draw = random.Random(f"{SEED}/{processes}")

    def start_run(folder: Path, moment: dict | None = None) -> Ended:
        flags = [*FLAGS, "--dataset", str(text_file), "--output_dir", str(folder)]
        variables = {
            "LLMTRAIN_CACHE": f"{folder}-cache",  # every first start tokenises
            "MARKS": f"{folder}-marks",
            "MOMENT": json.dumps(moment or {"phase": "", "count": 0}),
        }
        start = run_forked if moment is None else run
        return start([*launcher, SCRIPT, *flags], variables)

    # A moment that never comes: the marks of this run have the times of a real process.
    start_run(tmp_path / "whole", {"phase": "", "count": 0}).assert_ok()
    expected = tensors_digest(tmp_path / f"whole/checkpoints/step-{MAX_STEPS:08d}")
    lengths = lengths_of_phases(tmp_path / "whole-marks")
    assert lengths.keys() == {*BEFORE, *OPEN, *AFTER} - {AFTER[-1]}

    states: Counter[str] = Counter()
    signalled: Counter[str] = Counter()
    for number in range(MOMENTS):
        moment = drawn(lengths, draw, processes)
        folder = tmp_path / str(number)
        ended = start_run(folder, moment)
        state = assert_ended(ended, folder, moment, has_launcher=processes > 1)
        states[state] += 1
        signalled[moment["phase"]] += 1
        if state != "finished":
            ended = start_run(folder).assert_ok()
            folder = Path(re.findall(r"^run +(\S+) \(", ended.out, re.MULTILINE)[0])
        assert tensors_digest(folder / f"checkpoints/step-{MAX_STEPS:08d}") == expected, moment

    score(f"signals, {processes} processes: runs with other bits: {bound(0, MOMENTS)}")
    score(f"signals, {processes} processes: states {dict(states)} after {dict(signalled)}")
