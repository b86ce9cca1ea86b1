"""Between readings an update waits for its device once, whatever is trained and however it is spread."""

import json
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    GPT,
    PYTHON,
    SMALL_LLAMA,
    TINY,
    accelerate,
    long_form,
    torchrun,
    write_chats,
)

UPDATES = 5
FLAGS = ["--max_steps", "6", "--logging_steps", "100", "--eval_steps", "0", "--save_steps", "100"]
FLAGS += ["--report_to", "none", "--global_batch_size", "8", "--per_device_train_batch_size", "2"]
FSDP2 = accelerate("fsdp2", "--num_processes", "2", "--mixed_precision", "no")
LLAMA = [FINETUNE, "--from_config", "llama", *SMALL_LLAMA[2:]]
RUNS = {
    "gpt": (PYTHON, [GPT, *TINY, "--dropout", "0.1"]),
    "gpt on 2": (torchrun(2), [GPT, *TINY]),
    "packed": (PYTHON, LLAMA),
    "packed on 2": (torchrun(2), LLAMA),
    "packed, sharded": (FSDP2, LLAMA),
    "a row each": (PYTHON, [*LLAMA, "--no_packing"]),
    "LoRA": (PYTHON, [FINETUNE, "--lora_r", "2", *SMALL_LLAMA[2:]]),
}


COMPILED = {
    "gpt": (PYTHON, [GPT, *TINY, "--dropout", "0.1"]),
    "gpt, sharded": (FSDP2, [GPT, *TINY, "--dropout", "0.1"]),
    "packed, sharded": (FSDP2, LLAMA),
}


def updates_of(
    launcher: list[str], recipe: str, flags: list[str], tmp_path: Path, text_file: Path
) -> list[dict]:
    """What syncs_ranks.py has found in each update but the first and the last, which get ready, and save."""
    data = text_file if recipe == GPT else write_chats(tmp_path / "chats.jsonl")
    flags = [*flags, *FLAGS, "--dataset", str(data)]
    if "--lora_r" in flags:
        base = [
            *LLAMA[1:],
            *FLAGS,
            "--max_steps",
            "1",
            "--warmup_steps",
            "0",
            "--dataset",
            str(data),
            "--output_dir",
            str(tmp_path / "base"),
        ]
        run_forked([*PYTHON, FINETUNE, *base]).assert_ok()
        flags += ["--model_name_or_path", str(tmp_path / "base" / "model")]
    found = tmp_path / "found.json"
    flags += ["--output_dir", str(tmp_path / "run")]
    run_forked([*launcher, "tests/system/syncs_ranks.py", str(found), recipe, *flags]).assert_ok()
    _, *updates, _ = json.loads(found.read_text())
    return updates


@pytest.mark.parametrize("run", RUNS)
def test_an_update_waits_once(run: str, tmp_path: Path, text_file: Path) -> None:
    launcher, (recipe, *flags) = RUNS[run]
    updates = updates_of(launcher, recipe, flags, tmp_path, text_file)
    assert len(updates) == UPDATES - 1
    # The numbers of the first step are read in that step, by the check of states.
    assert updates[0]["waits"] == {}
    for update in updates[1:]:
        assert sum(update["waits"].values()) == 1, update["waits"]
        assert next(iter(update["waits"])).startswith("tolist in device_numbers.py")


@pytest.mark.parametrize(
    "run",
    ["gpt", pytest.param("gpt, sharded", marks=long_form), "packed, sharded"],
)
def test_nothing_is_compiled_after_the_first_update(
    run: str, tmp_path: Path, text_file: Path
) -> None:
    launcher, (recipe, *flags) = COMPILED[run]
    updates = updates_of(
        launcher, recipe, [*flags, "--torch_compile", "always"], tmp_path, text_file
    )
    kinds = 2 if recipe == GPT else 1  # of blocks
    assert [update["graphs"] for update in updates] == [kinds] * (UPDATES - 1)
