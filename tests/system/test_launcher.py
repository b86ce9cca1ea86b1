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
NOTHING = {"precision": None, "threads": None, "on_cpu": False}
PLAIN_ACCELERATE = [str(BIN / "accelerate"), "launch", "--num_processes", "1"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where accelerate looks for its default config; the user has set no variable."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("OMP_NUM_THREADS", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU"):
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
    settings = {"precision": "bf16", "threads": 3, "on_cpu": True}
    assert chosen(command, variables | {"ACCELERATE_USE_CPU": "true"}) == nobody | settings


def test_accelerate_without_a_config_exports_defaults_that_nobody_chose(home: Path) -> None:
    launcher = {"by_launcher": True, "has_launcher": True}
    assert chosen([*PLAIN_ACCELERATE, SCRIPT]) == launcher | NOTHING
    flags = ["--mixed-precision=no", "--num_cpu_threads_per_process", "2", "--cpu"]
    settings = {"precision": "no", "threads": 2, "on_cpu": True}
    assert chosen([*PLAIN_ACCELERATE, *flags, SCRIPT, "--cpu"]) == launcher | settings
    assert chosen([*PLAIN_ACCELERATE, SCRIPT], {"OMP_NUM_THREADS": "3"})["threads"] == 3


def test_a_flag_of_accelerate_comes_before_its_config(home: Path) -> None:
    config = (
        "distributed_type: 'NO'\nnum_processes: 1\nmixed_precision: no\nnum_cpu_threads_per_process: 5\nuse_cpu: true\n"
    )
    (home / "default_config.yaml").write_text(config)
    settings = {"precision": "no", "threads": 5, "on_cpu": True}
    launcher = {"by_launcher": True, "has_launcher": True}
    assert chosen([*PLAIN_ACCELERATE, SCRIPT]) == launcher | settings
    found = chosen([*PLAIN_ACCELERATE, "--mixed_precision", "bf16", SCRIPT])
    assert found["precision"] == "bf16"


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
    assert ended.err.count("error: several processes were requested, but accelerate started one")


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
