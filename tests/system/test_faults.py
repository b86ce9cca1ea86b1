"""What a run does when its processes, its disk or its numbers fail. docs/explanation/reliability.md is the table of these."""

import contextlib
import os
import re
import signal
import statistics
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
    Ended,
    accelerate,
    long_form,
    metrics,
    ranks_of,
    read_json,
    run,
    series,
    start_process,
    stop_group,
    torchrun,
    wait,
    wait_for_log_entries,
)
from tests.system.digits import sharded

TIMES = int(os.environ.get("LLMTRAIN_FAULT_TIMES", "1"))
STOPPED_SECONDS = int(os.environ.get("LLMTRAIN_STOPPED_SECONDS", "12"))
ENDLESS = [*TINY, "--max_steps", "1000000", "--save_steps", "1000000"]


def errors(ended: Ended) -> list[str]:
    return [line for line in ended.err.splitlines() if "error: " in line and "torch" not in line]


def disturb(folder: Path, text_file: Path, number: int, *flags: str) -> tuple[Ended, float]:
    """Send a signal to rank 1 of a two-rank run; how it ended, and seconds until `status.json` said why."""
    command = [
        *torchrun(2),
        GPT,
        *ENDLESS,
        "--dataset",
        str(text_file),
        "--output_dir",
        str(folder),
        *flags,
    ]
    process = start_process(command)
    try:
        wait_for_log_entries(process, folder, 3)
        victim = ranks_of(process.pid)[1].pid
        os.kill(victim, number)
        seconds = seconds_until_it_failed(folder)
        with contextlib.suppress(ProcessLookupError):
            os.kill(
                victim, signal.SIGCONT
            )  # or the launcher waits half a minute before it kills it
    finally:
        ended = wait(process)
    return ended, seconds


def seconds_until_it_failed(folder: Path) -> float:
    began = time.monotonic()
    while read_json(folder / "status.json")["state"] == "running":
        time.sleep(0.01)
        assert time.monotonic() - began < 100
    return time.monotonic() - began


def spread(seconds: list[float]) -> str:
    return (
        f"median {statistics.median(seconds):.2f} s, at most {max(seconds):.2f} s of {len(seconds)}"
    )


STOPPED = """
import os, signal, sys; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.training import loop
honest = loop.read_batches
def stopping(*arguments):
    for number, batch in enumerate(honest(*arguments)):
        if number == 7 and os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGSTOP)
        yield batch
loop.read_batches = stopping
if __name__ == "__main__": launch(gpt.main)
"""


@pytest.mark.timeout(120 + 60 * TIMES)
def test_a_process_that_hangs_is_named_with_its_phase_after_a_finite_time(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    """Its last beat says where it was; it may have gone on for up to two seconds since."""
    (tmp_path / "stopped.py").write_text(STOPPED)
    seconds = []
    for i in range(TIMES):
        folder = tmp_path / str(i)
        flags = [
            *ENDLESS,
            "--eval_fraction",
            "0",
            "--ddp_timeout",
            "6",
            "--dataset",
            str(text_file),
        ]
        command = [
            *torchrun(2),
            str(tmp_path / "stopped.py"),
            *flags,
            "--output_dir",
            str(folder),
        ]
        process = start_process(command)
        try:
            wait_for_log_entries(process, folder, 3)
            victim = ranks_of(process.pid)[1].pid
            took = seconds_until_it_failed(folder)
            for worker in ranks_of(
                process.pid
            ):  # or the launcher waits half a minute before it kills it
                with contextlib.suppress(psutil.NoSuchProcess):
                    worker.resume()
        finally:
            ended = wait(process)
        status = read_json(folder / "status.json")
        assert ended.status != 0
        found = re.fullmatch(
            r"waited \d+ s in the token count after step (\d+): rank 1 is silent, last seen in [a-z ]+ after step "
            r"(\d+) \(process (\d+) is stopped\); the others wait in the token count after step \1 "
            r"\(collective \d+\)\. Stacks are in .*",
            status["reason"],
        )
        assert found is not None, status["reason"]
        assert 0 <= int(found[2]) <= int(found[1])
        assert int(found[3]) == victim
        assert "llmtrain/training/loop.py" in (folder / "stacks-rank0.txt").read_text()
        seconds.append(took)
    score(f"faults: SIGSTOP of a peer until it is named, --ddp_timeout 6: {spread(seconds)}")


STOPPED_FOR_A_WHILE = """
import os, signal, subprocess, sys; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.observe import heartbeat
from llmtrain.training import loop
heartbeat._SILENCE_SECONDS = min(10, int(os.environ["SECONDS"]) / 10)
honest = loop.read_batches
def stopping(*arguments):
    for number, batch in enumerate(honest(*arguments)):
        if number == 3 and os.environ["RANK"] == os.environ["STOPPED_RANK"]:
            subprocess.Popen(["sh", "-c", f"sleep $SECONDS; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        yield batch
loop.read_batches = stopping
if __name__ == "__main__": launch(gpt.main)
"""


@long_form
@pytest.mark.timeout(240 + 4 * STOPPED_SECONDS)
def test_a_process_that_is_stopped_for_a_while_changes_no_bit(
    text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED_FOR_A_WHILE)
    digests = {}
    for stopped_rank in ("none", "0"):
        folder = tmp_path / stopped_rank
        flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]
        run_forked(
            [*torchrun(2), str(tmp_path / "stopped.py"), *flags],
            env={"STOPPED_RANK": stopped_rank, "SECONDS": str(STOPPED_SECONDS)},
        ).assert_ok()
        digests[stopped_rank] = tensors_digest(checkpoints(folder / "checkpoints")[-1])

    assert digests["0"] == digests["none"]


HANGING = """
import os, sys, time; sys.path.insert(0, "recipes")
import gpt
from llmtrain import launch
from llmtrain.data.loader import Collate
honest, calls = Collate.__call__, []
def hanging(self, read):
    calls.append(1)
    if len(calls) == 8 and os.environ["RANK"] == "1": time.sleep(600)
    return honest(self, read)
Collate.__call__ = hanging
if __name__ == "__main__": launch(gpt.main)
"""


HANGING_CALLBACK = """
import functools, os, sys, time; sys.path.insert(0, 'recipes')
import gpt
import llmtrain as lt
class Hangs(lt.Callback):
    fingerprint = None
    def setup(self, training):
        self.training = training
    def on_step_begin(self, batch):
        if self.training.step == 5 and os.environ['RANK'] == '1':
            time.sleep(600)
lt.open_run = functools.partial(lt.open_run, callbacks=[Hangs()])
if __name__ == '__main__': lt.launch(gpt.main)
"""


@long_form
def test_a_callback_that_hangs_is_named_with_one_step(text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING_CALLBACK)
    folder = tmp_path / "run"
    flags = [*ENDLESS, "--eval_fraction", "0", "--ddp_timeout", "6", "--dataset", str(text_file)]
    ended = run([*torchrun(2), str(tmp_path / "hanging.py"), *flags, "--output_dir", str(folder)])

    assert ended.status != 0
    status = read_json(folder / "status.json")
    assert status["step"] == 5
    assert re.match(
        r"waited \d+ s in (the token count after step 5: rank 1 is in )?"
        r"Hangs.on_step_begin after step 5",
        status["reason"],
    )
    steps = re.findall(r"after step (\d+)", status["reason"])
    assert {*steps} == {"5"}


@long_form
def test_a_process_that_never_comes_is_named_with_the_stacks_of_all(
    text_file: Path, tmp_path: Path
) -> None:
    """It beats, and its main thread hangs: half of --ddp_timeout later the others say so, then the run ends."""
    (tmp_path / "hanging.py").write_text(HANGING)
    folder = tmp_path / "run"
    flags = [*ENDLESS, "--eval_fraction", "0", "--ddp_timeout", "6", "--dataset", str(text_file)]
    ended = run([*torchrun(2), str(tmp_path / "hanging.py"), *flags, "--output_dir", str(folder)])
    assert ended.status != 0
    where = (
        r"rank 1 is in data loading after step \d+, for \d+ s; the others wait in the token count"
    )
    assert re.search(
        rf"note: waiting for \d+ s in the token count after step \d+: {where}", ended.err
    )
    assert re.search(
        rf"waited \d+ s in [a-z ]+ after step \d+: {where}",
        read_json(folder / "status.json")["reason"],
    )
    assert "hanging.py" in (folder / "stacks-rank1.txt").read_text()
    assert "llmtrain/training/loop.py" in (folder / "stacks-rank0.txt").read_text()


@pytest.mark.timeout(120 + 60 * TIMES)
def test_a_process_that_is_killed_is_named_by_the_others(
    text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    seconds = []
    for i in range(TIMES):
        ended, took = disturb(tmp_path / str(i), text_file, signal.SIGKILL, "--ddp_timeout", "6")
        assert ended.status != 0
        reason = read_json(tmp_path / str(i) / "status.json")["reason"]
        assert "lost contact with another process: rank 1 is silent" in reason
        assert 'Traceback (most recent call last):\n  File "recipes' not in ended.err
        seconds.append(took)
    score(f"faults: SIGKILL of a peer until it is named: {spread(seconds)}")


@pytest.mark.timeout(120 + 30 * TIMES)
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=long_form), signal.SIGUSR1])
def test_a_signal_to_a_rank_makes_a_durable_checkpoint(
    number: int, text_file: Path, tmp_path: Path, score: Callable[[str], None]
) -> None:
    seconds = []
    for i in range(TIMES):
        folder = tmp_path / str(i)
        process = start_process(
            [*torchrun(2), GPT, *ENDLESS, "--dataset", str(text_file), "--output_dir", str(folder)]
        )
        try:
            wait_for_log_entries(process, folder, 3)
            os.kill(ranks_of(process.pid)[i % 2].pid, number)
            began = time.monotonic()
            while not checkpoints(folder / "checkpoints"):
                time.sleep(0.001)
                assert time.monotonic() - began < 60
            seconds.append(time.monotonic() - began)
        finally:
            ended = wait(process)
        ended.assert_ok()
        status = read_json(folder / "status.json")
        assert (status["state"], status["step"]) == ("preempted", checkpoint_step(folder))
        assert metrics(folder)[-1]["step"] == status["step"]
    score(f"faults: {signal.Signals(number).name} to a durable checkpoint: {spread(seconds)}")


def checkpoint_step(folder: Path) -> int:
    (path,) = checkpoints(folder / "checkpoints")
    assert find_fault(path) is None
    return int(path.name.removeprefix("step-"))


def test_a_second_signal_leaves_at_once(text_file: Path, tmp_path: Path) -> None:
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time; sys.path.insert(0, 'recipes')\nimport gpt\nfrom llmtrain import launch\n"
        "from llmtrain.parallel.engine import Engine\nhonest, begun = Engine.forward_backward, []\n"
        "def slow(self, batches, totals, extra):\n"
        "    begun.append(1)\n"
        "    if len(begun) > 1: time.sleep(60)\n"
        "    return honest(self, batches, totals, extra)\n"
        "Engine.forward_backward = slow\nif __name__ == '__main__': launch(gpt.main)\n"
    )
    folder = tmp_path / "run"
    process = start_process(
        [*PYTHON, str(slow), *ENDLESS, "--dataset", str(text_file), "--output_dir", str(folder)]
    )
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
    assert read_json(folder / "status.json")["state"] == "failed"


def test_the_end_of_the_batch_job_ends_the_run_with_a_checkpoint_before(
    text_file: Path, tmp_path: Path
) -> None:
    flags = [*ENDLESS, "--dataset", str(text_file), "--output_dir"]
    soon = {"SLURM_JOB_END_TIME": str(int(time.time()) + 9)}
    run([*PYTHON, GPT, *flags, str(tmp_path / "b")], env=soon).assert_ok()
    assert "the Slurm job is about to end" in read_json(tmp_path / "b" / "status.json")["reason"]
    assert checkpoint_step(tmp_path / "b") > 0


@long_form
def test_a_killed_rank_is_restarted_by_the_launcher_and_the_run_records_it(
    text_file: Path, tmp_path: Path
) -> None:
    """Rank 1 comes back late: the first rank must not look for the one that died."""
    late = tmp_path / "late.py"
    late.write_text(
        "import os, sys, time; sys.path.insert(0, 'recipes')\nimport gpt\nfrom llmtrain import launch\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '1' and os.environ['RANK'] == '1': time.sleep(3)\n"
        "if __name__ == '__main__': launch(gpt.main)\n"
    )
    folder = tmp_path / "run"
    command = [
        *accelerate("cpu_ddp", "--max_restarts", "1"),
        str(late),
        *TINY,
        "--max_steps",
        "40",
        "--save_steps",
        "5",
    ]
    process = start_process([*command, "--dataset", str(text_file), "--output_dir", str(folder)])
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


POISONED = """
import functools, os, sys; sys.path.insert(0, 'recipes')
import gpt
import llmtrain as lt
from llmtrain import launch
import torch
from llmtrain.interfaces.objective import StepTotals
from llmtrain.parallel.engine import Engine
honest, calls = Engine.forward_backward, []
def poisoned(self, batches, totals, extra):
    calls.append(1)
    if len(calls) in (3, 5) and os.environ['RANK'] == '1':
        totals = StepTotals(float('nan') * torch.ones(3))
    return honest(self, batches, totals, extra)
Engine.forward_backward = poisoned
class Reads(lt.Callback):
    fingerprint = None
    def on_step_end(self, batch, result, info):
        if os.environ['RANK'] == '0': print(result.grad_norm)
lt.open_run = functools.partial(lt.open_run, callbacks=[Reads()])
if __name__ == '__main__': launch(gpt.main)
"""


@pytest.mark.parametrize("launcher", [torchrun(2), sharded("fsdp2")], ids=["ddp", "fsdp2"])
def test_a_gradient_that_is_not_finite_stops_all_ranks_before_the_update(
    launcher: list[str], text_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "poisoned.py").write_text(POISONED)
    command = [
        *launcher,
        str(tmp_path / "poisoned.py"),
        *TINY,
        "--save_steps",
        "2",
        "--dataset",
        str(text_file),
    ]
    ended = run_forked([*command, "--output_dir", str(tmp_path / "a"), "--log_rows"])
    assert ended.status != 0
    reason = read_json(tmp_path / "a" / "status.json")["reason"]
    assert "step 3 was skipped: its gradient norm is nan; its rows are [" in reason
    assert checkpoint_step(tmp_path / "a") == 2
    ended = run_forked(
        [*command, "--output_dir", str(tmp_path / "b"), "--skip_nonfinite", "2"]
    ).assert_ok()
    assert ended.out.count("was skipped: its gradient norm is ") == 2
    assert read_json(checkpoints(tmp_path / "b" / "checkpoints")[-1] / "state.json")["skipped"] == 2


FAILS_ON_ONE_RANK = """
import functools, os, sys; sys.path.insert(0, 'recipes')
import gpt
import llmtrain as lt
class Fails(lt.Callback):
    fingerprint = None
    def setup(self, training):
        self.training = training
    def on_step_begin(self, batch):
        if self.training.step == 5 and os.environ['RANK'] == '1':
            raise ValueError('a bug in a callback')
lt.open_run = functools.partial(lt.open_run, callbacks=[Fails()])
if __name__ == '__main__': lt.launch(gpt.main)
"""


def test_a_failure_on_one_rank_leaves_the_log_entry_of_the_step_before(
    text_file: Path, tmp_path: Path
) -> None:
    """The numbers of that step are read in the step that fails."""
    script = tmp_path / "fails_on_one_rank.py"
    script.write_text(FAILS_ON_ONE_RANK)
    folder = tmp_path / "run"
    flags = [*TINY, "--dataset", str(text_file), "--output_dir", str(folder)]
    ended = run_forked([*torchrun(2), str(script), *flags])

    assert ended.status != 0
    assert max(series(folder, "train/loss")) == 5


FULL = """
import os, sys, torch; sys.path.insert(0, 'recipes')
import gpt
from llmtrain import GPT, launch
honest = GPT.forward
def full(self, *args, **batch):
    if self.training and os.environ.get('RANK', '1') == '1':
        raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB')
    return honest(self, *args, **batch)
GPT.forward = full
if __name__ == '__main__': launch(gpt.main)
"""


@pytest.mark.parametrize(
    ("launcher", "who"), [(PYTHON, ""), pytest.param(torchrun(2), "rank 1: ", marks=long_form)]
)
def test_too_little_memory_is_one_line_with_what_to_try(
    launcher: list[str], who: str, text_file: Path, tmp_path: Path
) -> None:
    """Of one process, or of one among others: these have it in their record and do not say it again."""
    (tmp_path / "full.py").write_text(FULL)
    flags = [
        *TINY,
        "--eval_fraction",
        "0.1",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "run"),
    ]
    ended = run([*launcher, str(tmp_path / "full.py"), *flags])
    assert ended.status == (1 if who else 2)
    line = f"{who}out of memory with 2 rows at a time: --per_device_train_batch_size 1 computes the same"
    assert f"error: {line}" in ended.err
    assert ended.err.count("error: ") == 1
    assert 'full.py", line' not in ended.err  # a launcher adds a traceback of its own
    assert read_json(tmp_path / "run" / "status.json")["reason"].startswith(line)


def test_a_full_disk_stops_with_one_line_and_loses_nothing(text_file: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE: a write past it fails in the middle, as on a full disk."""
    folder = tmp_path / "run"
    command = [
        *PYTHON,
        GPT,
        *TINY,
        "--max_steps",
        "40",
        "--save_steps",
        "10",
        "--dataset",
        str(text_file),
    ]
    command += ["--output_dir", str(folder)]
    process = start_process([*command, "--max_steps", "1000000"])
    try:
        wait_for_log_entries(process, folder, 15)
    finally:
        stop_group(process)
        wait(process)
    saved = folder / "checkpoints"
    kept = {
        p.relative_to(saved): p.stat().st_mtime_ns
        for p in saved.rglob("*")
        if p.is_file() and ".tmp" not in str(p)
    }
    assert kept
    limited = [
        "bash",
        "-c",
        'ulimit -f 100; exec "$@"',
        "limited",
        *command,
        "--max_steps",
        "1000000",
    ]
    ended = run(limited)
    assert ended.status == 2
    reason = r"\(\[Errno 27\] File too large: '.*'\)"
    assert re.search(f"could not be written {reason}; older checkpoints are untouched.", ended.err)
    for name, when in kept.items():
        assert (folder / "checkpoints" / name).stat().st_mtime_ns == when
    assert not list((folder / "checkpoints").glob(".tmp-*"))
