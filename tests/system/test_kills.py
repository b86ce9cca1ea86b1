"""Runs that are killed at random times, again and again, end with the same bits and rows."""

import os
import random
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault, tensors_digest
from tests.failing_calls import logging_calls, needs_failing_calls
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    accelerate,
    bound,
    long_form,
    metrics,
    ranks_of,
    read_json,
    series,
    start_process,
    stop_group,
    torchrun,
)

KILLS = int(os.environ.get("LLMTRAIN_KILLS", "1"))
MAX_STEPS = 150 if KILLS > 1 else 30  # a single kill needs fewer steps
SAVE_STEPS = 3
FLAGS = [
    *TINY,
    *shlex.split(
        f"--max_steps {MAX_STEPS} --save_steps {SAVE_STEPS} --log_rows --n_embd 128 --ddp_timeout 8"
    ),
]

DDP = accelerate("cpu_ddp")
FSDP2 = accelerate("fsdp2", "--mixed_precision", "no")
# A bitwise run has the bits of one process in any layout, so each start has another layout.
BITWISE_LAUNCHERS = [DDP, DDP, DDP, torchrun(4), DDP, PYTHON]

Random = random.Random
Wait = Callable[[subprocess.Popen, Path, Random], None]


class End(NamedTuple):
    """The results of a finished run that must not depend on interruptions."""

    digest: str  # of the weights and the optimizer
    rows: str
    eval_losses: dict[int, float]


def end_of(folder: Path) -> End:
    return End(
        digest=tensors_digest(folder / "checkpoints" / f"step-{MAX_STEPS:08d}"),
        rows=(folder / "rows.jsonl").read_text(),
        eval_losses=series(folder, "eval/loss"),
    )


def is_finished(folder: Path) -> bool:
    status = folder / "status.json"
    return status.exists() and read_json(status)["state"] == "finished"


def log_entries(folder: Path) -> int:
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def is_saving(folder: Path) -> bool:
    return any(folder.glob("checkpoints/.tmp-step-*"))


# --- times to kill


def wait_for_steps_or_ranks(process: subprocess.Popen, folder: Path, draw: Random) -> None:
    """Wait until a run has made some steps or, one time in five, until some ranks have started."""
    if draw.random() < 0.8:
        entries = log_entries(folder) + draw.randrange(1, 12)
        while process.poll() is None and log_entries(folder) < entries:
            time.sleep(0.01)
    else:
        ranks = draw.randrange(3)
        while process.poll() is None and len(ranks_of(process.pid)) < ranks:
            time.sleep(0.01)


def wait_for_a_save(process: subprocess.Popen, folder: Path, draw: Random) -> None:
    """Wait until a run has made some steps, and writes a checkpoint."""
    entries = log_entries(folder) + draw.randrange(1, 6)
    while process.poll() is None and (log_entries(folder) < entries or not is_saving(folder)):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))


def kill(process: subprocess.Popen, draw: Random) -> str:
    """Kill a rank, the launcher or all processes, and wait until the run has ended.

    Returns:
        The name of the victim.
    """
    descendants = psutil.Process(process.pid).children(recursive=True)
    ranks = ranks_of(process.pid)
    rank_names = [f"rank {i}" for i in range(len(ranks))]
    victim = draw.choice(["all", "the launcher", *rank_names])
    if victim == "all":
        stop_group(process)
    elif victim == "the launcher":
        process.kill()
    else:
        ranks[rank_names.index(victim)].kill()

    try:
        process.wait(timeout=90)
        _, alive = psutil.wait_procs(descendants, timeout=60)
        assert not alive, f"{alive} outlived the kill of {victim}"
    finally:
        stop_group(process)
        process.communicate()
    return victim


# --- the campaign


class Campaign:
    """Starts and kills runs, until there are enough kills and the last run has finished.

    Attributes:
        kills: the victim of each kill.
        kills_while_saving: kills while a checkpoint was being written.
        repeated_steps: for each start, the steps that the next start has to make again.
    """

    def __init__(
        self,
        root: Path,
        flags: list[str],
        launchers: list[list[str]],
        wait_for_time: Wait,
        expected: End,
    ) -> None:
        self.root = root
        self.flags = flags
        self.launchers = launchers
        self.wait_for_time = wait_for_time
        self.expected = expected
        self.draw = Random(KILLS)
        self.starts = 0
        self.kills: list[str] = []
        self.kills_while_saving = 0
        self.repeated_steps: list[int] = []
        self.finished_runs = 0

    def run(self) -> None:
        while True:
            folder = self.root / f"run-{self.finished_runs}"
            self.start_and_kill(folder)
            self.check_checkpoints(folder)
            if is_finished(folder):
                assert end_of(folder) == self.expected
                self.finished_runs += 1
                if len(self.kills) == KILLS:
                    return

    def start_and_kill(self, folder: Path) -> None:
        """Start or resume a run. Kill it, or let it finish if there have been enough kills."""
        launcher = self.launchers[self.starts % len(self.launchers)]
        process = start_process([*launcher, GPT, *self.flags, "--output_dir", str(folder)])
        self.starts += 1
        try:
            if len(self.kills) < KILLS:
                self.wait_for_time(process, folder, self.draw)
            else:
                process.communicate(timeout=200)
            if process.poll() is None:
                self.kills_while_saving += is_saving(folder)
                self.kills.append(kill(process, self.draw))
        finally:
            stop_group(process)
            process.communicate()

    def check_checkpoints(self, folder: Path) -> None:
        """Assert that all checkpoints are intact, and that the newest one is not too old."""
        faults = {path: find_fault(path) for path in checkpoints(folder / "checkpoints")}
        assert not any(faults.values()), faults

        newest = max((int(path.name.removeprefix("step-")) for path in faults), default=0)
        last_step = metrics(folder)[-1]["step"] if log_entries(folder) else 0
        self.repeated_steps.append(last_step - newest)
        assert last_step - newest <= SAVE_STEPS

        if (folder / "status.json").exists():
            status = read_json(folder / "status.json")
            is_kept = newest >= status["step"]
            assert is_kept or status["state"] == "failed", "the status names a lost checkpoint"


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize(
    ("layout", "flags", "launchers", "wait_for_time"),
    [
        pytest.param(
            "bitwise", ["--bitwise"], BITWISE_LAUNCHERS, wait_for_steps_or_ranks, id="bitwise"
        ),
        pytest.param("sharded", [], [FSDP2], wait_for_a_save, id="sharded", marks=long_form),
    ],
)
def test_killed_runs_end_with_the_same_bits_and_rows(
    layout: str,
    flags: list[str],
    launchers: list[list[str]],
    wait_for_time: Wait,
    text_file: Path,
    tmp_path: Path,
    score: Callable[[str], None],
) -> None:
    all_flags = [*FLAGS, *flags, "--dataset", str(text_file)]
    reference = tmp_path / "reference"
    reference_launcher = FSDP2 if layout == "sharded" else PYTHON
    command = [*reference_launcher, GPT, *all_flags, "--output_dir", str(reference)]
    run_forked(command).assert_ok()

    campaign = Campaign(tmp_path, all_flags, launchers, wait_for_time, end_of(reference))
    campaign.run()

    victims = ", ".join(f"{n} of {victim}" for victim, n in sorted(Counter(campaign.kills).items()))
    kills = f"{bound(0, len(campaign.kills))} kills ({victims}) in {campaign.starts} starts"
    score(
        f"kills, {layout}: checkpoints lost: {kills}; "
        f"{campaign.kills_while_saving} while a checkpoint was written"
    )
    repeated = max(campaign.repeated_steps)
    score(f"kills, {layout}: at most {repeated} steps made again, with a save each {SAVE_STEPS}")
    different_ends = bound(0, campaign.finished_runs)
    score(f"kills, {layout}: runs that ended with another hash or other rows: {different_ends}")


# --- a run that is killed while it makes the rows for others, too

KILLED_MAKER = """
import importlib, os, runpy, signal, sys, time

calls, module, function, when, *sys.argv = sys.argv[1:]
owner = importlib.import_module(module)
*names, function = function.split(".")
for name in names:
    owner = getattr(owner, name)
original = getattr(owner, function)

def call_and_die(path, *arguments, **options):
    original(path, *arguments, **options)
    if when not in str(path):
        return
    open(calls, "a").write("killed\\n")
    while "flock" not in open(calls).read():  # the other run waits for the lock
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, function, call_and_die)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@needs_failing_calls
@pytest.mark.parametrize(
    ("module", "function", "when"),
    [
        pytest.param("llmtrain.data.corpus", "write_stream", "train-0", id="half-of-the-rows"),
        # A damaged entry is out of the way, and the new one is not there yet.
        pytest.param("pathlib", "Path.rename", "cache/", id="no-entry", marks=long_form),
    ],
)
def test_a_run_whose_rows_another_one_made_half_ends_with_the_same_bits(
    module: str, function: str, when: str, text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file), "--output_dir"]
    alone = tmp_path / "alone"
    command = [*PYTHON, GPT, *flags]
    run_forked([*command, str(alone)], {"LLMTRAIN_CACHE": str(tmp_path / "other")}).assert_ok()

    cache = tmp_path / "cache"
    env = {"LLMTRAIN_CACHE": str(cache)}
    if function == "Path.rename":
        run_forked([*command, str(tmp_path / "none"), "--dry_run"], env).assert_ok()
        [rows] = cache.glob("*/train-0.arrow")
        rows.unlink()
    calls = tmp_path / "calls"
    calls.touch()
    script = tmp_path / "maker.py"
    script.write_text(KILLED_MAKER)
    maker = start_process(
        [
            *PYTHON,
            str(script),
            str(calls),
            module,
            function,
            when,
            GPT,
            *flags,
            str(tmp_path / "a"),
        ],
        env,
    )
    try:
        while "killed" not in calls.read_text():
            assert maker.poll() is None, maker.communicate()
            time.sleep(0.02)
        folder = tmp_path / "run"
        run_forked([*command, str(folder)], env | logging_calls(str(cache), calls)).assert_ok()
        assert maker.wait(timeout=60) == -signal.SIGKILL
    finally:
        stop_group(maker)

    step = "checkpoints/step-00000006"
    assert tensors_digest(folder / step) == tensors_digest(alone / step)
    entries = [path for path in cache.iterdir() if path.is_dir()]
    [expected] = [path for path in (tmp_path / "other").iterdir() if path.is_dir()]
    assert [entry.name for entry in entries] == [expected.name], "nothing is left of the other run"
    for path in expected.glob("*.*"):
        assert (entries[0] / path.name).read_bytes() == path.read_bytes()
