import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import psutil
import pytest
import torch

from llmtrain.errors import UserError
from llmtrain.launching import accelerator as start
from llmtrain.launching import launch_checks, process
from llmtrain.launching.launch_checks import check_launch
from llmtrain.launching.launcher import Launched
from llmtrain.parallel.config import ParallelConfig
from llmtrain.parallel.sharding import Sharding


@pytest.mark.parametrize(
    ("chosen", "gpu", "expected"),
    [
        (None, True, "bf16"),
        (None, False, "no"),
        ("no", True, "no"),
        ("fp16", True, "fp16"),
        ("bf16", False, "bf16"),
    ],
)
def test_bf16_is_the_default_of_a_gpu_that_has_it(
    chosen: str | None, gpu: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start.torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(start.torch.cuda, "is_bf16_supported", lambda including_emulation: gpu)
    assert start._precision(chosen, cpu=not gpu, sharded=False) == expected


@pytest.mark.parametrize(("sharded", "expected"), [(False, "fp16"), (True, "no")])
def test_a_gpu_that_emulates_bf16_does_not_use_it(
    sharded: bool, expected: str, monkeypatch
) -> None:
    monkeypatch.setattr(start.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        start.torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert start._precision(None, cpu=False, sharded=sharded) == expected


def test_threads_are_shared_unless_a_number_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    before = start.torch.get_num_threads()
    monkeypatch.setattr(start.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # what a launcher sets where nobody said anything
    monkeypatch.setattr(start, "_SHARED_THREADS", "LLMTRAIN_SHARED_THREADS_OF_A_TEST")
    assert start._share_threads(None) == 2
    for bitwise, threads in (
        (True, 1),
        (False, 2),
    ):  # other runs of one process, which find what the last one wrote
        written = int(start.os.environ["OMP_NUM_THREADS"])
        assert start._share_threads(written, bitwise) == threads
    assert start._share_threads(3) == 3
    assert start._share_threads(5) == 5
    assert start.torch.get_num_threads() == 5
    start.torch.set_num_threads(before)


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the variables of a single process whose address accelerate, or the user, has set."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "default")


def pretend(monkeypatch: pytest.MonkeyPatch, by_launcher: bool, processes: int | None) -> None:
    launched = Launched(
        by_launcher=by_launcher, precision=None, threads=None, on_cpu=False, processes=processes
    )
    monkeypatch.setattr(launch_checks, "launched_by", lambda: launched)


@pytest.mark.usefixtures("address")
def test_two_processes_asked_for_and_one_started_stops_with_the_command_that_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, by_launcher=True, processes=2)
    says = r"^2 processes were requested, .* accelerate launch --multi_gpu --num_processes 2 "
    with pytest.raises(UserError, match=says) as visible:
        check_launch()
    assert "MASTER_ADDR" not in str(visible.value)

    pretend(monkeypatch, by_launcher=False, processes=None)  # behind a wrapper script
    says = (
        r"^several processes were requested, .*; for one process, unset MASTER_ADDR; for several, "
    )
    with pytest.raises(UserError, match=says):
        check_launch()
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    check_launch()


@pytest.mark.usefixtures("address")
def test_one_process_with_an_address_that_the_user_exported_is_fine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for processes in (None, 1):
        pretend(monkeypatch, by_launcher=True, processes=processes)
        check_launch()

    monkeypatch.delenv("ACCELERATE_DYNAMO_MODE")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # by the user of plain python
    pretend(monkeypatch, by_launcher=False, processes=None)
    check_launch()


def test_a_world_size_that_no_launcher_set_is_one_line(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        UserError, match="WORLD_SIZE is 2, but RANK, MASTER_ADDR or MASTER_PORT is not set; unset"
    ):
        check_launch()


def test_a_command_to_use_instead_keeps_its_quotes(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setattr(launch_checks.sys, "argv", ["recipes/gpt.py", "--run_name", "my run"])
    with pytest.raises(UserError, match=r"multi_gpu.yaml recipes/gpt.py --run_name 'my run'$"):
        check_launch()


@pytest.mark.parametrize(
    ("processes", "devices", "kind"), [(2, 1, "cuda"), (2, 2, "cuda"), (2, 1, "mps")]
)
def test_more_processes_than_gpus_stop_and_on_a_mac_use_the_cpu(
    processes, devices, kind, monkeypatch
) -> None:
    monkeypatch.setattr(
        start.torch.accelerator, "current_accelerator", lambda **_: start.torch.device(kind)
    )
    monkeypatch.setattr(start.torch.accelerator, "device_count", lambda: devices)
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    if (kind, devices) == ("cuda", 1):
        with pytest.raises(
            UserError, match=r"2 processes were started on a machine with 1 GPU; start one per GPU"
        ):
            start.use_cpu(is_chosen=False)
    else:
        assert start.use_cpu(is_chosen=False) is (kind == "mps")
    assert start.use_cpu(is_chosen=True)


def test_fp16_on_a_cpu_is_refused() -> None:
    with pytest.raises(UserError, match="fp16 needs a GPU"):
        start._check_precision("fp16", True, None, False)


def test_what_sharding_does_not_do_is_refused() -> None:
    with pytest.raises(UserError, match="fp16 is not supported for sharded models"):
        start._check_precision("fp16", False, Sharding(1, 2), False)
    with pytest.raises(UserError, match="--bitwise is not supported for sharded models"):
        start._check_precision("no", True, Sharding(1, 2), True)


def test_accumulation_in_the_accelerate_config_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    with pytest.raises(UserError, match="gradient_accumulation_steps to 4"):
        check_launch()


@pytest.mark.parametrize("name", ["DEEPSPEED", "MEGATRON_LM"])
def test_what_the_loop_does_not_support_is_refused_with_a_command(name, monkeypatch) -> None:
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "true")
    with pytest.raises(
        UserError,
        match=r"not support yet; use: accelerate launch --config_file accelerate_configs/",
    ):
        check_launch()
    monkeypatch.setenv(f"ACCELERATE_USE_{name}", "false")
    check_launch()


def test_a_group_of_another_size_than_the_launcher_started_is_refused(monkeypatch) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    alone = SimpleNamespace(num_processes=1)
    monkeypatch.setattr(start, "TrainingAccelerator", lambda **_: alone)
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="each would train alone"):
        start.start_accelerator()


def test_another_run_of_this_process_may_have_another_precision(accelerator, monkeypatch) -> None:
    assert accelerator.mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert start.start_accelerator().mixed_precision == "bf16"


@pytest.fixture
def arithmetic(monkeypatch: pytest.MonkeyPatch):
    """Undo the process-wide settings of arithmetic after a test."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("accelerator", "arithmetic")
def test_each_start_sets_precision_and_determinism_whatever_an_earlier_run_had(monkeypatch) -> None:
    def settings_after_start(bitwise: bool) -> tuple[str, bool, str | None]:
        start.start_accelerator(ParallelConfig(bitwise=bitwise))
        return (
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        )

    monkeypatch.setattr(start, "use_cpu", lambda is_chosen: False)
    for _ in range(2):
        assert settings_after_start(bitwise=False) == ("high", False, None)
        assert settings_after_start(bitwise=True) == ("highest", True, ":4096:8")

    monkeypatch.setattr(start, "use_cpu", lambda is_chosen: True)
    assert settings_after_start(bitwise=False) == ("highest", False, None)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert settings_after_start(bitwise=False) == ("highest", False, ":16:8")


RECIPE = """
from llmtrain.launching.process import launch, leave_group

class Result:
    def show(self) -> None: print("shown")

def main() -> object:
    leave_group()
    leave_group()
    print("made")
    if {fails}: raise SystemExit(3)
    return Result()

launch(main)
"""


@pytest.mark.parametrize(
    ("fails", "status", "out"), [(False, 0, "made\nshown\n"), (True, 3, "made\n")]
)
def test_what_a_recipe_returns_is_shown_when_it_ended_well(
    fails: bool, status: int, out: str
) -> None:
    command = [sys.executable, "-c", RECIPE.format(fails=fails)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (status, out), done.stderr


def test_a_process_knows_for_how_long_it_has_existed(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = process.seconds_since_start()
    assert 0 < seconds < 3600
    monkeypatch.setattr(process.time, "time", lambda: psutil.Process().create_time() + 100)
    assert process.seconds_since_start() == pytest.approx(100)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    assert process.seconds_since_start() == 0
