"""A plan finds the cheapest flags with which a run fits, or says what else would fit."""

import functools
import shlex
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.lab.plan.fit import Fit, fit_into
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import Plan, plan_without_layouts
from tests.launching import FINETUNE, GPT, long_form

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
    assert fitting.changes == []
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
    assert fitting.chosen.flags == {}
    while fitting.fits:
        assert fitting.chosen.total <= fitting.limit
        assert fitting.too_large is None or fitting.too_large.total > fitting.limit
        flags = fitting.chosen.flags
        costs.append(("dtype" in flags, "optim" in flags, round(fitting.chosen.seconds, 9)))
        fitting = fit(fitting.chosen.total - 1, LLAMA, FINETUNE)

    assert costs == sorted(costs)
    assert costs[0][:2] == (False, False)
    assert costs[-1][:2] == (True, True)


@long_form
def test_each_change_has_its_seconds_and_its_promise() -> None:
    changes = {change.flag: change for change in fit(NOTHING, LLAMA, FINETUNE).changes}

    assert changes["--gradient_checkpointing auto"].seconds > 0
    assert changes["--gradient_checkpointing auto"].promise == "the same bits"
    assert changes["--per_device_train_batch_size 1"].promise == "equal to rounding"
    assert changes["--dtype bfloat16"].promise.startswith("other arithmetic: weights in bfloat16")
    assert changes["--optim adamw_torch_8bit"].promise.startswith("other arithmetic: AdamW")


def test_flags_that_the_user_has_set_are_not_changed() -> None:
    flags = f"{MODEL} --dtype float32 --optim adamw --gradient_checkpointing"

    smallest = fit(NOTHING, flags)

    assert "optim" not in fit(NOTHING).chosen.flags, "Muon, the default, is another algorithm"
    assert not smallest.fits
    assert smallest.changes == []
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
    assert fitting.chosen.layout == layout
    words = shlex.split(fitting.command)
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert Path(words[3]).name == config
    assert words[4:7] == ["--num_processes", "4", GPT]


@pytest.fixture
def llama_flags(tmp_path: Path, text_file: Path) -> str:
    """Flags that fine-tune a small Llama."""
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    return (
        f"--model_name_or_path {tmp_path} --tokenizer byte --dataset {text_file} --max_length 32 "
        "--dtype float32 --optim adamw --global_batch_size 8"
    )


def test_more_processes_and_lora_are_proposed_if_they_would_fit(llama_flags: str) -> None:
    smallest = fit(NOTHING, llama_flags, FINETUNE)
    assert not smallest.fits
    assert smallest.would_fit == []

    fitting = fit(0.7 * smallest.chosen.total, llama_flags, FINETUNE)

    assert not fitting.fits
    processes, lora = fitting.would_fit
    assert processes.startswith("FSDP2 on ")
    assert lora.startswith("--lora_r 16: ")
