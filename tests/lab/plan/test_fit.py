"""A plan finds the cheapest flags with which a run fits."""

import functools
import shlex
import socket
from pathlib import Path

import pytest

from llmtrain.lab.plan.fit import Fit, changed_flags, fit_into
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import Plan, plan_without_layouts
from tests.launching import BIN, FINETUNE, GPT, long_form, read_json, start_process, wait

MODEL = (
    "--n_layer 8 --n_head 4 --n_embd 256 --block_size 128 --tokenizer byte "
    "--global_batch_size 4 --per_device_train_batch_size 2 --max_train_samples 100"
)
LLAMA = (
    "--from_config llama --tokenizer byte --max_length 512 --max_train_samples 100 "
    "--config_overrides "
    "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=128"
)
NOTHING = 1  # byte


@functools.cache
def plan_of(request: PlanRequest) -> Plan:
    return plan_without_layouts(request._replace(flags=[*request.flags]))


def fit(limit: float, flags: str = MODEL, recipe: str = GPT, processes: int = 1) -> Fit:
    """Return the cheapest flags for this many bytes of a GPU."""
    request = PlanRequest(recipe, tuple(flags.split()), processes=processes, device="h100-80gb")
    return fit_into(limit, plan_of(request), request)


def test_flags_with_which_a_run_fits_are_not_changed() -> None:
    fitting = fit(1e9)

    assert fitting.fits
    assert changed_flags(fitting.chosen) == {}
    assert fitting.too_large is None
    assert fitting.command == f"python {GPT} {MODEL}"


@pytest.mark.parametrize(("flag", "planned"), [("auto", "bf16"), ("fp16", "bf16"), ("no", "no")])
def test_the_precision_is_that_of_the_recipes_flag(flag: str, planned: str) -> None:
    flags = f"{MODEL} --mixed_precision {flag}"
    request = PlanRequest(GPT, tuple(flags.split()), device="h100-80gb")

    assert plan_of(request).memory.recipe.precision == planned
    assert fit(1e9, flags).command == f"python {GPT} {flags}"


@long_form
def test_less_memory_costs_seconds_before_it_changes_the_arithmetic() -> None:
    """Each limit is a byte less than the last flags need."""
    costs = []
    fitting = fit(1e9, LLAMA, FINETUNE)
    assert changed_flags(fitting.chosen) == {}
    while fitting.fits:
        assert fitting.chosen.bytes.total <= fitting.limit
        assert fitting.too_large is None or fitting.too_large.bytes.total > fitting.limit
        flags = changed_flags(fitting.chosen)
        costs.append(("dtype" in flags, "optim" in flags, round(fitting.chosen.step.total, 9)))
        fitting = fit(fitting.chosen.bytes.total - 1, LLAMA, FINETUNE)

    assert costs == sorted(costs)
    assert costs[0][:2] == (False, False)
    assert costs[-1][:2] == (True, True)


def test_the_flags_are_those_that_save_memory() -> None:
    assert changed_flags(fit(NOTHING, LLAMA, FINETUNE).chosen) == {
        "gradient_checkpointing": "auto",
        "per_device_train_batch_size": "1",
        "dtype": "bfloat16",
        "optim": "adamw_torch_8bit",
    }


def test_flags_that_the_user_has_set_are_not_changed() -> None:
    flags = f"{MODEL} --dtype float32 --optim adamw --gradient_checkpointing"

    smallest = fit(NOTHING, flags)

    assert "optim" not in changed_flags(fit(NOTHING).chosen), (
        "Muon, the default, is another algorithm"
    )
    assert not smallest.fits
    assert changed_flags(smallest.chosen) == {}
    assert smallest.command == f"python {GPT} {flags}"


@pytest.mark.parametrize(
    ("limit", "layout", "config"), [(1e9, "HSDP 2 x 2", "hsdp.yaml"), (8e7, "FSDP2", "fsdp2.yaml")]
)
def test_the_command_has_the_config_of_the_layout(limit: float, layout: str, config: str) -> None:
    """Two machines of two processes. HSDP sends least between them, and FSDP2 needs least memory."""
    request = PlanRequest(
        GPT,
        tuple(MODEL.split()),
        processes=4,
        device="h100-80gb",
        per_machine=2,
        link="1Gbit",
    )

    fitting = fit_into(limit, plan_of(request), request)

    assert fitting.fits
    assert fitting.chosen.name == layout
    words = shlex.split(fitting.command)
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert Path(words[3]).name == config
    assert words[4:6] == ["--num_processes", "4"]
    assert "--num_machines 2 --machine_rank 0 --main_process_ip ADDRESS" in fitting.command


@long_form
def test_the_command_of_several_machines_runs_on_two_launchers(
    text_file: Path, tmp_path: Path
) -> None:
    flags = f"{MODEL} --dataset {text_file} --max_steps 2 --report_to none --output_dir {tmp_path}"
    request = PlanRequest(
        GPT, tuple(flags.split()), processes=4, device="h100-80gb", per_machine=2, link="1Gbit"
    )
    fitting = fit_into(1e9, plan_of(request), request)
    assert (fitting.chosen.name, fitting.machines) == ("HSDP 2 x 2", 2)

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    launches = []
    for machine in range(2):
        command = fitting.command.replace("ADDRESS", "127.0.0.1").replace("29500", str(port))
        command = command.replace("--machine_rank 0", f"--machine_rank {machine}")
        launches.append(start_process([str(BIN / "accelerate"), *shlex.split(command)[1:]]))
    for launch in launches:
        wait(launch).assert_ok()

    [start] = read_json(tmp_path / "run.json")["starts"]
    assert start["sharded"] == "2x2"


def test_if_nothing_fits_the_layout_that_needs_least_is_named() -> None:
    smallest = fit(NOTHING)

    assert not smallest.fits
    assert fit(smallest.chosen.bytes.total).fits
