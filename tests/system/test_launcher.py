"""What the user told the launcher is told apart from its defaults, however a run is started."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launching import BIN, PYTHON, begin, run, stop_group, torchrun

SCRIPT = "tests/system/launched.py"
NOTHING = {"precision": None, "threads": None, "on_cpu": False, "processes": None}
COMMANDS = ["python", "accelerate", "torchrun"]
PLAIN_ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_processes", "1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where accelerate looks for its default config; the user has set no variable."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    settings = ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")
    for name in (*settings, "MASTER_ADDR", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "accelerate"
    folder.mkdir()
    return folder


def wrapper(path: Path, command: list[str]) -> list[str]:
    """Write a script that starts a command, so that the launcher is no longer the parent."""
    path.write_text("import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n")
    return [*command, str(path), sys.executable, SCRIPT]


def chosen(command: list[str], env: dict[str, str] | None = None) -> dict[str, object]:
    """Start the script, and return what it found."""
    out = run(command, env).assert_ok().out
    found: dict[str, object] = json.loads(next(li for li in out.splitlines() if li[:1] == "{"))
    return found


def test_plain_python_has_no_launcher_and_reads_variables(home: Path) -> None:
    command = [*PYTHON, SCRIPT]
    nobody = {"by_launcher": False, "has_launcher": False}
    assert chosen(command) == nobody | NOTHING
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16", "OMP_NUM_THREADS": "3"}
    settings = {"precision": "bf16", "threads": 3, "on_cpu": True, "processes": None}
    assert chosen(command, variables | {"ACCELERATE_USE_CPU": "true"}) == nobody | settings


def test_accelerate_without_a_config_exports_defaults_that_nobody_chose(home: Path) -> None:
    launcher = {"by_launcher": True, "has_launcher": True}
    assert chosen([*PLAIN_ACCELERATE, SCRIPT]) == launcher | NOTHING | {"processes": 1}
    flags = ["--mixed-precision=no", "--num_cpu_threads_per_process", "2", "--cpu"]
    settings = {"precision": "no", "threads": 2, "on_cpu": True, "processes": 1}
    assert chosen([*PLAIN_ACCELERATE, *flags, SCRIPT, "--cpu"]) == launcher | settings
    assert chosen([*PLAIN_ACCELERATE, SCRIPT], {"OMP_NUM_THREADS": "3"})["threads"] == 3


@pytest.mark.parametrize("is_default", [False, True], ids=["--config_file", "default config"])
def test_a_flag_of_accelerate_comes_before_its_config(is_default: bool, home: Path) -> None:
    path = home / ("default_config.yaml" if is_default else "mine.yaml")
    path.write_text(
        "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: 'no'\nuse_cpu: true\n"
    )
    command = [str(BIN / "accelerate"), "launch"]
    if not is_default:
        command += ["--config_file", str(path)]

    settings = {"precision": "no", "threads": None, "on_cpu": True, "processes": 1}
    launcher = {"by_launcher": True, "has_launcher": True}
    assert chosen([*command, SCRIPT]) == launcher | settings
    flags = ["--mixed_precision", "bf16", "--num_cpu_threads_per_process", "5"]
    changed = {"precision": "bf16", "threads": 5}
    assert chosen([*command, *flags, SCRIPT]) == launcher | settings | changed


def test_torchrun_chooses_nothing(home: Path) -> None:
    launcher = {"by_launcher": True, "has_launcher": True}
    assert chosen([*torchrun(2), SCRIPT]) == launcher | NOTHING
    assert chosen([*torchrun(2), SCRIPT], {"OMP_NUM_THREADS": "3"})["threads"] == 3


def test_behind_a_wrapper_script_the_variables_count(home: Path, tmp_path: Path) -> None:
    flags = ["--mixed_precision", "bf16", "--num_cpu_threads_per_process", "2"]
    found = chosen(wrapper(tmp_path / "wrapper.py", [*PLAIN_ACCELERATE, *flags]))
    assert (found["by_launcher"], found["precision"], found["threads"]) == (False, "bf16", 2)
    found = chosen(wrapper(tmp_path / "wrapper.py", torchrun(2)))
    assert (found["by_launcher"], found["has_launcher"]) == (False, True)


@pytest.mark.parametrize("wrapped", [False, True])
def test_two_processes_requested_and_one_started_is_one_line(
    wrapped: bool, home: Path, tmp_path: Path
) -> None:
    launcher = [str(BIN / "accelerate"), "launch", "--cpu", "--num_processes", "2"]
    command = wrapper(tmp_path / "wrapper.py", launcher) if wrapped else [*launcher, SCRIPT]
    ended = run(command)
    assert ended.status != 0
    number = "several" if wrapped else "2"
    says = f"error: {number} processes were requested, but accelerate started one"
    assert ended.err.count(says) == 1


@pytest.mark.parametrize("command", [PYTHON, PLAIN_ACCELERATE, torchrun(1)], ids=COMMANDS)
def test_one_process_may_have_an_address(command: list[str], home: Path) -> None:
    exported = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert chosen([*command, SCRIPT], exported)["precision"] == "bf16"


@pytest.mark.parametrize("command", [PYTHON, PLAIN_ACCELERATE, torchrun(1)], ids=COMMANDS)
def test_a_stopped_run_has_its_exit_status_only_without_a_launcher(
    command: list[str], home: Path
) -> None:
    assert run([*command, SCRIPT, "130"]).status == (130 if command is PYTHON else 0)


def test_behind_a_wrapper_script_torchrun_still_counts_as_a_launcher(
    home: Path, tmp_path: Path
) -> None:
    path = tmp_path / "wrapper.py"
    assert run([*wrapper(path, torchrun(1)), "130"]).status == 0
    assert run([*wrapper(path, PYTHON), "130"]).status == 130


SLEEPER = """
import sys, time
from pathlib import Path
from llmtrain import launch

def main():
    Path(sys.argv[1]).touch()
    time.sleep(60)

launch(main)
"""


@pytest.mark.parametrize(
    "launcher", [PLAIN_ACCELERATE, torchrun(1)], ids=["accelerate", "torchrun"]
)
def test_a_process_dies_with_its_launcher(launcher: list[str], home: Path, tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    started = tmp_path / "started"
    process: subprocess.Popen[bytes] = begin([*launcher, str(script), str(started)])
    try:
        deadline = time.monotonic() + 60
        while not started.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        workers = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert workers
        assert not alive
    finally:
        stop_group(process)
