"""SIGKILL at random instants over whole runs, again and again: the end is the same, to the bit."""

import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault, tensors_digest
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    accelerate,
    begin,
    bound,
    long_form,
    metrics,
    read_json,
    series,
    stop_group,
    torchrun,
)
from tests.system.test_faults import ranks_of

KILLS = int(os.environ.get("LLMTRAIN_KILLS", "1"))
STEPS = 150 if KILLS > 1 else 60  # one kill needs fewer steps to fall into
INTERVAL = 3
FLAGS = [
    *TINY,
    "--max_steps",
    str(STEPS),
    "--save_steps",
    str(INTERVAL),
    "--log_rows",
    "--n_embd",
    "128",
]
FLAGS += ["--ddp_timeout", "8"]
DDP, FSDP2 = accelerate("cpu_ddp"), accelerate("fsdp2", "--mixed_precision", "no")
# Where the order of sums is fixed, any layout has the bits of one process; else each has its own.
LAYOUTS = {
    "bitwise": (
        ["--bitwise"],
        [[*PYTHON]],
        [accelerate("cpu_ddp")] * 3 + [torchrun(4), accelerate("cpu_ddp"), [*PYTHON]],
    ),
    "sharded": ([], [FSDP2], [FSDP2]),
}


def end_of(folder: Path) -> tuple[str, str, dict[int, float]]:
    """The hash of weights and optimizer, the ledger of rows and the eval losses of a finished run."""
    digest = tensors_digest(folder / "checkpoints" / f"step-{STEPS:08d}")
    return digest, (folder / "rows.jsonl").read_text(), series(folder, "eval/loss")


def readings(folder: Path) -> int:
    return len(metrics(folder)) if (folder / "metrics.jsonl").exists() else 0


def wait_for_some_instant(process: subprocess.Popen, folder: Path, draw: random.Random) -> None:
    """Until it has made some steps, or while it starts: until some of its ranks exist."""
    if draw.random() < 0.8:
        before = readings(folder) + draw.randrange(1, 12)
        while process.poll() is None and readings(folder) < before:
            time.sleep(0.01)
        return
    ranks = draw.randrange(3)
    while process.poll() is None and len(ranks_of(process.pid)) < ranks:
        time.sleep(0.01)


def wait_for_a_save(process: subprocess.Popen, folder: Path, draw: random.Random) -> None:
    """Until a checkpoint is being written; some readings after the start."""
    before = readings(folder) + draw.randrange(1, 6)
    while process.poll() is None and (
        readings(folder) < before or not [*folder.glob("checkpoints/.tmp-step-*")]
    ):
        time.sleep(0.001)
    time.sleep(draw.uniform(0, 0.03))


def kill(process: subprocess.Popen, draw: random.Random) -> str:
    """SIGKILL a rank, the launcher or all; wait until nothing of the run is left. Says what was killed."""
    everyone = psutil.Process(process.pid).children(recursive=True)
    ranks = ranks_of(process.pid)
    victim = draw.choice(["all", "the launcher", *[f"rank {i}" for i in range(len(ranks))]])
    if victim == "all":
        stop_group(process)
    elif victim == "the launcher" or not ranks:
        process.kill()
    else:
        ranks[int(victim.split()[1])].kill()
    try:
        process.wait(timeout=90)
        _, alive = psutil.wait_procs(everyone, timeout=60)
        assert not alive, f"{alive} outlived the kill of {victim}"
    finally:
        stop_group(process)
        process.communicate()
    return victim


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("how", ["bitwise", pytest.param("sharded", marks=long_form)])
def test_runs_that_are_killed_end_in_the_same_bits_and_rows(
    how: str, text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    more, [straight], launchers = LAYOUTS[how]
    flags = [GPT, *FLAGS, *more, "--dataset", str(text_file), "--output_dir"]
    run_forked([*straight, *flags, str(tmp_path / "straight")]).assert_ok()
    expected = end_of(tmp_path / "straight")
    draw, kills, starts, inside, redone, finished = random.Random(KILLS), [], 0, 0, [], 0
    folder = tmp_path / "run-0"
    while len(kills) < KILLS or not (folder / "status.json").exists() or not is_finished(folder):
        process = begin([*launchers[starts % len(launchers)], *flags, str(folder)])
        starts += 1
        try:
            if len(kills) < KILLS:
                (wait_for_a_save if how == "sharded" else wait_for_some_instant)(
                    process, folder, draw
                )
            else:
                process.communicate(timeout=200)
            if process.poll() is None:
                inside += bool(list(folder.glob("checkpoints/.tmp-step-*")))
                kills.append(kill(process, draw))
        finally:
            stop_group(process)
            process.communicate()
        whole = {path: find_fault(path) for path in checkpoints(folder / "checkpoints")}
        assert not any(whole.values()), whole
        reached = metrics(folder)[-1]["step"] if readings(folder) else 0
        newest = max((int(path.name.removeprefix("step-")) for path in whole), default=0)
        redone.append(reached - newest)
        assert redone[-1] <= INTERVAL, (reached, newest)
        if (folder / "status.json").exists():
            status = read_json(folder / "status.json")
            assert newest >= status["step"] or status["state"] == "failed", (
                "a step that was said to be saved"
            )
            if is_finished(folder):
                assert end_of(folder) == expected
                finished += 1
                if len(kills) < KILLS:
                    folder = tmp_path / f"run-{finished}"
    kinds = ", ".join(f"{kills.count(kind)} of {kind}" for kind in sorted(set(kills)))
    lost = f"{bound(0, len(kills))} kills ({kinds}) in {starts} starts; {inside} inside a write"
    score(f"kills, {how}: checkpoints lost: {lost}")
    score(f"kills, {how}: at most {max(redone)} updates redone, of an interval of {INTERVAL}")
    score(f"kills, {how}: runs that ended in another hash or other rows: {bound(0, finished)}")


def is_finished(folder: Path) -> bool:
    return read_json(folder / "status.json")["state"] == "finished"
