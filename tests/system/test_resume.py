"""An interrupted run continues as if nothing had happened."""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from llmtrain.record.checkpoint import tensors_digest
from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    ROOT,
    TINY,
    accelerate,
    interrupt,
    long_form,
    read_json,
    run,
    series,
    start_process,
    torchrun,
    wait,
    wait_for_log_entries,
)

MAX_STEPS = 60
FLAGS = [*TINY, *shlex.split(f"--max_steps {MAX_STEPS} --save_steps 10 --dropout 0.1")]
# Such a run goes on until a signal ends it, and then saves its first checkpoint.
ENDLESS = [*FLAGS, *shlex.split("--max_steps 100000 --save_steps 100000")]
LAST_CHECKPOINT = f"checkpoints/step-{MAX_STEPS:08d}"


def flags_of(dataset: Path, folder: Path) -> list[str]:
    return ["--dataset", str(dataset), "--output_dir", str(folder)]


@pytest.fixture(scope="module")
def uninterrupted(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_forked([*PYTHON, GPT, *FLAGS, *flags_of(text_file, folder)]).assert_ok()
    return folder


def starts_of(folder: Path, key: str) -> list[int]:
    """Return a property of each start of a run."""
    return [start[key] for start in read_json(folder / "run.json")["starts"]]


def assert_same_bits(folder: Path, reference: Path) -> None:
    for model in ("model", f"{LAST_CHECKPOINT}/model"):
        weights = load_file(folder / model / "model.safetensors")
        expected = load_file(reference / model / "model.safetensors")
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "tokens"):
        assert series(folder, key) == series(reference, key)


# --- the same run


def test_a_terminated_run_saves_and_resumes_with_the_same_bits(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [*PYTHON, GPT, *FLAGS, *flags_of(text_file, folder)]

    ended = interrupt(command, folder, signal.SIGTERM)

    status = read_json(folder / "status.json")
    assert ended.status == 128 + signal.SIGTERM
    assert "\r" not in ended.err, "a log file gets no frames of a progress bar"
    assert status["state"] == "preempted"
    assert f"step {status['step']} is saved" in ended.out

    ended = run(command).assert_ok()

    assert "resumes from step" in ended.out
    assert starts_of(folder, "step") == [0, status["step"]]
    assert_same_bits(folder, uninterrupted)


@pytest.mark.parametrize(
    "bit", [0, pytest.param(22, marks=long_form), pytest.param(31, marks=long_form)]
)
def test_rows_that_a_disk_has_changed_end_in_the_same_bits(
    bit: int, text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    command = [*PYTHON, GPT, *FLAGS, "--dataset", str(text_file), "--output_dir"]
    env = {"LLMTRAIN_CACHE": str(tmp_path / "cache")}

    def dry_run() -> bytes:
        """Return the rows that a run would have."""
        run_forked([*command, str(tmp_path / "none"), "--dry_run"], env).assert_ok()
        [rows] = (tmp_path / "cache").glob("*/train-0.arrow")
        return rows.read_bytes()

    def damage() -> None:
        [rows] = (tmp_path / "cache").glob("*/train-0.arrow")
        content = bytearray(rows.read_bytes())
        # The last row has padding behind it, and the first ones a header before them.
        for place in range(len(content) // 4, len(content) // 2, 4 * 33):
            content[place // 4 * 4 + bit // 8] ^= 1 << bit % 8
        rows.write_bytes(content)

    tokenised = dry_run()
    damage()
    ended = run_forked([*command, str(tmp_path / "first")], env).assert_ok()
    assert ended.err.count("train-0.arrow differs from its hash") == 1
    assert_same_bits(tmp_path / "first", uninterrupted)

    # A run that was killed before its last checkpoint.
    killed = tmp_path / "killed"
    shutil.copytree(uninterrupted, killed)
    shutil.rmtree(killed / "model")
    shutil.rmtree(killed / LAST_CHECKPOINT)
    status = read_json(killed / "status.json") | {"state": "running", "step": 55}
    (killed / "status.json").write_text(json.dumps(status))
    damage()
    ended = run_forked([*command, str(killed)], env).assert_ok()
    assert "resumes from step 50" in ended.out
    assert ended.err.count("train-0.arrow differs from its hash") == 1
    assert_same_bits(killed, uninterrupted)

    damage()
    assert dry_run() == tokenised


@long_form
def test_a_killed_run_resumes_with_the_same_bits(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = [*PYTHON, GPT, *FLAGS, *flags_of(text_file, folder)]

    interrupt(command, folder, signal.SIGKILL)

    status = read_json(folder / "status.json")
    assert status["state"] == "running"

    ended = run(command).assert_ok()

    assert "resumes from step" in ended.out
    assert starts_of(folder, "step") == [0, status["step"]]
    assert_same_bits(folder, uninterrupted)


@long_form
def test_a_run_resumes_on_another_number_of_processes_with_the_same_rows(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [*FLAGS, *flags_of(text_file, folder)]

    interrupt([*PYTHON, GPT, *flags], folder, signal.SIGKILL)
    run_forked([*accelerate("cpu_ddp"), GPT, *flags]).assert_ok()

    assert starts_of(folder, "processes") == [1, 2]
    assert series(folder, "tokens") == series(uninterrupted, "tokens")
    losses = series(uninterrupted, "train/loss")
    assert series(folder, "train/loss") == pytest.approx(losses, rel=1e-4)


@long_form  # test_kills.py has a short one
@pytest.mark.parametrize("last_processes", [2, 4])
def test_a_bitwise_run_on_two_one_and_more_processes_has_the_same_bits_and_rows(
    last_processes: int, text_file: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    folder = tmp_path / "run"
    bitwise = [*FLAGS, "--bitwise", "--log_rows"]
    flags = [*bitwise, *flags_of(text_file, folder)]
    run_forked([*PYTHON, GPT, *bitwise, *flags_of(text_file, reference)]).assert_ok()

    interrupt([*torchrun(2), GPT, *flags], folder, signal.SIGTERM, 10)
    interrupt([*PYTHON, GPT, *flags], folder, signal.SIGKILL, 30)
    run_forked([*torchrun(last_processes), GPT, *flags]).assert_ok()

    assert starts_of(folder, "processes") == [2, 1, last_processes]
    rows = (folder / "rows.jsonl").read_text()
    assert rows == (reference / "rows.jsonl").read_text()
    assert rows.count("\n") == MAX_STEPS
    digest = tensors_digest(folder / LAST_CHECKPOINT)
    assert digest == tensors_digest(reference / LAST_CHECKPOINT)


def test_four_processes_resume_with_the_same_bits_because_buckets_are_rebuilt(
    tmp_path: Path,
) -> None:
    """On two processes, a + b = b + a hides the difference. test_verify.py has a whole run."""
    result = tmp_path / "same.json"
    run_forked([*torchrun(4), "tests/system/resumed_ranks.py", str(result)]).assert_ok()
    assert read_json(result) == {"rebuilt": True, "not rebuilt": False}


def test_a_finished_run_can_be_extended_and_the_new_learning_rate_is_printed(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "extended"
    more_steps = ["--max_steps", "80", "--resume_from_checkpoint", str(uninterrupted)]

    command = [*PYTHON, GPT, *FLAGS, *flags_of(text_file, folder), *more_steps]
    ended = run_forked(command).assert_ok()

    change = "max_steps 60 -> 80; the learning rate goes from 0.000345 in step 60 to "
    assert f"changed   {change}" in ended.out
    assert [*series(folder, "train/loss")] == [*range(1, 81)]
    assert "    60" in ended.out, "the curve at the end begins with the first run"


# --- launchers and signals


@long_form
def test_workers_end_and_save_if_their_launcher_is_killed(text_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start_process([*accelerate("cpu_ddp"), GPT, *ENDLESS, *flags_of(text_file, folder)])
    try:
        wait_for_log_entries(process, folder, 3)
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


def test_a_worker_whose_launcher_died_before_its_imports_ends(tmp_path: Path) -> None:
    """Otherwise it would wait for the other workers until --ddp_timeout."""
    variables = {
        "PYTHONPATH": str(ROOT),
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "9",
    }
    pid_file = tmp_path / "pid"
    recipe = shlex.join([*PYTHON, GPT, "--dataset", "README.md"])
    orphan = f"(echo $BASHPID > {pid_file}; sleep 1; exec {recipe}) &"
    command = ["bash", "-c", orphan]
    subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=True)

    time.sleep(0.3)
    worker = psutil.Process(int(pid_file.read_text()))
    if worker.is_running() and worker.ppid() != 1:
        worker.kill()
        pytest.skip("orphans are not given to process 1 here")

    _, alive = psutil.wait_procs([worker], timeout=60)
    for process in alive:
        process.kill()
    assert not alive


@pytest.mark.parametrize(
    "signal_number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=long_form),
        pytest.param(signal.SIGHUP, marks=long_form),
    ],
)
def test_a_signal_to_launcher_and_worker_twice_still_saves(
    signal_number: int, text_file: Path, tmp_path: Path
) -> None:
    """systemd, batch systems and Ctrl-C in a terminal send a signal to all processes."""
    folder = tmp_path / "run"
    process = start_process([*accelerate("cpu"), GPT, *ENDLESS, *flags_of(text_file, folder)])
    try:
        wait_for_log_entries(process, folder, 3)
        [worker] = psutil.Process(process.pid).children(recursive=True)
        for pid in (process.pid, worker.pid, process.pid, worker.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        psutil.wait_procs([worker], timeout=30)
    finally:
        wait(process)

    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(accelerate("cpu"), id="accelerate"),
        pytest.param(torchrun(1), id="torchrun", marks=long_form),
    ],
)
def test_a_launcher_reports_success_after_a_signal_to_its_worker(
    launcher: list[str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    process = start_process([*launcher, GPT, *ENDLESS, *flags_of(text_file, folder)])
    try:
        wait_for_log_entries(process, folder, 3)
        os.kill(read_json(folder / "status.json")["pid"], signal.SIGTERM)
    finally:
        ended = wait(process)

    ended.assert_ok()
    assert read_json(folder / "status.json")["state"] == "preempted"
    assert "a traceback of the launcher may follow" in ended.out
