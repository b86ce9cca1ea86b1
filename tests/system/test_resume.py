"""An interrupted run continues as if nothing had happened."""

import contextlib
import itertools
import json
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    ROOT,
    TINY,
    Ended,
    accelerate,
    interrupt,
    long_form,
    read_json,
    series,
    start_process,
    torchrun,
    wait,
    wait_for_log_entries,
)
from tests.record.checkpoint_files import tensors_digest
from tests.system import digits

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
        weights = digits.tensors_digest(folder / model / "model.safetensors")
        assert weights == digits.tensors_digest(reference / model / "model.safetensors")
    for key in ("train/loss", "train/grad_norm", "train/learning_rate", "tokens", "tokens_seen"):
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

    ended = run_forked(command).assert_ok()

    assert "resumes from step" in ended.out
    assert starts_of(folder, "step") == [0, status["step"]]
    assert_same_bits(folder, uninterrupted)


def damage(rows: Path) -> None:
    """Change bits of every second row. The last row has padding behind it, the first a header before."""
    content = bytearray(rows.read_bytes())
    places = range(len(content) // 16, len(content) // 8, 33)  # of numbers of 32 bits
    for place, bit in zip(places, itertools.cycle([0, 22, 31]), strict=False):
        content[4 * place + bit // 8] ^= 1 << bit % 8
    rows.write_bytes(content)


def test_rows_that_a_disk_has_changed_end_in_the_same_bits(
    text_file: Path, uninterrupted: Path, tmp_path: Path
) -> None:
    def run_with(folder: str, *flags: str) -> Ended:
        command = [*PYTHON, GPT, *FLAGS, *flags_of(text_file, tmp_path / folder), *flags]
        return run_forked(command, {"LLMTRAIN_CACHE": str(tmp_path / "cache")}).assert_ok()

    run_with("none", "--dry_run")
    [rows] = (tmp_path / "cache").glob("*/train-0-00000.safetensors")
    tokenised = rows.read_bytes()
    damage(rows)
    ended = run_with("first")
    assert ended.err.count(f"{rows.name} differs from its hash") == 1
    assert_same_bits(tmp_path / "first", uninterrupted)

    # A run that was killed before its last checkpoint.
    killed = tmp_path / "killed"
    shutil.copytree(uninterrupted, killed)
    shutil.rmtree(killed / "model")
    shutil.rmtree(killed / LAST_CHECKPOINT)
    status = read_json(killed / "status.json") | {"state": "running", "step": 55}
    (killed / "status.json").write_text(json.dumps(status))
    damage(rows)
    ended = run_with("killed")
    assert "resumes from step 50" in ended.out
    assert ended.err.count(f"{rows.name} differs from its hash") == 1
    assert_same_bits(killed, uninterrupted)

    damage(rows)
    run_with("none", "--dry_run")
    assert rows.read_bytes() == tokenised


@long_form  # test_kills.py has a short one
def test_a_bitwise_run_on_two_one_and_four_processes_has_the_same_bits_and_rows(
    text_file: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    folder = tmp_path / "run"
    bitwise = [*FLAGS, "--bitwise", "--log_rows"]
    flags = [*bitwise, *flags_of(text_file, folder)]
    run_forked([*PYTHON, GPT, *bitwise, *flags_of(text_file, reference)]).assert_ok()

    interrupt([*torchrun(2), GPT, *flags], folder, signal.SIGTERM, 10)
    interrupt([*PYTHON, GPT, *flags], folder, signal.SIGKILL, 30)
    assert read_json(folder / "status.json")["state"] == "running"
    run_forked([*torchrun(4), GPT, *flags]).assert_ok()

    assert starts_of(folder, "processes") == [2, 1, 4]
    rows = (folder / "rows.jsonl").read_text()
    assert rows == (reference / "rows.jsonl").read_text()
    assert rows.count("\n") == MAX_STEPS
    digest = tensors_digest(folder / LAST_CHECKPOINT)
    assert digest == tensors_digest(reference / LAST_CHECKPOINT)


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
        assert_all_end(workers)
        assert read_json(folder / "status.json")["state"] == "preempted"
    finally:
        wait(process)


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    for process in alive:
        process.kill()
    assert not alive


def test_a_worker_whose_launcher_died_before_its_imports_ends(tmp_path: Path) -> None:
    """Otherwise it would wait for the other workers until --ddp_timeout."""
    variables = (
        f"PYTHONPATH={ROOT} TORCHELASTIC_RUN_ID=x TORCHELASTIC_USE_AGENT_STORE=True RANK=0 "
        "WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=9"
    )
    pid_file = tmp_path / "pid"
    recipe = shlex.join([*PYTHON, GPT, "--dataset", "README.md"])
    orphan = f"(echo $BASHPID > {pid_file}; sleep 1; exec env {variables} {recipe}) &"
    subprocess.run(["bash", "-c", orphan], cwd=ROOT, check=True)

    time.sleep(0.3)
    worker = psutil.Process(int(pid_file.read_text()))
    if worker.is_running() and worker.ppid() != 1:
        worker.kill()
        pytest.skip("orphans are not given to process 1 here")

    assert_all_end([worker])


LONG_SIGNALS = [pytest.param(number, marks=long_form) for number in (signal.SIGINT, signal.SIGHUP)]


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, *LONG_SIGNALS])
def test_a_signal_to_launcher_and_worker_twice_still_saves(
    signal_number: int, text_file: Path, tmp_path: Path
) -> None:
    """systemd, batch systems and Ctrl-C in a terminal send a signal to all processes."""
    folder = tmp_path / "run"
    process = start_process([*accelerate("cpu"), GPT, *ENDLESS, *flags_of(text_file, folder)])
    try:
        wait_for_log_entries(process, folder, 3)
        [worker] = psutil.Process(process.pid).children(recursive=True)
        for receiver in (process, worker, process, worker):
            with contextlib.suppress(psutil.NoSuchProcess):
                receiver.send_signal(signal_number)
        psutil.wait_procs([worker], timeout=30)
    finally:
        wait(process)

    status = read_json(folder / "status.json")
    assert status["state"] == "preempted"
    assert (folder / "checkpoints" / f"step-{status['step']:08d}").is_dir()
