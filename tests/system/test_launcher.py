"""A run knows its launcher, and tells the settings of the user from the defaults of the launcher."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launching import BIN, PYTHON, long_form, run, start_process, stop_group, torchrun
from tests.waiting import wait_until

SCRIPT = "tests/system/launched.py"
LAUNCH = [str(BIN / "accelerate"), "launch"]
LAUNCH_ONE = [*LAUNCH, "--num_processes", "1"]

WITHOUT_LAUNCHER = {"by_launcher": False, "has_launcher": False}
WITH_LAUNCHER = {"by_launcher": True, "has_launcher": True}
NO_SETTINGS = {"precision": None, "threads": None, "on_cpu": False, "processes": None}


@pytest.fixture(autouse=True)
def config_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder in which accelerate looks for its default config.

    The variables that users set are removed.
    """
    for name in (
        "OMP_NUM_THREADS",
        "ACCELERATE_MIXED_PRECISION",
        "ACCELERATE_USE_CPU",
        "MASTER_ADDR",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "accelerate"
    folder.mkdir()
    return folder


def launched(command: list[str], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Start launched.py, and return the launcher and the settings that it prints."""
    output = run(command, env).assert_ok().out
    lines = [line for line in output.splitlines() if line.startswith("{")]
    settings: dict[str, Any] = json.loads(lines[0])
    return settings


def behind_wrapper(command: list[str], folder: Path) -> list[str]:
    """Return a command whose launcher starts a wrapper script, which starts launched.py.

    The launcher is then no longer the parent of the run.
    """
    wrapper = folder / "wrapper.py"
    wrapper.write_text("import subprocess, sys\nsys.exit(subprocess.call(sys.argv[1:]))\n")
    return [*command, str(wrapper), sys.executable, SCRIPT]


# --- plain python


def test_plain_python_has_no_launcher_and_no_settings() -> None:
    assert launched([*PYTHON, SCRIPT]) == WITHOUT_LAUNCHER | NO_SETTINGS


def test_with_plain_python_the_variables_count() -> None:
    variables = {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "OMP_NUM_THREADS": "3",
        "ACCELERATE_USE_CPU": "true",
    }
    settings = {"precision": "bf16", "threads": 3, "on_cpu": True, "processes": None}
    assert launched([*PYTHON, SCRIPT], variables) == WITHOUT_LAUNCHER | settings


# --- accelerate


def test_the_defaults_that_accelerate_exports_are_no_settings() -> None:
    settings = NO_SETTINGS | {"processes": 1}
    assert launched([*LAUNCH_ONE, SCRIPT]) == WITH_LAUNCHER | settings


def test_flags_of_accelerate_are_settings_even_if_they_have_the_default_value() -> None:
    flags = "--mixed-precision=no --num_cpu_threads_per_process 2 --cpu"
    settings = {"precision": "no", "threads": 2, "on_cpu": True, "processes": 1}
    command = [*LAUNCH_ONE, *flags.split(), SCRIPT, "--cpu"]
    assert launched(command) == WITH_LAUNCHER | settings


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(LAUNCH_ONE, id="accelerate"), pytest.param(torchrun(2), id="torchrun")],
)
def test_a_number_of_threads_that_was_exported_before_the_launcher_is_a_setting(
    launcher: list[str],
) -> None:
    assert launched([*launcher, SCRIPT], {"OMP_NUM_THREADS": "3"})["threads"] == 3


CONFIG = """
distributed_type: 'NO'
num_processes: 1
mixed_precision: 'no'
use_cpu: true
"""


@pytest.fixture(params=["named config", pytest.param("default config", marks=long_form)])
def launch_with_config(request: pytest.FixtureRequest, config_folder: Path) -> list[str]:
    """Write CONFIG, and return the beginning of a command that reads it."""
    if request.param == "default config":
        (config_folder / "default_config.yaml").write_text(CONFIG)
        return LAUNCH

    path = config_folder / "another.yaml"
    path.write_text(CONFIG)
    return [*LAUNCH, "--config_file", str(path)]


SETTINGS_OF_CONFIG = {"precision": "no", "threads": None, "on_cpu": True, "processes": 1}


def test_a_config_of_accelerate_has_settings(launch_with_config: list[str]) -> None:
    assert launched([*launch_with_config, SCRIPT]) == WITH_LAUNCHER | SETTINGS_OF_CONFIG


def test_a_flag_of_accelerate_comes_before_its_config(launch_with_config: list[str]) -> None:
    flags = "--mixed_precision bf16 --num_cpu_threads_per_process 5"
    settings = SETTINGS_OF_CONFIG | {"precision": "bf16", "threads": 5}
    assert launched([*launch_with_config, *flags.split(), SCRIPT]) == WITH_LAUNCHER | settings


@pytest.mark.parametrize(
    ("is_wrapped", "number"),
    [
        pytest.param(False, "2", id="direct"),
        pytest.param(True, "several", id="wrapper script", marks=long_form),
    ],
)
def test_two_processes_requested_and_one_started_is_one_line(
    is_wrapped: bool, number: str, tmp_path: Path
) -> None:
    launcher = [*LAUNCH, "--cpu", "--num_processes", "2"]
    command = [*launcher, SCRIPT]
    if is_wrapped:
        command = behind_wrapper(launcher, tmp_path)

    ended = run(command)

    assert ended.status != 0
    message = f"error: {number} processes were requested, but accelerate started one"
    assert ended.err.count(message) == 1


# --- torchrun


def test_the_threads_that_torchrun_exports_by_default_are_no_setting() -> None:
    assert launched([*torchrun(2), SCRIPT]) == WITH_LAUNCHER | NO_SETTINGS


# --- a wrapper script


@long_form
def test_behind_a_wrapper_script_the_variables_of_accelerate_count(tmp_path: Path) -> None:
    flags = "--mixed_precision bf16 --num_cpu_threads_per_process 2"
    settings = launched(behind_wrapper([*LAUNCH_ONE, *flags.split()], tmp_path))
    assert settings["by_launcher"] is False
    assert settings["precision"] == "bf16"
    assert settings["threads"] == 2


def test_behind_a_wrapper_script_torchrun_is_a_launcher_but_not_the_parent(tmp_path: Path) -> None:
    settings = launched(behind_wrapper(torchrun(2), tmp_path))
    assert settings["by_launcher"] is False
    assert settings["has_launcher"] is True


# --- one process


@long_form
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(PYTHON, id="python"),
        pytest.param(LAUNCH_ONE, id="accelerate"),
        pytest.param(torchrun(1), id="torchrun"),
    ],
)
def test_one_process_may_have_an_address(command: list[str]) -> None:
    variables = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert launched([*command, SCRIPT], variables)["precision"] == "bf16"


# --- the exit status of a stopped run, which launched.py gets as its argument


@pytest.mark.parametrize(
    ("command", "status"),
    [
        pytest.param(PYTHON, 130, id="python"),
        pytest.param(LAUNCH_ONE, 0, id="accelerate"),
        pytest.param(torchrun(1), 0, id="torchrun"),
    ],
)
def test_a_stopped_run_has_its_exit_status_only_without_a_launcher(
    command: list[str], status: int
) -> None:
    assert run([*command, SCRIPT, "130"]).status == status


@long_form
@pytest.mark.parametrize(
    ("command", "status"),
    [pytest.param(torchrun(1), 0, id="torchrun"), pytest.param(PYTHON, 130, id="python")],
)
def test_behind_a_wrapper_a_stopped_run_has_its_status_only_without_a_launcher(
    command: list[str], status: int, tmp_path: Path
) -> None:
    assert run([*behind_wrapper(command, tmp_path), "130"]).status == status


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
    [pytest.param(LAUNCH_ONE, id="accelerate"), pytest.param(torchrun(1), id="torchrun")],
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
