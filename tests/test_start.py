"""How a process starts a run: the launcher, the device, the precision and the threads."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import AcceleratorState
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed import TCPStore

from llmtrain.devices import cpu_cores
from llmtrain.errors import UserError
from llmtrain.launching import accelerator as start
from llmtrain.launching import process
from llmtrain.launching.launch_request import check_launch
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.ranks import Sharding
from tests.launching import accelerate


def set_variables(monkeypatch: pytest.MonkeyPatch, **variables: object) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


# --- precision

DEFAULT_AFTER_NO = " (default; for float32: --mixed_precision no after the recipe)"


@pytest.mark.parametrize(
    ("flag", "launcher", "device", "precision", "remark"),
    [
        ("auto", None, "a GPU with bfloat16", "bf16", " (default)"),
        ("auto", "", "a GPU that emulates it", "fp16", " (default)"),
        ("auto", None, "shards on such a GPU", "no", ""),
        ("auto", "no", "a CPU", "no", ""),
        ("auto", "no", "a GPU with bfloat16", "bf16", DEFAULT_AFTER_NO),
        ("auto", "fp16", "a GPU with bfloat16", "fp16", ""),
        ("auto", "bf16", "a CPU", "bf16", ""),
        ("no", "bf16", "a GPU with bfloat16", "no", " (the launcher asked for bf16)"),
        ("bf16", "fp16", "a CPU", "bf16", " (the launcher asked for fp16)"),
        ("fp16", "fp8", "a GPU with bfloat16", "fp16", " (the launcher asked for fp8)"),
        ("bf16", "no", "a CPU", "bf16", ""),
    ],
)
def test_the_precision_is_that_of_the_flag_or_of_the_launcher_or_fits_the_device(
    flag: str,
    launcher: str | None,
    device: str,
    precision: str,
    remark: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return including_emulation or device == "a GPU with bfloat16"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: device != "a CPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    if launcher is not None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)

    chosen = start._choose_precision(
        flag, cpu=device == "a CPU", is_sharded=device.startswith("shards")
    )
    assert chosen == (precision, remark)


@pytest.mark.parametrize(
    ("precision", "cpu", "sharding", "bitwise", "named"),
    [
        ("fp8", False, None, False, "the launcher asks for the mixed precision fp8, which is not"),
        ("fp16", True, None, False, "add --mixed_precision bf16 or no after the recipe"),
        ("fp16", False, Sharding(1, 2), False, "add --mixed_precision bf16 or no after the recipe"),
        ("no", True, Sharding(1, 2), True, "--bitwise"),
    ],
)
def test_an_unsupported_precision_is_refused(
    precision: str, cpu: bool, sharding: Sharding | None, bitwise: bool, named: str
) -> None:
    with pytest.raises(UserError, match=named):
        start._check_precision(precision, cpu, sharding=sharding, bitwise=bitwise)


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo the arithmetic settings of this process after a test."""
    # Recorded, so that the end of the test undoes what starts do.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


def arithmetic_of_start(*, on_gpu: bool, bitwise: bool) -> tuple[str, bool]:
    """Return the precision of products and the determinism after a start."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(start, "use_cpu", lambda: not on_gpu)
        start.start_accelerator(ParallelConfig(bitwise=bitwise))
    return torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("accelerator", "arithmetic")
def test_each_start_sets_the_arithmetic_anew() -> None:
    for _ in range(2):
        assert arithmetic_of_start(on_gpu=True, bitwise=False) == ("high", False)
        assert arithmetic_of_start(on_gpu=True, bitwise=True) == ("highest", True)
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert arithmetic_of_start(on_gpu=False, bitwise=False) == ("highest", False)


@pytest.mark.usefixtures("accelerator", "arithmetic")
def test_a_start_keeps_the_workspace_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    arithmetic_of_start(on_gpu=True, bitwise=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_a_second_run_of_a_process_may_have_another_precision(
    accelerator: start.TrainingAccelerator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert accelerator.mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    second = start.start_accelerator(ParallelConfig(mixed_precision="bf16"))
    assert second.mixed_precision == "bf16"
    assert "bf16 (the launcher asked for fp16)" in capsys.readouterr().out


# --- threads


@pytest.mark.parametrize(
    ("requested", "bitwise", "threads"),
    [(None, False, 2), (None, True, 1), (5, False, 5), (5, True, 5)],
)
def test_processes_share_the_cores_of_a_machine_unless_a_flag_says_otherwise(
    requested: int | None, bitwise: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "cpu_cores", cpu_cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    # As torchrun sets them, if the user sets nothing.
    set_variables(monkeypatch, LOCAL_WORLD_SIZE=4, OMP_NUM_THREADS=1)

    parallel = ParallelConfig(threads=requested, bitwise=bitwise)
    before = torch.get_num_threads()
    try:
        assert start._set_up_process(parallel, cpu=True) == threads
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# --- processes


# Variables that accelerate sets if it is asked for several processes.
SEVERAL = {"MASTER_ADDR": "127.0.0.1", "ACCELERATE_DYNAMO_MODE": "default"}


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Check a launch with these variables."""

    def check_with(**variables: object) -> None:
        set_variables(monkeypatch, **variables)
        check_launch()

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "argv", ["recipes/gpt.py", "--run_name", "my run"])
    return check_with


def test_processes_that_were_all_started_are_accepted(check: Callable[..., None]) -> None:
    check(**SEVERAL, WORLD_SIZE=2, RANK=0, MASTER_PORT=1)


def test_plain_python_with_exported_variables_may_start(check: Callable[..., None]) -> None:
    # Only accelerate sets ACCELERATE_DYNAMO_MODE.
    check(MASTER_ADDR="127.0.0.1", ACCELERATE_MIXED_PRECISION="bf16")
    check(ACCELERATE_USE_DEEPSPEED="false")


@pytest.mark.parametrize(
    ("launch", "remedy"),
    [
        (
            SEVERAL,
            "for one process, unset MASTER_ADDR; for several, use: accelerate launch --multi_gpu "
            "--num_processes 2 recipes/gpt.py --run_name 'my run'",
        ),
        ({"WORLD_SIZE": 2}, "unset WORLD_SIZE"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "the distributed_type DEEPSPEED, which is not supported",
        ),
        (
            {"ACCELERATE_USE_MEGATRON_LM": "true"},
            "the distributed_type MEGATRON_LM, which is not supported",
        ),
    ],
)
def test_a_launch_that_is_not_as_the_user_asked_is_refused_with_what_to_do(
    launch: dict[str, Any], remedy: str, check: Callable[..., None]
) -> None:
    with pytest.raises(UserError, match=re.escape(remedy)):
        check(**launch)


def test_a_process_group_without_all_launched_processes_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    single = SimpleNamespace(num_processes=1, process_index=0)
    monkeypatch.setattr(start, "TrainingAccelerator", lambda **_: single)
    set_variables(monkeypatch, WORLD_SIZE=2, RANK=0, MASTER_ADDR="::1", MASTER_PORT=1)

    with pytest.raises(
        UserError, match="rank 0 of 1, but the environment says RANK 0 and WORLD_SIZE 2"
    ):
        start.start_accelerator()


# --- processes that the launcher has restarted


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    """Make the store of a launcher with two processes, and set the variables of the first one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    set_variables(
        monkeypatch,
        RANK=0,
        WORLD_SIZE=2,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=store.port,
        TORCHELASTIC_USE_AGENT_STORE=True,
    )
    return store


def test_a_restarted_process_finds_no_addresses_of_earlier_attempts(
    agent_store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[dict[str, Any]] = []
    join = lambda backend, **arguments: groups.append(arguments)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "init_process_group", join)
    agent_store.set("address of rank 1", "of the first start")

    for attempt in (0, 1, 2):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        start._join_group_after_restart("gloo", timedelta(seconds=20))
        assert len(groups) == attempt, "accelerate joins the group of the first start"
        for group in groups[-1:]:
            assert (group["rank"], group["world_size"]) == (0, 2)
            assert not group["store"].check(["address of rank 1"])
            group["store"].set("address of rank 1", f"of attempt {attempt}")


# --- devices


def pretend_devices(monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    device = torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("kind", "count", "chosen", "uses_cpu"),
    [
        pytest.param("cuda", 2, "False", False, id="a GPU each"),
        pytest.param("mps", 1, "False", True, id="a Mac, whose GPU takes one process"),
        pytest.param("cuda", 1, "True", True, id="the user chose the CPU"),
    ],
)
def test_two_processes_use_gpus_if_there_is_one_for_each(
    kind: str, count: int, chosen: str, uses_cpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_variables(monkeypatch, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2, ACCELERATE_USE_CPU=chosen)
    pretend_devices(monkeypatch, kind, count)
    assert start.use_cpu() is uses_cpu

    monkeypatch.delenv("ACCELERATE_USE_CPU")
    pretend_devices(monkeypatch, "cuda", count=1)
    with pytest.raises(UserError, match="--num_processes"):
        start.use_cpu()


def test_cpu_ddp_hides_the_gpus_from_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [*accelerate("cpu_ddp")[2:], "recipes/gpt.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(flags))
    exported = prepare_multi_gpu_env(arguments)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported["CUDA_VISIBLE_DEVICES"])
    assert torch.cuda._parse_visible_devices() == []


# --- the process of a recipe

RECIPE = """
from llmtrain.launching.process import launch, leave_group

class Result:
    def show(self) -> None: print("shown")

def main() -> object:
    leave_group()
    leave_group()
    print("trained")
    if {fails}: raise SystemExit(3)
    return Result()

launch(main)
"""


@pytest.mark.parametrize(
    ("fails", "status", "out"), [(False, 0, "trained\nshown\n"), (True, 3, "trained\n")]
)
def test_the_result_of_a_recipe_is_shown_if_it_succeeds(fails: bool, status: int, out: str) -> None:
    command = [sys.executable, "-c", RECIPE.format(fails=fails)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (status, out), ended.stderr


def test_the_age_of_a_process_is_that_of_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start_time = psutil.Process().create_time()
    monkeypatch.setattr(process.time, "time", lambda: start_time + 100)
    assert process.seconds_since_start() == pytest.approx(100)

    # A notebook was started long before the run.
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert process.seconds_since_start() == 0
