"""Two machines: the same run, and one that is cut off."""

import contextlib
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
    begin,
    long_form,
    read_json,
    series,
    stop_group,
    wait,
    wait_for_readings,
)
from tests.machines import ADDRESS, FIRST, SECOND, command, on_machine


def start_on(
    machines: list[str], flags: list[str], config: str = "multi_node"
) -> list[subprocess.Popen]:
    """README's command on each machine."""
    processes = []
    for rank, name in enumerate(machines):
        where = [
            "--machine_rank",
            str(rank),
            "--main_process_ip",
            ADDRESS[FIRST],
            "--mixed_precision",
            "no",
        ]
        words = on_machine(name, [*accelerate(config, *where), GPT, *flags])
        processes.append(begin(words, env={"GLOO_SOCKET_IFNAME": "cable0"}))
    return processes


def wait_for(processes: list[subprocess.Popen]) -> list[Ended]:
    ended: list[Ended] = []
    with contextlib.ExitStack() as waiting:
        for process in reversed(processes):
            waiting.callback(lambda process=process: ended.append(wait(process)))
    return ended


def test_two_machines_are_the_same_run_as_one(
    machines: list[str], text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file)]
    run_forked([*PYTHON, GPT, *flags, "--output_dir", str(tmp_path / "one")]).assert_ok()
    ended = wait_for(start_on(machines, [*flags, "--output_dir", str(tmp_path / "two")]))
    for machine in ended:
        machine.assert_ok()
    out = "".join(machine.out for machine in ended)
    assert out.count("2 processes on cpu over gloo") == 1
    assert read_json(tmp_path / "two" / "run.json")["processes"] == 2
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(tmp_path / "two", key) == pytest.approx(
            series(tmp_path / "one", key), rel=1e-5
        )
    assert series(tmp_path / "two", "tokens") == series(tmp_path / "one", "tokens")


@long_form
def test_a_model_that_is_sharded_inside_two_machines_is_the_same_run(
    machines: list[str], text_file: Path, tmp_path: Path
) -> None:
    flags = [*TINY, "--dataset", str(text_file)]
    run_forked([*PYTHON, GPT, *flags, "--output_dir", str(tmp_path / "one")]).assert_ok()
    ended = wait_for(start_on(machines, [*flags, "--output_dir", str(tmp_path / "four")], "hsdp"))
    for machine in ended:
        machine.assert_ok()
    assert "FSDP2 over 2 x 2 processes" in "".join(machine.out for machine in ended)
    assert read_json(tmp_path / "four" / "run.json")["starts"][0]["sharded"] == "2x2"
    for key in ("train/loss", "train/grad_norm", "eval/loss"):
        assert series(tmp_path / "four", key) == pytest.approx(
            series(tmp_path / "one", key), rel=1e-5
        )
    assert len([*tmp_path.glob("four/model/*.safetensors")]) == 4


@long_form
def test_a_machine_that_is_cut_off_is_named(
    machines: list[str], text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = [
        *TINY,
        "--max_steps",
        "1000000",
        "--dataset",
        str(text_file),
        "--output_dir",
        str(folder),
    ]
    processes = start_on(machines, [*flags, "--ddp_timeout", "6"])
    try:
        wait_for_readings(processes[0], folder, 3)
        command("ip", "-n", SECOND, "link", "set", "cable0", "down")
        processes[0].wait(timeout=90)
    finally:
        for process in reversed(processes):
            stop_group(process)
        command("ip", "-n", SECOND, "link", "set", "cable0", "up")
        wait_for(processes)
    status = read_json(folder / "status.json")
    assert status["state"] == "failed"
    assert "rank 1 is silent" in status["reason"]
