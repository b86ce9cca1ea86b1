"""The cheapest flags with which a run fits, and what else would fit if none do."""

import functools
import shlex
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.lab.plan.fit import Fit, fit_into
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import Plan, plan_without_layouts
from tests.launching import FINETUNE, GPT

MODEL = "--n_layer 8 --n_head 4 --n_embd 256 --block_size 128 --tokenizer byte"
MODEL += " --global_batch_size 4 --per_device_train_batch_size 2"
LLAMA = "--from_config llama --tokenizer byte --max_length 512 --config_overrides "
LLAMA += "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,intermediate_size=128"


@functools.cache
def plan_of(request: PlanRequest) -> Plan:
    return plan_without_layouts(request._replace(flags=[*request.flags]))


def fit(limit: float, flags: str = MODEL, recipe: str = GPT, processes: int = 1) -> Fit:
    """Return what fits into some bytes of a GPU."""
    request = PlanRequest(recipe, tuple(flags.split()), processes=processes, device="h100-80gb")
    return fit_into(limit, plan_of(request), request)


def test_flags_that_fit_are_not_changed() -> None:
    found = fit(1e9)
    assert found.fits
    assert (found.changes, found.too_large) == ([], None)
    assert found.command == f"python {GPT} {MODEL}"


def test_less_memory_costs_seconds_first_and_other_arithmetic_last() -> None:
    """Each answer is asked for again with a byte less, until nothing fits."""
    answers = []
    found = fit(1e9, LLAMA, FINETUNE)
    while found.fits:
        answers.append(found)
        found = fit(found.chosen.total - 1, LLAMA, FINETUNE)

    ranks = []
    for answer in answers:
        flags = answer.chosen.flags
        ranks.append(("dtype" in flags, "optim" in flags, answer.chosen.seconds))
        assert answer.chosen.total <= answer.limit
        assert answer.too_large is None or answer.too_large.total > answer.limit
    assert answers[0].chosen.flags == {}
    assert answers[-1].too_large is not None
    arithmetics = sorted({rank[:2] for rank in ranks})
    assert ranks == sorted(ranks, key=lambda rank: (*rank[:2], round(rank[2], 9)))
    assert arithmetics[0] == (False, False)
    assert arithmetics[-1] == (True, True)


def test_each_change_has_its_seconds_and_its_promise() -> None:
    smallest = fit(1, LLAMA, FINETUNE)
    changes = {change.flag: change for change in smallest.changes}
    assert changes["--gradient_checkpointing auto"].seconds > 0
    assert changes["--gradient_checkpointing auto"].promise == "the same bits"
    assert changes["--per_device_train_batch_size 1"].promise == "equal to rounding"
    assert changes["--dtype bfloat16"].promise.startswith("other arithmetic: weights in bfloat16")
    assert changes["--optim adamw_torch_8bit"].promise.startswith("other arithmetic: AdamW")


def test_muon_is_not_replaced_by_another_algorithm() -> None:
    assert "optim" not in fit(1).chosen.flags  # the recipe's own optimizer is Muon


def test_the_command_has_the_precision_that_was_planned() -> None:
    request = PlanRequest(GPT, tuple(MODEL.split()), device="h100-80gb", mixed_precision="no")
    found = fit_into(1e9, plan_of(request), request)
    assert found.command.startswith("accelerate launch --mixed_precision no recipes/gpt.py")


def test_flags_of_the_user_stay_as_they_are() -> None:
    fixed = f"{MODEL} --dtype float32 --optim adamw --gradient_checkpointing"
    smallest = fit(1, fixed)
    assert not smallest.fits
    assert smallest.changes == []
    assert smallest.command == f"python {GPT} {fixed}"


def test_processes_share_a_model_that_one_cannot_hold() -> None:
    apart = fit(fit(1, processes=2).chosen.total, processes=2)
    assert apart.fits
    assert apart.chosen.layout == "FSDP2"
    words = shlex.split(apart.command)
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert words[3].endswith("fsdp2.yaml")
    assert words[4:8] == ["--num_processes", "2", "--mixed_precision", "bf16"]


def test_what_would_fit_is_named_if_nothing_does(tmp_path: Path, text_file: Path) -> None:
    config = LlamaConfig(vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    flags = (
        f"--model_name_or_path {tmp_path} --tokenizer byte --dataset {text_file} --max_length 32"
    )
    flags += " --dtype float32 --optim adamw --global_batch_size 8"
    smallest = fit(1, flags, FINETUNE)
    assert (smallest.fits, smallest.would_fit) == (False, [])

    found = fit(0.7 * smallest.chosen.total, flags, FINETUNE)
    assert not found.fits
    processes, lora = found.would_fit
    assert processes.startswith("FSDP2 on ")
    assert lora.startswith("--lora_r 16: ")
