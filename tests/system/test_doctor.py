"""`llmtrain doctor` finds what is planted, and names the machine."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from llmtrain.lab.commands.doctor import _merge_findings
from llmtrain.lab.doctor import local_checks
from llmtrain.lab.doctor.group_checks import JoinResult, Process, join_group
from tests.launching import PYTHON, ROOT, Ended, accelerate, begin, long_form, run, wait
from tests.machines import ADDRESS, FIRST, SECOND, command, on_machine
from tests.test_cli import ended


@pytest.fixture(autouse=True)
def _no_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


def alone(
    capsys: pytest.CaptureFixture, *words: str
) -> tuple[int, dict[str, list[dict[str, str]]]]:
    status, out, err = ended(capsys, "doctor", "--json", *words)
    assert not err
    found: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(out):
        found.setdefault(one["subject"], []).append(one)
    return status, found


def test_a_machine_that_can_train_has_nothing_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    status, found = alone(capsys, "--output_dir", str(tmp_path / "runs"))
    assert status == 0
    assert {
        "versions",
        "launch",
        "devices",
        "precision",
        "memory",
        "run folder",
        "wandb",
        "hub",
    } == found.keys()
    assert not [one for ones in found.values() for one in ones if one["level"] == "bad"]
    assert "torch 2." in found["versions"][0]["text"]
    assert [*tmp_path.iterdir()] == []
    status, out, _ = ended(capsys, "doctor", "--output_dir", str(tmp_path))
    assert all(line.startswith(("ok ", "look ")) for line in out.splitlines())


def test_a_version_that_is_too_old_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    true = local_checks.importlib.metadata.version
    needed = ["accelerate>=1.15; python_version >= '3'", "peft>=9; extra == 'lora'", "numpy"]
    monkeypatch.setattr(
        local_checks.importlib.metadata,
        "version",
        lambda name: "1.0" if name == "accelerate" else true(name),
    )
    monkeypatch.setattr(local_checks.importlib.metadata, "requires", lambda _: needed)
    status, found = alone(capsys)
    assert status == 1
    assert "accelerate is 1.0, but >=1.15 is needed" in found["versions"][0]["text"]
    assert "peft" not in found["versions"][0]["text"]
    assert found["versions"][0]["remedy"] == "pip install 'accelerate>=1.15'"


def test_the_variables_of_accelerate_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    said = alone(capsys)[1]["launch"][0]["text"]
    assert said == "1 process; no settings of accelerate"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    said = alone(capsys)[1]["launch"][0]["text"]
    assert said == "1 process; ACCELERATE_MIXED_PRECISION bf16"


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc/sys").is_dir(), reason="needs a folder nobody can write"
)
def test_a_folder_that_cannot_be_written_is_bad(capsys: pytest.CaptureFixture) -> None:
    status, found = alone(capsys, "--output_dir", "/proc/sys/runs")
    assert status == 1
    assert found["run folder"][0]["level"] == "bad"


def test_a_folder_in_which_no_file_can_grow_is_bad(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    """A bucket that is mounted without a cache is such a folder."""
    open_path = Path.open

    def open_new(path: Path, mode: str = "r", *arguments: object, **options: object):
        if "a" in mode and path.exists():
            raise PermissionError(1, "Operation not permitted")
        return open_path(path, mode, *arguments, **options)

    monkeypatch.setattr(Path, "open", open_new)
    status, found = alone(capsys, "--output_dir", str(tmp_path))
    assert status == 1
    (finding,) = found["run folder"]
    assert (finding["level"], "Operation not permitted" in finding["text"]) == ("bad", True)


def test_servers_that_do_not_answer_are_doubtful_and_asked_only_where_they_would_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    status, found = alone(capsys)
    assert status == 0
    assert (found["wandb"][0]["level"], found["hub"][0]["level"]) == ("doubtful", "good")
    assert "does not answer" in found["wandb"][0]["text"]
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:port")
    status, found = alone(capsys)
    assert (status, found["wandb"][0]["level"]) == (0, "doubtful")


def test_a_mac_has_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(
        local_checks.torch.accelerator,
        "current_accelerator",
        lambda **_: local_checks.torch.device("mps"),
    )
    monkeypatch.setattr(local_checks.torch.accelerator, "device_count", lambda: 1)
    _, found = alone(capsys)
    assert found["devices"][0]["text"].startswith("1 x mps, usable by one process only, ")
    assert found["precision"][0]["text"].startswith("float32")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four GPUs, the last of which is full; those whose memory is asked for."""
    asked = []

    def memory(gpu: int) -> tuple[int, int]:
        asked.append(gpu)
        return (10 if gpu == 3 else 80), 80

    monkeypatch.setattr(
        local_checks.torch.accelerator,
        "current_accelerator",
        lambda **_: local_checks.torch.device("cuda"),
    )
    monkeypatch.setattr(local_checks.torch.accelerator, "device_count", lambda: 4)
    for name, value in {
        "device_count": 4,
        "get_device_name": "H100",
        "is_bf16_supported": True,
    }.items():
        monkeypatch.setattr(local_checks.torch.cuda, name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(local_checks.torch.cuda, "mem_get_info", memory)
    return asked


def test_a_process_asks_for_the_memory_of_its_own_gpu_and_alone_of_all(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {3: [*local_checks._devices()]}
    assert asked == [0, 1, 2, 3]
    assert [one.text for one in found[3] if one.level == "doubtful"] == [
        "GPU 3 has 12% of its memory free"
    ]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        found[rank] = [*local_checks._devices()]
    assert asked == [0, 1, 2, 3] * 2
    said = [
        one.text
        for one in _merge_findings([(Process(rank, "host", 0), found[rank]) for rank in range(4)])
    ]
    assert "GPU 3 has 12% of its memory free" in said
    assert len(said) == len(set(said)) == len(found[0]) + 1


@pytest.mark.parametrize(
    ("processes", "on_cpu", "backend"), [(4, "", "nccl"), (5, "", "gloo"), (4, "true", "gloo")]
)
def test_processes_meet_where_those_of_a_run_would(
    processes, on_cpu, backend, asked, monkeypatch, capsys
) -> None:
    world = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "RANK": "0",
        "LOCAL_RANK": "0",
    }
    for name, value in (world | {"MASTER_ADDR": "::1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ACCELERATE_USE_CPU", on_cpu)
    monkeypatch.setattr("os._exit", sys.exit)

    def join_group(backend: str, timeout: float) -> JoinResult:
        return JoinResult([local_checks.Finding("bad", "meeting", backend)], is_complete=False)

    monkeypatch.setattr("llmtrain.lab.doctor.group_checks.join_group", join_group)
    _, found = alone(capsys)
    assert found["meeting"][0]["text"] == backend
    bad = [one["text"] for one in found["launch"] if one["level"] == "bad"]
    assert any("5 processes were started on a machine with 4 GPUs" in said for said in bad) == (
        processes == 5
    )


def test_a_port_that_is_in_use_is_named(monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        names = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in names.items():
            monkeypatch.setenv(name, str(value))
        result = join_group("gloo", timeout=5)
    (finding,) = result.findings
    assert f"port {port} of " in finding.text
    assert finding.text.endswith("is in use")
    assert "--main_process_port" in finding.remedy


def told(done: Ended) -> str:
    return "".join(
        line + "\n" for line in done.out.splitlines() if line[:4] in ("ok  ", "look", "BAD ")
    )


def test_two_processes_are_told_of_once_with_the_settings_of_their_launcher(tmp_path: Path) -> None:
    flags = ["--multi_gpu", "--mixed_precision", "no", "-m", "llmtrain", "doctor"]
    words = accelerate("cpu_ddp", *flags)
    done = run([*words, "--output_dir", str(tmp_path)]).assert_ok()
    said = told(done)
    assert said.count("versions") == 1
    assert "2 processes; ACCELERATE_" in said
    assert "ACCELERATE_MIXED_PRECISION no" in said
    assert "2 processes over gloo" in said
    assert "MB/s" in said
    assert "is visible to all processes" in said
    assert "BAD" not in said


def on_both(machines: list[str], *words: str, env: dict[str, str] | None = None) -> list[Ended]:
    """The command on each machine; ``env`` is the second's."""
    processes = []
    for rank, name in enumerate(machines):
        where = [
            "--num_machines",
            "2",
            "--machine_rank",
            str(rank),
            "--main_process_ip",
            ADDRESS[FIRST],
            "--wait",
            "10",
        ]
        variables = {"GLOO_SOCKET_IFNAME": "cable0", **((env or {}) if rank else {})}
        processes.append(
            begin(
                on_machine(name, [*PYTHON, "-m", "llmtrain", "doctor", *where, *words]),
                env=variables,
            )
        )
    return [wait(process) for process in processes]


@long_form
def test_two_machines_that_can_train_are_told_so_once(machines: list[str], tmp_path: Path) -> None:
    first, second = on_both(machines, "--output_dir", str(tmp_path))
    said = told(first.assert_ok())
    assert "BAD" not in said
    assert said.count("versions") == 1
    assert "2 processes over gloo" in said
    assert told(second.assert_ok()) == ""


def test_a_machine_with_another_version_and_another_folder_is_named(
    machines: list[str], tmp_path: Path
) -> None:
    """Of a package that stands before the true one on the path of the second machine."""
    other = tmp_path / "site" / "wandb-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: wandb\nVersion: 0.1\n")
    first, _ = on_both(
        machines, "--output_dir", str(tmp_path), env={"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    )
    assert first.status == 1
    bad = [
        line for line in told(first).splitlines() if line.startswith("BAD") and "wandb: " in line
    ]
    assert any("(machine 1) has 0.1; the others have" in line for line in bad), told(first)


@long_form
def test_a_machine_whose_way_is_closed_is_named_on_both_sides(
    machines: list[str], tmp_path: Path
) -> None:
    route = ("blackhole", f"{ADDRESS[FIRST]}/32")
    command("ip", "-n", SECOND, "route", "add", *route)
    try:
        first, second = on_both(machines, "--output_dir", str(tmp_path))
    finally:
        command("ip", "-n", SECOND, "route", "delete", *route)
    assert (first.status, second.status) == (1, 1)
    assert "rank 1 (machine 1) has not come to 10.231.0.1:29500 in 10 s" in told(first)
    assert "does not reach 10.231.0.1:29500" in told(second)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--num_machines", "2"], "--main_process_ip"),
        (["--num_machines", "2", "--machine_rank", "2"], "from 0 to 1"),
    ],
)
def test_machines_that_are_not_told_apart_are_one_line(words: list[str], says: str, capsys) -> None:
    more = ["--main_process_ip", "10.0.0.1"] if "--machine_rank" in words else []
    status, out, err = ended(capsys, "doctor", *words, *more)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err
