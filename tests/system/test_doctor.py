"""`llmtrain doctor` finds planted faults, and names the machine that has them."""

import itertools
import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from llmtrain.lab.commands.doctor import _merge_findings
from llmtrain.lab.doctor import local_checks
from llmtrain.lab.doctor.group_checks import JoinResult, Process, join_group
from llmtrain.lab.doctor.local_checks import Finding
from tests.command_line import run_cli
from tests.launching import PYTHON, ROOT, Ended, accelerate, long_form, run, start_process, wait
from tests.machines import ADDRESS, FIRST, SECOND, command, on_machine

SUBJECTS = {
    "versions",
    "launch",
    "devices",
    "precision",
    "memory",
    "run folder",
    "wandb",
    "hub",
}


class Report(NamedTuple):
    """The outcome of `llmtrain doctor --json`."""

    status: int
    findings: dict[str, list[dict[str, str]]]  # by subject

    def first(self, subject: str) -> dict[str, str]:
        return self.findings[subject][0]

    def bad_texts(self, subject: str | None = None) -> list[str]:
        """Return the texts of the bad findings about a subject, or about all of them."""
        if subject is None:
            findings = [*itertools.chain.from_iterable(self.findings.values())]
        else:
            findings = self.findings[subject]
        return [finding["text"] for finding in findings if finding["level"] == "bad"]


def examine(capsys: pytest.CaptureFixture[str], flags: str = "") -> Report:
    """Examine this machine with one process."""
    status, out, err = run_cli(capsys, "doctor", "--json", *shlex.split(flags))
    assert not err

    findings: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(out):
        findings.setdefault(finding["subject"], []).append(finding)
    return Report(status, findings)


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


# --- one machine


def test_a_machine_that_can_train_has_no_bad_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = examine(capsys, f"--output_dir {tmp_path}/runs")

    assert report.status == 0
    assert report.findings.keys() == SUBJECTS
    assert report.bad_texts() == []
    assert "torch 2." in report.first("versions")["text"]
    assert [*tmp_path.iterdir()] == []


def test_without_json_each_finding_is_one_line_that_begins_with_its_level(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run_cli(capsys, "doctor", "--output_dir", str(tmp_path))

    assert status == 0
    lines = out.splitlines()
    assert len(lines) >= len(SUBJECTS)
    assert all(line.startswith(("ok ", "look ")) for line in lines)


def test_a_version_that_is_too_old_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = local_checks.importlib.metadata
    installed_version = metadata.version
    requirements = ["accelerate>=1.15; python_version >= '3'", "peft>=9; extra == 'lora'", "numpy"]

    def version(name: str) -> str:
        return "1.0" if name == "accelerate" else installed_version(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda package: requirements)

    report = examine(capsys)

    assert report.status == 1
    finding = report.first("versions")
    assert "accelerate is 1.0, but >=1.15 is needed" in finding["text"]
    assert "peft" not in finding["text"], "the extra is not installed"
    assert finding["remedy"] == "pip install 'accelerate>=1.15'"


def test_the_variables_of_accelerate_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finding = examine(capsys).first("launch")
    assert finding["text"] == "1 process; no settings of accelerate"

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    finding = examine(capsys).first("launch")
    assert finding["text"] == "1 process; ACCELERATE_MIXED_PRECISION bf16"


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/sys").is_dir(),
    reason="needs a folder that not even root can write to",
)
def test_a_run_folder_that_cannot_be_written_is_bad(capsys: pytest.CaptureFixture[str]) -> None:
    report = examine(capsys, "--output_dir /proc/sys/runs")

    assert report.status == 1
    assert report.first("run folder")["level"] == "bad"


def test_a_run_folder_in_which_no_file_can_grow_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A mounted bucket without a cache refuses to append to a file."""
    open_path = Path.open

    def refuse_to_append(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if "a" in mode and path.exists():
            raise PermissionError(1, "Operation not permitted")
        return open_path(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse_to_append)

    report = examine(capsys, f"--output_dir {tmp_path}")

    assert report.status == 1
    [finding] = report.findings["run folder"]
    assert finding["level"] == "bad"
    assert "Operation not permitted" in finding["text"]


@pytest.mark.parametrize(
    ("address", "text"),
    [
        pytest.param("http://127.0.0.1:9", "does not answer", id="no server"),
        pytest.param("http://127.0.0.1:port", "", id="no address"),
    ],
)
def test_a_tracker_that_does_not_answer_is_doubtful_and_the_offline_hub_is_not_asked(
    address: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", address)

    report = examine(capsys)

    assert report.status == 0
    assert report.first("wandb")["level"] == "doubtful"
    assert text in report.first("wandb")["text"]
    assert report.first("hub")["level"] == "good"


def test_a_mac_has_a_gpu_for_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mps = local_checks.torch.device("mps")
    accelerator = local_checks.torch.accelerator
    monkeypatch.setattr(accelerator, "current_accelerator", lambda **_: mps)
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)

    report = examine(capsys)

    assert report.first("devices")["text"].startswith("1 x mps, usable by one process only, ")
    assert report.first("precision")["text"].startswith("float32")


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
    monkeypatch.setattr(cuda, "is_bf16_supported", lambda *_, **__: True)
    monkeypatch.setattr(cuda, "mem_get_info", free_and_total_memory)
    return gpus


def doubtful_texts(findings: list[Finding]) -> list[str]:
    return [finding.text for finding in findings if finding.level == "doubtful"]


def test_a_single_process_reads_the_memory_of_all_gpus(examined_gpus: list[int]) -> None:
    findings = [*local_checks._devices()]

    assert examined_gpus == [0, 1, 2, 3]
    assert doubtful_texts(findings) == ["GPU 3 has 12% of its memory free"]


def test_each_of_several_processes_reads_the_memory_of_its_own_gpu(
    examined_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    findings_by_process = []
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        process = Process(rank, "host", machine=0)
        findings_by_process.append((process, [*local_checks._devices()]))

    merged = _merge_findings(findings_by_process)

    assert examined_gpus == [0, 1, 2, 3]
    assert doubtful_texts(merged) == ["GPU 3 has 12% of its memory free"]
    # The report has the findings of one process, each once, and the one about the full GPU.
    _, findings_of_one_process = findings_by_process[0]
    assert {*merged} > {*findings_of_one_process}
    assert len(merged) == len(findings_of_one_process) + 1


def test_a_finding_of_all_machines_is_reported_once_and_any_other_with_its_machine() -> None:
    same_versions = Finding("good", "versions", "torch 2.11")
    first_memory = Finding("good", "memory", "64 GiB")
    second_memory = Finding("doubtful", "memory", "8 GiB")
    findings_by_process = [
        (Process(0, "node-a", machine=0), [same_versions, first_memory]),
        (Process(1, "node-b", machine=1), [same_versions, second_memory]),
    ]

    merged = _merge_findings(findings_by_process)

    assert merged == [
        same_versions,
        Finding("good", "memory", "node-a (machine 0): 64 GiB"),
        Finding("doubtful", "memory", "node-b (machine 1): 8 GiB"),
    ]


def test_only_findings_about_devices_are_taken_from_the_later_processes_of_a_machine() -> None:
    wandb = Finding("good", "wandb", "answers in 0.1 s")
    slower_wandb = Finding("good", "wandb", "answers in 0.2 s")
    full_gpu = Finding("doubtful", "devices", "GPU 1 has 12% of its memory free")
    findings_by_process = [
        (Process(0, "node-a", machine=0), [wandb]),
        (Process(1, "node-a", machine=0), [slower_wandb, full_gpu]),
    ]

    assert _merge_findings(findings_by_process) == [wandb, full_gpu]


def join_nobody(backend: str, timeout: float) -> JoinResult:
    """Report the backend instead of joining a process group."""
    return JoinResult([Finding("bad", "meeting", backend)], is_complete=False)


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
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "::1")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
    monkeypatch.setattr("os._exit", sys.exit)
    monkeypatch.setattr("llmtrain.lab.doctor.group_checks.join_group", join_nobody)

    report = examine(capsys)

    assert report.first("meeting")["text"] == backend
    too_many = f"{processes} processes were started on a machine with 4 GPUs"
    if has_gpus_for_all:
        assert not any(too_many in text for text in report.bad_texts())
    else:
        assert any(too_many in text for text in report.bad_texts("launch"))


def test_a_port_that_is_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        result = join_group("gloo", timeout=5)

    [finding] = result.findings
    assert f"port {port} of " in finding.text
    assert finding.text.endswith("is in use")
    assert "--main_process_port" in finding.remedy


# --- several processes and machines


def report_lines(process: Ended) -> list[str]:
    """Return the findings in the output of a process, without messages of other programs."""
    lines = process.out.splitlines()
    return [line for line in lines if line.startswith(("ok  ", "look", "BAD "))]


def report_text(process: Ended) -> str:
    return "\n".join(report_lines(process))


def test_two_processes_make_one_report_with_the_settings_of_their_launcher(tmp_path: Path) -> None:
    doctor = f"--multi_gpu --mixed_precision no -m llmtrain doctor --output_dir {tmp_path}"

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
def test_two_machines_that_can_train_make_one_report(machines: list[str], tmp_path: Path) -> None:
    first, second = examine_two_machines(machines, tmp_path)

    report = report_text(first.assert_ok())
    assert "BAD" not in report
    assert report.count("versions") == 1
    assert "2 processes over gloo" in report
    assert report_lines(second.assert_ok()) == []


def test_a_machine_with_another_version_is_named(machines: list[str], tmp_path: Path) -> None:
    # The second machine finds the metadata of another wandb before those of the installed one.
    site = tmp_path / "site"
    metadata = site / "wandb-0.1.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")

    first, _ = examine_two_machines(
        machines, tmp_path, env_of_second={"PYTHONPATH": f"{site}:{ROOT}"}
    )

    assert first.status == 1
    bad_lines = [line for line in report_lines(first) if line.startswith("BAD")]
    differs = "(machine 1) has 0.1; the others have"
    assert any("wandb: " in line and differs in line for line in bad_lines), report_text(first)


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
    missing = "rank 1 (machine 1) has not come to 10.231.0.1:29500 in 10 s"
    assert missing in report_text(first)
    assert "does not reach 10.231.0.1:29500" in report_text(second)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param("--num_machines 2", "--main_process_ip", id="without rank and address"),
        pytest.param(
            "--num_machines 2 --machine_rank 2 --main_process_ip 10.0.0.1",
            "from 0 to 1",
            id="rank out of range",
        ),
    ],
)
def test_an_incomplete_description_of_the_machines_is_an_error_of_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_cli(capsys, "doctor", *shlex.split(flags))

    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert message in err
