"""Runs that are killed at random times, again and again, end with the same bits and rows."""

import os
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault
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
from tests.record.checkpoint_files import tensors_digest

KILLS = int(os.environ.get("LLMTRAIN_KILLS", "1"))
MAX_STEPS = 150 if KILLS > 1 else 30  # a single kill needs fewer steps
SAVE_STEPS = 3
FLAGS = [*TINY, *shlex.split(f"--max_steps {MAX_STEPS} --save_steps {SAVE_STEPS} --log_rows")]
FLAGS += shlex.split("--n_embd 128 --ddp_timeout 8")

DDP = accelerate("cpu_ddp")
FSDP2 = accelerate("fsdp2")
# A bitwise run has the bits of one process in any layout, so each start has another layout.
BITWISE_LAUNCHERS = [DDP, PYTHON, DDP, torchrun(4), DDP]


def end_of(folder: Path) -> tuple[str, str, dict[int, float]]:
    """Return the tensors, rows and eval losses of a finished run. No interruption may change them."""
    return (
        tensors_digest(folder / "checkpoints" / f"step-{MAX_STEPS:08d}"),
        (folder / "rows.jsonl").read_text(),
        series(folder, "eval/loss"),
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
    victims: dict[str, Any] = {"the launcher": process}
    for rank, rank_process in enumerate(ranks_of(process.pid)):
        victims[f"rank {rank}"] = rank_process
    name = draw.choice(["all", *victims])
    if name == "all":
        stop_group(process)
    else:
        victims[name].kill()

    try:
        process.wait(timeout=90)
        _, alive = psutil.wait_procs(descendants, timeout=60)
        assert not alive, f"{alive} outlived the kill of {name}"
    finally:
        stop_group(process)
        process.communicate()
    return name


# --- the campaign


def check_checkpoints(folder: Path) -> int:
    """Assert that all checkpoints are intact, and that the newest one is not too old.

    Returns:
        How many steps the next start has to make again.
    """
    faults = {path: find_fault(path) for path in checkpoints(folder / "checkpoints")}
    assert not any(faults.values()), faults

    newest = max((int(path.name.removeprefix("step-")) for path in faults), default=0)
    last_step = metrics(folder)[-1]["step"] if log_entries(folder) else 0
    assert last_step - newest <= SAVE_STEPS

    if (folder / "status.json").exists():
        status = read_json(folder / "status.json")
        is_kept = newest >= status["step"]
        assert is_kept or status["state"] == "failed", "the status names a lost checkpoint"
    return last_step - newest


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize(
    ("flags", "launchers", "wait_for_time"),
    [
        pytest.param(["--bitwise"], BITWISE_LAUNCHERS, wait_for_steps_or_ranks, id="bitwise"),
        pytest.param([], [FSDP2], wait_for_a_save, id="sharded", marks=long_form),
    ],
)
def test_killed_runs_end_with_the_same_bits_and_rows(
    flags: list[str],
    launchers: list[list[str]],
    wait_for_time: Callable[[subprocess.Popen, Path, Random], None],
    text_file: Path,
    tmp_path: Path,
    score: Callable[[str], None],
) -> None:
    recipe = [GPT, *FLAGS, *flags, "--dataset", str(text_file), "--output_dir"]
    reference = tmp_path / "reference"
    run_forked([*launchers[1 % len(launchers)], *recipe, str(reference)]).assert_ok()

    draw = Random(KILLS)
    starts = 0
    victims: Counter[str] = Counter()
    kills_while_saving = 0
    repeated_steps = []
    finished_runs = 0
    is_over = False
    while not is_over:
        folder = tmp_path / f"run-{finished_runs}"
        # Start or resume the run. Let it finish if there have been enough kills.
        launcher = launchers[starts % len(launchers)]
        process = start_process([*launcher, *recipe, str(folder)])
        starts += 1
        try:
            if victims.total() < KILLS:
                wait_for_time(process, folder, draw)
            else:
                process.communicate(timeout=200)
            if process.poll() is None:
                kills_while_saving += is_saving(folder)
                victims[kill(process, draw)] += 1
        finally:
            stop_group(process)
            process.communicate()

        repeated_steps.append(check_checkpoints(folder))
        if is_finished(folder):
            assert end_of(folder) == end_of(reference)
            finished_runs += 1
            is_over = victims.total() == KILLS

    names = ", ".join(f"{count} of {victim}" for victim, count in sorted(victims.items()))
    kills = f"{bound(0, victims.total())} kills ({names}) in {starts} starts"
    score(f"kills: checkpoints lost: {kills}; {kills_while_saving} while a checkpoint was written")
    score(f"kills: at most {max(repeated_steps)} steps made again, with a save each {SAVE_STEPS}")
    score(f"kills: runs that ended with another hash or other rows: {bound(0, finished_runs)}")


# --- a run that is killed while it makes the rows for others, too

KILLED_MAKER = """
import os, pathlib, runpy, signal, sys, time
from llmtrain.data import corpus, prepare

owner, name, place = {moment}
original = getattr(owner, name)

def call_and_die(path, *arguments, **options):
    original(path, *arguments, **options)
    if place not in str(path):
        return
    calls = pathlib.Path({calls!r})
    calls.open("a").write("killed\\n")
    while "flock" not in calls.read_text():  # the other run waits for the lock
        time.sleep(0.02)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(owner, name, call_and_die)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HALF_OF_THE_ROWS = "corpus, 'write_stream', 'train-0'"
# All shards are complete, and there is no manifest.
NO_MANIFEST = "prepare, 'write_sealed', 'shard-0'"
# A damaged entry is gone, and the new one has nothing but a tokenizer.
NO_ENTRY = "pathlib.Path, 'rename', 'cache/'"


@needs_failing_calls
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(HALF_OF_THE_ROWS, id="half-of-the-rows"),
        pytest.param(NO_MANIFEST, id="no-manifest", marks=long_form),
        pytest.param(NO_ENTRY, id="no-entry", marks=long_form),
    ],
)
def test_a_run_whose_rows_another_one_made_half_ends_with_the_same_bits(
    moment: str, text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file), "--output_dir"]
    alone = tmp_path / "alone"
    command = [*PYTHON, GPT, *flags]
    run_forked([*command, str(alone)], {"LLMTRAIN_CACHE": str(tmp_path / "other")}).assert_ok()

    cache = tmp_path / "cache"
    env = {"LLMTRAIN_CACHE": str(cache)}
    if moment == NO_ENTRY:
        run_forked([*command, str(tmp_path / "none"), "--dry_run"], env).assert_ok()
        [rows] = cache.glob("*/train-0-00000.safetensors")
        rows.unlink()
    calls = tmp_path / "calls"
    calls.touch()
    script = tmp_path / "maker.py"
    script.write_text(KILLED_MAKER.format(moment=moment, calls=str(calls)))
    maker = start_process([*PYTHON, str(script), GPT, *flags, str(tmp_path / "a")], env)
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
