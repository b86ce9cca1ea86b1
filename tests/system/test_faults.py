"""What a run does when its processes, its disk or its numbers fail. docs/explanation/reliability.md is the table of these."""

import os
import re
import shlex
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.record.checkpoint import checkpoints, find_fault
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    Ended,
    accelerate,
    interrupt,
    long_form,
    metrics,
    ranks_of,
    read_json,
    run,
    series,
    start_process,
    torchrun,
    wait,
    wait_for_log_entries,
)
from tests.record.checkpoint_files import tensors_digest
from tests.system.digits import sharded

FAULTY = "tests/system/faulty_gpt.py"
TIMES = int(os.environ.get("LLMTRAIN_FAULT_TIMES", "1"))
STOPPED_SECONDS = int(os.environ.get("LLMTRAIN_STOPPED_SECONDS", "12"))
ENDLESS = "--max_steps 1000000 --save_steps 1000000"
# The others wait for a rank for six seconds.
WAITING = f"{ENDLESS} --eval_fraction 0 --ddp_timeout 6"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run."""
    return tmp_path / "run"


@pytest.fixture
def tiny(text_file: Path, folder: Path) -> list[str]:
    """Flags of a small run in that folder. Later flags replace earlier ones."""
    return [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]


def status_of(folder: Path) -> dict:
    return read_json(folder / "status.json")


def reason_of(folder: Path) -> str:
    return status_of(folder)["reason"]


def checkpoint_step(folder: Path) -> int:
    """Return the step of the only checkpoint, which must be intact."""
    [path] = checkpoints(folder / "checkpoints")
    assert find_fault(path) is None
    return int(path.name.removeprefix("step-"))


def has_ended(folder: Path) -> bool:
    return status_of(folder)["state"] != "running"


def has_checkpoint(folder: Path) -> bool:
    return checkpoints(folder / "checkpoints") != []


def seconds_until(condition: Callable[[Path], bool], folder: Path) -> float:
    start = time.monotonic()
    while not condition(folder):
        time.sleep(0.01)
        assert time.monotonic() - start < 100
    return time.monotonic() - start


def spread(seconds: list[float]) -> str:
    return (
        f"median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s of {len(seconds)}"
    )


# --- a rank that is silent


def lose_rank_1(command: list[str], folder: Path, fault: str) -> tuple[Ended, int, float]:
    """Make a run of two ranks, of which rank 1 is killed or stops itself.

    Returns:
        How the run ended, the process of rank 1, and the seconds until status.json had a reason.
    """
    process = start_process(command, {"FAULT": fault})
    try:
        wait_for_log_entries(process, folder, 3)
        ranks = ranks_of(process.pid)
        if fault == "killed":
            ranks[1].kill()
        seconds = seconds_until(has_ended, folder)
        if fault == "stops":  # or the launcher waits half a minute before it kills it
            ranks[1].resume()
    finally:
        ended = wait(process)
    return ended, ranks[1].pid, seconds


# Its last beat says where it was. It may have gone on for up to two seconds since.
SILENT = re.compile(
    r"waited \d+ s in the token count after step (?P<waiting>\d+): rank 1 is silent, "
    r"last seen in [\w. ]+ after step (?P<seen>\d+) \(process (?P<process>\d+) is stopped\); "
    r"the others wait in the token count after step (?P=waiting)\. "
    r"Stacks are in .*"
)


@pytest.mark.timeout(120 + 60 * TIMES)
@pytest.mark.parametrize("fault", ["stops", pytest.param("killed", marks=long_form)])
def test_a_rank_that_is_silent_is_named_by_the_others(
    fault: str, tiny: list[str], tmp_path: Path, score: Callable[[str], None]
) -> None:
    times = []
    for i in range(TIMES):
        folder = tmp_path / str(i)
        command = [*torchrun(2), FAULTY, *tiny, *WAITING.split(), "--output_dir", str(folder)]
        ended, process, seconds = lose_rank_1(command, folder, fault)
        times.append(seconds)

        assert ended.status != 0
        assert 'Traceback (most recent call last):\n  File "tests' not in ended.err
        if fault == "killed":
            assert "lost contact with another process: rank 1 is silent" in reason_of(folder)
        else:
            match = SILENT.fullmatch(reason_of(folder))
            assert match, reason_of(folder)
            assert 0 <= int(match["seen"]) <= int(match["waiting"])
            assert int(match["process"]) == process
            assert "llmtrain/training/loop.py" in (folder / "stacks-rank0.txt").read_text()
    score(f"faults: a peer {fault} until it is named, --ddp_timeout 6: {spread(times)}")


@long_form
@pytest.mark.timeout(240 + 4 * STOPPED_SECONDS)
def test_a_process_that_is_stopped_for_a_while_changes_no_bit(
    tiny: list[str], tmp_path: Path
) -> None:
    digests = set()
    for fault in ("none", "stops for a while"):
        folder = tmp_path / fault.replace(" ", "-")
        command = [*torchrun(2), FAULTY, *tiny, "--output_dir", str(folder)]
        run_forked(command, {"FAULT": fault, "SECONDS": str(STOPPED_SECONDS)}).assert_ok()
        digests.add(tensors_digest(checkpoints(folder / "checkpoints")[-1]))
    assert len(digests) == 1


@long_form
@pytest.mark.parametrize(
    ("fault", "phase"),
    [
        ("hangs in a callback", r"Fault.on_step_begin after step 5"),
        ("hangs in data loading", r"data loading after step \d+"),
    ],
)
def test_a_process_that_never_comes_is_named_with_the_stacks_of_all(
    fault: str, phase: str, tiny: list[str], folder: Path
) -> None:
    """It beats, and its main thread hangs: half of --ddp_timeout later the others say so, then the run ends."""
    ended = run([*torchrun(2), FAULTY, *tiny, *WAITING.split()], {"FAULT": fault})

    assert ended.status != 0
    place = rf"rank 1 is in {phase}, for \d+ s; the others wait in the token count"
    note = rf"note: waiting for \d+ s in the token count after step \d+: {place}"
    assert re.search(note, ended.err), ended.err
    reason = rf"waited \d+ s in the token count after step \d+: {place}"
    assert re.match(reason, reason_of(folder)), reason_of(folder)
    if "callback" in fault:
        assert status_of(folder)["step"] == 5
        assert {*re.findall(r"after step (\d+)", reason_of(folder))} == {"5"}
    assert "faulty_gpt.py" in (folder / "stacks-rank1.txt").read_text()
    assert "llmtrain/training/loop.py" in (folder / "stacks-rank0.txt").read_text()


@long_form
def test_a_killed_rank_is_restarted_by_the_launcher_and_the_run_records_it(
    tiny: list[str], folder: Path
) -> None:
    """Rank 1 comes back late: the first rank must not look for the one that died."""
    launcher = accelerate("cpu_ddp", "--max_restarts", "1")
    command = [*launcher, FAULTY, *tiny, "--max_steps", "40", "--save_steps", "5"]
    process = start_process(command, {"FAULT": "comes back late"})
    try:
        wait_for_log_entries(process, folder, 12)
        ranks_of(process.pid)[1].kill()
    finally:
        ended = wait(process)

    ended.assert_ok()
    first, second = read_json(folder / "run.json")["starts"]
    assert first["step"] == 0 < second["step"]
    assert (first["restart"], second["restart"]) == (0, 1)
    assert sorted(series(folder, "train/loss")) == list(range(1, 41))


# --- signals and the end of a job


@pytest.mark.timeout(120 + 30 * TIMES)
@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        pytest.param(torchrun(2), signal.SIGUSR1, id="torchrun"),
        pytest.param(accelerate("cpu_ddp"), signal.SIGTERM, id="accelerate", marks=long_form),
    ],
)
def test_a_signal_to_a_rank_makes_a_durable_checkpoint_and_the_launcher_reports_success(
    launcher: list[str], number: int, tiny: list[str], tmp_path: Path, score: Callable[[str], None]
) -> None:
    times = []
    for i in range(TIMES):
        folder = tmp_path / str(i)
        command = [*launcher, GPT, *tiny, *ENDLESS.split(), "--output_dir", str(folder)]
        process = start_process(command)
        try:
            wait_for_log_entries(process, folder, 3)
            ranks_of(process.pid)[i % 2].send_signal(number)
            times.append(seconds_until(has_checkpoint, folder))
        finally:
            ended = wait(process)

        out = ended.assert_ok().out
        # A launcher reports SIGTERM with a traceback, and SIGUSR1 not at all.
        assert ("a traceback of the launcher may follow" in out) == (number == signal.SIGTERM)
        status = status_of(folder)
        assert (status["state"], status["step"]) == ("preempted", checkpoint_step(folder))
        assert metrics(folder)[-1]["step"] == status["step"]
    score(f"faults: {signal.Signals(number).name} to a durable checkpoint: {spread(times)}")


def test_a_second_signal_leaves_at_once(tiny: list[str], folder: Path) -> None:
    command = [*PYTHON, FAULTY, *tiny, *ENDLESS.split()]
    process = start_process(command, {"FAULT": "slow steps"})
    try:
        wait_for_log_entries(process, folder, 3)
        process.send_signal(signal.SIGTERM)
        time.sleep(3.5)  # repeats within 3 s are the launcher's
        assert process.poll() is None, "the first one waits for the step"
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20)
    finally:
        ended = wait(process)
    assert ended.status == 130
    assert status_of(folder)["state"] == "failed"


def test_the_end_of_the_batch_job_ends_the_run_with_a_checkpoint_before(
    tiny: list[str], folder: Path
) -> None:
    soon = {"SLURM_JOB_END_TIME": str(int(time.time()) + 6)}
    run_forked([*PYTHON, GPT, *tiny, *ENDLESS.split()], soon).assert_ok()
    assert "the Slurm job is about to end" in reason_of(folder)
    assert checkpoint_step(folder) > 0


# --- numbers, memory and disk


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(torchrun(2), id="ddp"),
        pytest.param(sharded("fsdp2"), id="fsdp2", marks=long_form),
    ],
)
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_update(
    launcher: list[str], tiny: list[str], folder: Path, tmp_path: Path
) -> None:
    command = [*launcher, FAULTY, *tiny, "--save_steps", "2"]
    fault = {"FAULT": "NaN on one rank"}
    ended = run_forked([*command, "--log_rows"], fault)
    assert ended.status != 0
    assert "step 3 was skipped: its gradient norm is nan; its rows are [" in reason_of(folder)
    assert checkpoint_step(folder) == 2

    flags = f"--output_dir {tmp_path}/skips --skip_nonfinite 2"
    ended = run_forked([*command, *shlex.split(flags)], fault).assert_ok()
    assert ended.out.count("was skipped: its gradient norm is ") == 2
    last_checkpoint = checkpoints(tmp_path / "skips" / "checkpoints")[-1]
    assert read_json(last_checkpoint / "state.json")["skipped"] == 2


@pytest.mark.parametrize(("launcher", "rank"), [(PYTHON, ""), (torchrun(2), "rank 1: ")])
def test_too_little_memory_is_one_line_with_what_to_try(
    launcher: list[str], rank: str, tiny: list[str], folder: Path
) -> None:
    """Other ranks have the line in their record, and do not print it again."""
    command = [*launcher, FAULTY, *tiny, "--eval_fraction", "0.1"]
    ended = run_forked(command, {"FAULT": "out of memory"})

    assert ended.status == 2
    line = f"{rank}out of memory with 2 rows at a time: --per_device_train_batch_size 1 computes the same"
    assert f"error: {line}" in ended.err
    assert ended.err.count("error: ") == 1
    assert "Traceback" not in ended.err
    assert reason_of(folder).startswith(line)


def test_a_full_disk_stops_with_one_line_and_loses_nothing(tiny: list[str], folder: Path) -> None:
    """RLIMIT_FSIZE: a write past it fails in the middle, as on a full disk."""
    command = [*PYTHON, GPT, *tiny, *ENDLESS.split(), "--save_steps", "10"]
    interrupt(command, folder, signal.SIGKILL, 15)
    saved_files = [path for path in folder.glob("checkpoints/step-*/**/*") if path.is_file()]
    times = {path: path.stat().st_mtime_ns for path in saved_files}
    assert times

    ended = run(["bash", "-c", 'ulimit -f 100; exec "$@"', "limited", *command])

    assert ended.status == 2
    reason = r"\(.*: File too large; .*\)"
    assert re.search(f"could not be written {reason}; older checkpoints are untouched.", ended.err)
    assert {path: path.stat().st_mtime_ns for path in saved_files} == times
    assert not list((folder / "checkpoints").glob(".tmp-*"))
