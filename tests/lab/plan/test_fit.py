"""The cheapest flags with which a run fits, and what else would fit if none do."""

import shlex

import pytest

from llmtrain.lab.plan.fit import Fit, find_fit
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import RESERVED_MEMORY
from tests.launching import FINETUNE, GPT, SMALL_LLAMA

MODEL = "--n_layer 4 --n_head 4 --n_embd 256 --block_size 128 --tokenizer byte --optim adamw"
UNSET = MODEL.replace("--optim adamw", "")


def fit(size: float, flags: str = MODEL, recipe: str = GPT, processes: int = 1) -> Fit:
    """Return what fits into some bytes of a GPU."""
    request = PlanRequest(recipe, flags.split(), processes=processes, device="h100-80gb")
    return find_fit(request, f"{size / (1 - RESERVED_MEMORY):.0f}b")


def test_flags_that_fit_are_not_changed() -> None:
    found = fit(1e9)
    assert found.fits
    assert (found.changes, found.too_large) == ([], None)
    assert found.command == f"python {GPT} {MODEL}"


def test_less_memory_costs_seconds_first_and_other_arithmetic_last() -> None:
    """Each answer is asked for again with a byte less, until nothing fits."""
    answers = []
    found = fit(1e9, UNSET)
    while found.fits:
        answers.append(found)
        found = fit(found.chosen.total - 2, UNSET)

    ranks = []
    for answer in answers:
        flags = answer.chosen.flags
        ranks.append(("dtype" in flags, "optim" in flags, answer.chosen.seconds))
        assert answer.chosen.total <= answer.limit
        if answer.too_large is not None:
            assert answer.too_large.total > answer.limit
    arithmetics = sorted({rank[:2] for rank in ranks})
    assert ranks == sorted(ranks, key=lambda rank: (*rank[:2], round(rank[2], 9)))
    assert arithmetics[0] == (False, False)
    assert arithmetics[-1] == (True, True)


def test_each_change_has_its_seconds_and_its_promise() -> None:
    smallest = fit(1)
    changes = {change.flag: change for change in smallest.changes}
    assert changes["--gradient_checkpointing auto"].seconds > 0
    assert changes["--gradient_checkpointing auto"].promise == "the same bits"
    assert changes["--per_device_train_batch_size 1"].promise == "equal to rounding"
    assert changes["--dtype bfloat16"].promise.startswith("other arithmetic")


def test_flags_of_the_user_stay_as_they_are() -> None:
    fixed = f"{MODEL} --dtype float32 --per_device_train_batch_size 8 --gradient_checkpointing"
    smallest = fit(1, fixed)
    assert not smallest.fits
    assert smallest.changes == []
    assert smallest.command == f"python {GPT} {fixed}"


def test_processes_share_a_model_that_one_cannot_hold() -> None:
    together = fit(1e9, processes=2)
    assert together.chosen.layout == "DDP"
    apart = fit(fit(1, processes=2).chosen.total, processes=2)
    assert apart.chosen.layout == "FSDP2"
    words = shlex.split(apart.command)
    assert words[:3] == ["accelerate", "launch", "--config_file"]
    assert words[3].endswith("fsdp2.yaml")
    assert words[4:6] == ["--num_processes", "2"]


def test_what_would_fit_is_named_if_nothing_does() -> None:
    flags = [*SMALL_LLAMA, "--dtype", "float32", "--optim", "adamw", "--global_batch_size", "64"]
    smallest = fit(1, " ".join(flags), FINETUNE)
    assert (smallest.fits, smallest.would_fit) == (False, [])

    found = fit(0.7 * smallest.chosen.total, " ".join(flags), FINETUNE)
    assert not found.fits
    processes, lora = found.would_fit
    assert processes.startswith("FSDP2 on ")
    assert lora.startswith("--lora_r 16: ")
