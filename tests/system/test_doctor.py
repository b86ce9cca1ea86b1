"""`llmtrain doctor` finds planted faults, and names the machine that has them."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmtrain.lab.doctor import local_checks
from llmtrain.lab.doctor.group_checks import merge_findings
from llmtrain.lab.doctor.local_checks import Finding
from tests.command_line import run_cli
from tests.launching import PYTHON, ROOT, Ended, accelerate, long_form, run, start_process, wait
from tests.machines import ADDRESS, FIRST, SECOND, command, on_machine


class Report(NamedTuple):
    """The outcome of `llmtrain doctor --json`."""

    status: int
    findings: list[dict[str, str]]

    def about(self, subject: str) -> list[dict[str, str]]:
        return [finding for finding in self.findings if finding["subject"] == subject]


@pytest.fixture
def examine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Report]:
    """A function that examines this machine with one process."""
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command acts as a launcher
    monkeypatch.setattr(os, "_exit", sys.exit)

    def examine(flags: str = "") -> Report:
        status, out, err = run_cli(capsys, "doctor", "--json", *shlex.split(flags))
        assert not err
        return Report(status, json.loads(out))

    return examine


# --- one machine


def test_a_machine_that_can_train_has_no_bad_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run_cli(capsys, "doctor", "--output_dir", f"{tmp_path}/runs")

    assert status == 0
    lines = out.splitlines()
    assert all(line.startswith(("ok ", "look ")) for line in lines)
    subjects = {line[6:17].rstrip() for line in lines}
    assert subjects >= {"versions", "launch", "devices", "run folder"}
    assert "torch 2." in lines[0]
    assert [*tmp_path.iterdir()] == []


def test_a_run_folder_in_which_no_file_can_grow_is_bad(
    monkeypatch: pytest.MonkeyPatch, examine: Callable[[str], Report], tmp_path: Path
) -> None:
    """A mounted bucket without a cache refuses to append to a file."""
    open_path = Path.open

    def refuse_to_append(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "a" in mode and path.exists():
            raise PermissionError(1, "Operation not permitted")
        return open_path(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse_to_append)

    [finding] = examine(f"--output_dir {tmp_path}").about("run folder")

    assert finding["level"] == "BAD"
    assert "Operation not permitted" in finding["text"]


def test_a_small_disk_and_little_shared_memory_are_doubtful(
    monkeypatch: pytest.MonkeyPatch, examine: Callable[[str], Report]
) -> None:
    usage = local_checks.shutil.disk_usage("/")._replace(total=2**26, free=2**30)
    monkeypatch.setattr(local_checks.shutil, "disk_usage", lambda path: usage)

    report = examine("")

    assert report.status == 0
    assert report.about("run folder")[0]["level"] == "look"
    assert ("64 MiB" in str(report.about("memory"))) == Path("/dev/shm").is_dir()


# --- several GPUs


@pytest.fixture
def examined_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend to have four GPUs, of which number 3 is full.

    Returns:
        The GPUs whose free memory is read, as it happens.
    """
    gpus = []

    def free_and_total_memory(gpu: int) -> tuple[int, int]:
        gpus.append(gpu)
        free = 10 if gpu == 3 else 80
        return free, 80

    cuda = local_checks.torch.cuda
    accelerator = local_checks.torch.accelerator
    device = local_checks.torch.device("cuda")
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(cuda, "device_count", lambda: 4)
    monkeypatch.setattr(cuda, "get_device_name", lambda *_: "H100")
    monkeypatch.setattr(cuda, "mem_get_info", free_and_total_memory)
    return gpus


def test_each_of_several_processes_reads_the_memory_of_its_own_gpu(
    examined_gpus: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    findings_by_rank = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        findings_by_rank.append(local_checks.findings(tmp_path))

    *findings_of_first, full_gpu = merge_findings(["node (machine 0)"] * 4, findings_by_rank)

    assert examined_gpus == [0, 1, 2, 3]
    assert findings_of_first == findings_by_rank[0]
    assert full_gpu.text == "GPU 3 has 12% of its memory free"

    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("LOCAL_RANK")
    assert full_gpu in local_checks.findings(tmp_path), "a single process reads that of all GPUs"


def test_a_finding_of_all_machines_is_reported_once_and_any_other_with_its_machine() -> None:
    same_versions = Finding("ok", "versions", "torch 2.11")
    first_folder = Finding("ok", "run folder", "64 GiB")
    second_folder = Finding("look", "run folder", "8 GiB")

    merged = merge_findings(
        ["node-a (machine 0)", "node-b (machine 1)"],
        [[same_versions, first_folder], [same_versions, second_folder]],
    )

    assert merged == [
        same_versions,
        Finding("ok", "run folder", "node-a (machine 0): 64 GiB"),
        Finding("look", "run folder", "node-b (machine 1): 8 GiB"),
    ]


@pytest.mark.usefixtures("examined_gpus")
@pytest.mark.parametrize(
    ("processes", "on_cpu", "backend", "has_gpus_for_all"),
    [
        pytest.param(4, "", "nccl", True, id="one per GPU"),
        pytest.param(5, "", "gloo", False, id="more than GPUs"),
        pytest.param(4, "true", "gloo", True, id="on the CPU"),
    ],
)
def test_processes_join_with_the_backend_that_a_run_would_use(
    processes: int,
    on_cpu: str,
    backend: str,
    has_gpus_for_all: bool,
    monkeypatch: pytest.MonkeyPatch,
    examine: Callable[[str], Report],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
    monkeypatch.setattr(
        "llmtrain.lab.doctor.group_checks.join_group",
        lambda backend, timeout: Finding("BAD", "meeting", backend),
    )

    report = examine("")

    assert report.about("meeting")[0]["text"] == backend
    levels = {finding["level"] for finding in report.about("launch")}
    assert levels == ({"ok"} if has_gpus_for_all else {"ok", "BAD"})


# --- processes that do not come


def test_a_port_in_use_and_a_process_that_does_not_come_are_named(
    examine: Callable[[str], Report],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        machines = f"--num_machines 2 --main_process_ip 127.0.0.1 --main_process_port {port}"
        in_use = examine(f"{machines} --machine_rank 0 --wait 5")
    os.environ.pop("WORLD_SIZE")
    missing = examine(f"{machines} --machine_rank 0 --wait 0.5")
    os.environ.pop("WORLD_SIZE")
    unreachable = examine(f"{machines} --machine_rank 1 --wait 0.5")

    for report in (in_use, missing, unreachable):
        assert report.status == 1
        assert report.about("devices"), "the machine reports what it has found"
    assert f"port {port} of " in in_use.about("meeting")[0]["text"]
    assert f"rank 1 has not come to 127.0.0.1:{port}" in missing.about("meeting")[0]["text"]
    assert f"does not reach 127.0.0.1:{port}" in unreachable.about("meeting")[0]["text"]


@pytest.mark.parametrize(
    "flags",
    [
        "--num_machines 2",
        "--num_machines 2 --machine_rank 2 --main_process_ip 10.0.0.1",
        "--num_machines 0",
        "--main_process_port 99999",
    ],
)
def test_a_wrong_description_of_the_machines_is_an_error_of_one_line(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_cli(capsys, "doctor", *shlex.split(flags))

    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert flags.split()[1] in err


# --- several processes and machines


def report_lines(process: Ended) -> list[str]:
    """Return the findings in the output of a process, without messages of other programs."""
    lines = process.out.splitlines()
    return [line for line in lines if line.startswith(("ok  ", "look", "BAD "))]


def report_text(process: Ended) -> str:
    return "\n".join(report_lines(process))


def test_two_processes_make_one_report(tmp_path: Path) -> None:
    doctor = f"--multi_gpu -m llmtrain doctor --output_dir {tmp_path}"

    process = run(accelerate("cpu_ddp", *shlex.split(doctor))).assert_ok()

    report = report_text(process)
    assert report.count("versions") == 1
    assert "2 processes; ACCELERATE_" in report
    assert "ACCELERATE_MIXED_PRECISION no" in report
    assert "2 processes over gloo" in report
    assert "MB/s" in report
    assert "is visible to all processes" in report
    assert "BAD" not in report


def examine_two_machines(
    machines: list[str], output_dir: Path, env_of_second: dict[str, str] | None = None
) -> list[Ended]:
    """Start `llmtrain doctor` on both machines, and wait for it to end."""
    variables = {"GLOO_SOCKET_IFNAME": "cable0"}
    environments = [variables, variables | (env_of_second or {})]
    processes = []
    for rank, (machine, env) in enumerate(zip(machines, environments, strict=True)):
        doctor = (
            f"-m llmtrain doctor --num_machines 2 --machine_rank {rank} "
            f"--main_process_ip {ADDRESS[FIRST]} --wait 10 --output_dir {output_dir}"
        )
        words = on_machine(machine, [*PYTHON, *shlex.split(doctor)])
        processes.append(start_process(words, env))
    return [wait(process) for process in processes]


@long_form
def test_of_two_machines_that_meet_one_with_another_version_is_named(
    machines: list[str], tmp_path: Path
) -> None:
    # The second machine finds the metadata of another wandb before those of the installed one.
    site = tmp_path / "site"
    metadata = site / "wandb-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")

    first, second = examine_two_machines(
        machines, tmp_path, env_of_second={"PYTHONPATH": f"{site}:{ROOT}"}
    )

    report = report_text(first)
    assert first.status == 1
    assert "wandb: " in report
    assert "(machine 1) has 0.1; " in report
    assert "ok    meeting     2 processes over gloo" in report
    assert report_lines(second.assert_ok()) == []


@long_form
def test_a_machine_that_does_not_reach_the_first_is_named_on_both(
    machines: list[str], tmp_path: Path
) -> None:
    route_of_second = ["ip", "-n", SECOND, "route"]
    blackhole = ["blackhole", f"{ADDRESS[FIRST]}/32"]
    command(*route_of_second, "add", *blackhole)
    try:
        first, second = examine_two_machines(machines, tmp_path)
    finally:
        command(*route_of_second, "delete", *blackhole)

    assert first.status == 1
    assert second.status == 1
    assert "rank 1 has not come to 10.231.0.1:29500 in 10 s" in report_text(first)
    assert "does not reach 10.231.0.1:29500" in report_text(second)
