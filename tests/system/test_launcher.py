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
NO_SETTINGS = {"on_cpu": False, "processes": None}


@pytest.fixture(autouse=True)
def _no_settings_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables that users set, and let accelerate find no default config."""
    for name in (
        "ACCELERATE_USE_CPU",
        "MASTER_ADDR",
        "WORLD_SIZE",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))


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


# --- settings


@pytest.mark.parametrize(
    ("launcher", "flags", "settings"),
    [
        pytest.param(PYTHON, [], WITHOUT_LAUNCHER | NO_SETTINGS, id="python"),
        pytest.param(
            LAUNCH_ONE,
            [],
            WITH_LAUNCHER | NO_SETTINGS | {"processes": 1},
            id="accelerate",
            marks=long_form,
        ),
        pytest.param(
            LAUNCH_ONE,
            ["--cpu"],
            WITH_LAUNCHER | {"on_cpu": True, "processes": 1},
            id="flags with default values",
        ),
        pytest.param(torchrun(1), [], WITH_LAUNCHER | NO_SETTINGS, id="torchrun"),
    ],
)
def test_the_defaults_of_a_launcher_are_no_settings(
    launcher: list[str], flags: list[str], settings: dict[str, Any]
) -> None:
    assert launched([*launcher, *flags, SCRIPT, "--cpu"]) == settings


def test_with_plain_python_the_variables_count() -> None:
    variables = {"ACCELERATE_USE_CPU": "true"}
    settings = {"on_cpu": True, "processes": None}
    assert launched([*PYTHON, SCRIPT], variables) == WITHOUT_LAUNCHER | settings


def test_a_flag_of_accelerate_comes_before_its_config(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: 'NO'\nnum_processes: 2\nuse_cpu: true\n")
    flags = ["--config_file", str(config), "--num_processes", "1"]
    settings = {"on_cpu": True, "processes": 1}
    assert launched([*LAUNCH, *flags, SCRIPT]) == WITH_LAUNCHER | settings


def test_behind_a_wrapper_script_torchrun_is_a_launcher_but_not_the_parent(tmp_path: Path) -> None:
    settings = launched(behind_wrapper(torchrun(1), tmp_path))
    assert settings["by_launcher"] is False
    assert settings["has_launcher"] is True


# --- the exit status of a stopped run, which launched.py gets as its argument


@pytest.mark.parametrize(
    ("launcher", "status"),
    [
        pytest.param(PYTHON, 130, id="python"),
        pytest.param(LAUNCH_ONE, 0, id="accelerate"),
        pytest.param(torchrun(1), 0, id="torchrun", marks=long_form),
    ],
)
def test_a_stopped_run_has_its_exit_status_only_without_a_launcher(
    launcher: list[str], status: int, tmp_path: Path
) -> None:
    assert run([*launcher, SCRIPT, "130"]).status == status
    if launcher != LAUNCH_ONE:
        assert run([*behind_wrapper(launcher, tmp_path), "130"]).status == status


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
