"""A run that was cut off goes on as if nothing had happened."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from llmtrain.record.checkpoint import tensors_digest
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    ROOT,
    TINY,
    Ended,
    accelerate,
    begin,
    long_form,
    metrics,
    read_json,
    run,
    series,
    stop_group,
    torchrun,
    wait,
    wait_for_readings,
)

LONG = [*TINY, "--max_steps", "60", "--save_steps", "10", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def uninterrupted(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    run_forked(
        [*PYTHON, GPT, *LONG, "--dataset", str(text_file), "--output_dir", str(folder)]
    ).assert_ok()
    return folder


def interrupt(command: list[str], folder: Path, number: int, readings: int = 25) -> Ended:
    """Start, wait for a few steps, and send a signal to every process of the run."""
    process = begin(command)
    try:
        wait_for_readings(process, folder, readings)
        if number == signal.SIGKILL:
            stop_group(process)
        else:
            process.send_signal(number)
    finally:
        ended = wait(process)
    return ended


def assert_same_end(folder: Path, reference: Path) -> None:
    for name in ("model", "checkpoints/step-00000060/model"):
        ours, theirs = (
            load_file(path / name / "model.safetensors") for path in (folder, reference)
        )
        assert all((ours[key] == theirs[key]).all() for key in theirs)
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "tokens"):
        assert series(folder, key) == series(reference, key)


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=long_form), signal.SIGTERM])
def test_one_process_ends_in_the_same_bits(
    number: int, text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [*PYTHON, GPT, *LONG, "--dataset", str(text_file), "--output_dir", str(folder)]
    ended = interrupt(command, folder, number)
    stopped_at = read_json(folder / "status.json")
    if number == signal.SIGTERM:
        assert ended.status == 128 + signal.SIGTERM
        assert "\r" not in ended.err, "a log file gets no frames of a progress bar"
        assert stopped_at["state"] == "preempted"
        assert f"step {stopped_at['step']} is saved" in ended.out
    else:
        assert stopped_at["state"] == "running"
    ended = run(command).assert_ok()
    assert "resumes from step" in ended.out
    assert [start["step"] for start in read_json(folder / "run.json")["starts"]] == [
        0,
        stopped_at["step"],
    ]
    assert_same_end(folder, uninterrupted)


@long_form
def test_another_number_of_processes_goes_on_with_the_same_rows(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [GPT, *LONG, "--dataset", str(text_file), "--output_dir", str(folder)]
    interrupt([*PYTHON, *flags], folder, signal.SIGKILL)
    run_forked([*accelerate("cpu_ddp"), *flags]).assert_ok()
    assert [start["processes"] for start in read_json(folder / "run.json")["starts"]] == [1, 2]
    assert series(folder, "tokens") == series(uninterrupted, "tokens")
    assert series(folder, "train/loss") == pytest.approx(
        series(uninterrupted, "train/loss"), rel=1e-4
    )


@long_form  # test_kills.py has a short one
@pytest.mark.parametrize("last", [2, 4])
def test_two_processes_then_one_then_more_end_in_the_same_bits_and_rows(
    last: int, text_file: Path, tmp_path: Path
) -> None:
    flags = [GPT, *LONG, "--bitwise", "--log_rows", "--dataset", str(text_file), "--output_dir"]
    straight, folder = tmp_path / "straight", tmp_path / "run"
    run_forked([*PYTHON, *flags, str(straight)]).assert_ok()
    interrupt([*torchrun(2), *flags, str(folder)], folder, signal.SIGTERM, 10)
    interrupt([*PYTHON, *flags, str(folder)], folder, signal.SIGKILL, 30)
    run_forked([*torchrun(last), *flags, str(folder)]).assert_ok()
    assert [start["processes"] for start in read_json(folder / "run.json")["starts"]] == [
        2,
        1,
        last,
    ]
    ledger, expected = (
        (path / "rows.jsonl").read_text().splitlines() for path in (folder, straight)
    )
    assert len(expected) == 60
    assert ledger == expected
    last = "checkpoints/step-00000060"
    assert tensors_digest(folder / last) == tensors_digest(straight / last)


def test_four_processes_end_in_the_same_bits_once_their_buckets_are_settled(tmp_path: Path) -> None:
    """On two, a + b = b + a hides the difference. The whole run is test_verify.py's, in its long form."""
    run_forked(
        [*torchrun(4), "tests/system/resumed_ranks.py", str(tmp_path / "same.json")]
    ).assert_ok()
    assert read_json(tmp_path / "same.json") == {"settled": True, "not settled": False}


@long_form
def test_workers_do_not_outlive_a_launcher_that_is_killed(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = [
        *LONG,
        "--max_steps",
        "100000",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(folder),
    ]
    process = begin([*accelerate("cpu_ddp"), GPT, *flags])
    try:
        wait_for_readings(process, folder, 3)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        for worker in alive:
            worker.kill()
        assert not alive
        assert read_json(folder / "status.json")["state"] == "preempted"
    finally:
        wait(process)


def test_a_worker_whose_launcher_died_before_it_was_loaded_ends(tmp_path: Path) -> None:
    """Else it would wait for the others until --ddp_timeout."""
    env = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    orphan = f"(echo $BASHPID > {tmp_path}/pid; sleep 1; exec {' '.join(PYTHON)} {GPT} --dataset README.md) &"
    subprocess.run(
        ["bash", "-c", orphan],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        check=True,
    )
    time.sleep(0.3)
    worker = psutil.Process(int((tmp_path / "pid").read_text()))
    if worker.is_running() and worker.ppid() != 1:
        worker.kill()
        pytest.skip("orphans are not given to process 1 here")
    _, alive = psutil.wait_procs([worker], timeout=60)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=long_form)])
def test_a_signal_to_every_process_at_once_and_again_still_saves(
    number: int, text_file: Path, tmp_path: Path
) -> None:
    """As systemd, a batch system or a terminal's Ctrl-C send it: to the launcher and to the workers."""
    folder = tmp_path / "run"
    flags = [*LONG, "--max_steps", "100000", "--save_steps", "100000", "--dataset", str(text_file)]
    process = begin([*accelerate("cpu"), GPT, *flags, "--output_dir", str(folder)])
    try:
        wait_for_readings(process, folder, 3)
        (worker,) = psutil.Process(process.pid).children(recursive=True)
        for _ in range(2):
            for target in (process.pid, worker.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(target, number)
        psutil.wait_procs([worker], timeout=30)
    finally:
        wait(process)
    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()


@pytest.mark.parametrize(
    "launcher", [accelerate("cpu"), torchrun(1)], ids=["accelerate", "torchrun"]
)
def test_a_launcher_reports_no_crash_of_a_run_that_a_signal_has_stopped(
    launcher: list[str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [*LONG, "--max_steps", "100000", "--save_steps", "100000", "--dataset", str(text_file)]
    process = begin([*launcher, GPT, *flags, "--output_dir", str(folder)])
    try:
        wait_for_readings(process, folder, 3)
        os.kill(read_json(folder / "status.json")["pid"], signal.SIGTERM)
    finally:
        ended = wait(process)
    ended.assert_ok()
    assert read_json(folder / "status.json")["state"] == "preempted"
    assert "a traceback of the launcher may follow" in ended.out


def test_a_finished_run_can_be_made_longer_and_says_what_happens_to_the_learning_rate(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    flags = [
        *LONG,
        "--max_steps",
        "80",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(tmp_path / "longer"),
    ]
    ended = run_forked(
        [*PYTHON, GPT, *flags, "--resume_from_checkpoint", str(uninterrupted)]
    ).assert_ok()
    assert (
        "changed   max_steps 60 -> 80; the learning rate goes from 0.000345 in step 60 to "
        in ended.out
    )
    assert [line["step"] for line in metrics(tmp_path / "longer") if "train/loss" in line] == list(
        range(1, 81)
    )
    assert "    60" in ended.out, "the curve at the end begins with the first run"
