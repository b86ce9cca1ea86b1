"""Two machines make the run of one, and a machine that is cut off is named."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    GPT,
    PYTHON,
    TINY,
    Ended,
    accelerate,
    long_form,
    read_json,
    series,
    start_process,
    stop_group,
    wait,
    wait_for_log_entries,
)
from tests.machines import ADDRESS, FIRST, SECOND, command, on_machine


def start_on(
    machines: list[str], flags: list[str], config: str = "multi_node"
) -> list[subprocess.Popen]:
    """Start the command of the README on each machine."""
    processes = []
    for rank, machine in enumerate(machines):
        launcher_flags = f"--machine_rank {rank} --main_process_ip {ADDRESS[FIRST]}"
        launcher = accelerate(config, *shlex.split(launcher_flags))
        words = on_machine(machine, [*launcher, GPT, *flags])
        processes.append(start_process(words, env={"GLOO_SOCKET_IFNAME": "cable0"}))
    return processes


def wait_for_all(processes: list[subprocess.Popen]) -> list[Ended]:
    """Wait for each process, and end the group of each even if another one does not end."""
    try:
        return [wait(process) for process in processes]
    finally:
        for process in processes:
            stop_group(process)


def flags_of(dataset: Path, folder: Path) -> list[str]:
    return [*TINY, *shlex.split(f"--dataset {dataset} --output_dir {folder}")]


@pytest.fixture(scope="module")
def on_one_process(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("on-one-process") / "run"
    run_forked([*PYTHON, GPT, *flags_of(text_file, folder)]).assert_ok()
    return folder


@pytest.mark.parametrize("config", ["multi_node", pytest.param("hsdp", marks=long_form)])
def test_two_machines_make_the_run_of_one_process(
    config: str, machines: list[str], text_file: Path, on_one_process: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"

    first, second = wait_for_all(start_on(machines, flags_of(text_file, folder), config))

    output = first.assert_ok().out + second.assert_ok().out
    [start] = read_json(folder / "run.json")["starts"]
    files = len([*(folder / "model").glob("*.safetensors")])
    if config == "hsdp":  # sharded within each machine
        assert output.count("FSDP2 over 2 x 2 processes") == 1
        assert (start["processes"], start["sharded"], files) == (4, "2x2", 4)
    else:
        assert output.count("2 processes on cpu") == 1
        assert (start["processes"], start["sharded"], files) == (2, None, 1)
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(folder, key) == pytest.approx(series(on_one_process, key), rel=1e-5)
    assert series(folder, "tokens") == series(on_one_process, "tokens")


@long_form
def test_a_machine_that_is_cut_off_is_named(
    machines: list[str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    endless = shlex.split("--max_steps 1000000 --ddp_timeout 6")
    cable_of_second = ["ip", "-n", SECOND, "link", "set", "cable0"]

    processes = start_on(machines, [*flags_of(text_file, folder), *endless])
    try:
        wait_for_log_entries(processes[0], folder, 3)
        command(*cable_of_second, "down")
        processes[0].wait(timeout=90)
    finally:
        for process in reversed(processes):
            stop_group(process)
        command(*cable_of_second, "up")
        wait_for_all(processes)

    status = read_json(folder / "status.json")
    assert status["state"] == "failed"
    assert "rank 1 is silent" in status["reason"]
