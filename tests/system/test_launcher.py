"""A run knows whether a launcher started it, and dies with its launcher."""

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.launching import (
    BIN,
    PYTHON,
    accelerate,
    long_form,
    run,
    start_process,
    stop_group,
    torchrun,
)
from tests.waiting import wait_until

LAUNCH_ONE = [str(BIN / "accelerate"), "launch", "--num_processes", "1"]
MODULE = [*PYTHON, "-m", "accelerate.commands.launch", "--num_processes", "1"]


# --- the exit status of a stopped run

STOPPED = """
from llmtrain import launch

class Stopped:
    exit_status = 130
    def show(self) -> None: pass

launch(Stopped)
"""
WRAPPER = "import subprocess, sys\nsys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))\n"


@pytest.mark.parametrize(
    ("launcher", "status"),
    [
        pytest.param(PYTHON, 130, id="python"),
        pytest.param(LAUNCH_ONE, 0, id="accelerate"),
        pytest.param(accelerate("cpu"), 0, id="accelerate with a file", marks=long_form),
        pytest.param(MODULE, 0, id="accelerate as a module", marks=long_form),
        pytest.param(torchrun(1), 0, id="torchrun", marks=long_form),
    ],
)
def test_a_stopped_run_has_its_exit_status_only_without_a_launcher(
    launcher: list[str], status: int, tmp_path: Path
) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    assert run([*launcher, str(script)]).status == status


def test_behind_a_wrapper_script_torchrun_is_still_a_launcher(tmp_path: Path) -> None:
    script = tmp_path / "stopped.py"
    script.write_text(STOPPED)
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(WRAPPER)
    assert run([*torchrun(1), str(wrapper), str(script)]).status == 0
    assert run([*PYTHON, str(wrapper), str(script)]).status == 130


# --- the end of the launcher

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
    "launcher",
    [
        pytest.param(LAUNCH_ONE, id="accelerate", marks=long_form),
        pytest.param(torchrun(1), id="torchrun"),
    ],
)
def test_a_process_dies_with_its_launcher(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "sleeper.py"
    script.write_text(SLEEPER)
    started = tmp_path / "started"

    process = start_process([*launcher, str(script), str(started)])
    try:
        wait_until(started.exists, 60)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        os.kill(process.pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=30)
    finally:
        stop_group(process)

    assert not alive
