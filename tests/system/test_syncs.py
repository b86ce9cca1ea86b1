"""Between log entries, a step waits for its device once, however the model is trained."""

import shlex
from pathlib import Path

import pytest

from tests.forked import run_forked
from tests.launching import (
    BYTE_DATA,
    FINETUNE,
    GPT,
    PYTHON,
    SIX_STEPS,
    TINY,
    accelerate,
    long_form,
    read_json,
    torchrun,
    write_chats,
)

FLAGS = shlex.split(
    "--max_steps 6 --logging_steps 100 --eval_steps 0 --save_steps 100 --report_to none "
    "--global_batch_size 8 --per_device_train_batch_size 2"
)

FSDP2 = accelerate("fsdp2", "--num_processes", "2")
ON_TWO = torchrun(2)


TINY_GPT = [GPT, *TINY, "--dropout", "0.1"]
LLAMA = [FINETUNE, "--from_config", "llama", *BYTE_DATA, *SIX_STEPS]


@pytest.fixture(scope="module")
def data(text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The data set of each recipe."""
    chats = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    return {GPT: text_file, FINETUNE: write_chats(chats)}


@pytest.fixture(scope="module")
def base(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to train an adapter for."""
    folder = tmp_path_factory.mktemp("base") / "run"
    flags = f"--max_steps 1 --warmup_steps 0 --dataset {data[FINETUNE]} --output_dir {folder}"
    run_forked([*PYTHON, *LLAMA, *FLAGS, *flags.split()]).assert_ok()
    return folder / "model"


def assert_each_step_waits_once(
    launcher: list[str], recipe: list[str], data: dict[str, Path], folder: Path
) -> None:
    """Assert that each step reads the numbers of the step before it, and waits nowhere else."""
    counts_file = folder / "counts.json"
    flags = shlex.split(f"--dataset {data[recipe[0]]} --output_dir {folder / 'run'}")
    program = ["tests/system/syncs_ranks.py", str(counts_file), *recipe, *FLAGS, *flags]

    run_forked([*launcher, *program]).assert_ok()

    # The first step prepares the others, and the last one saves.
    _, *steps, _ = read_json(counts_file)
    assert len(steps) == 4
    for waits in steps:
        [(place, count)] = waits.items()
        assert place.startswith("tolist in device_numbers.py")
        assert count == 1


@pytest.mark.parametrize(
    ("launcher", "recipe"),
    [
        pytest.param(PYTHON, TINY_GPT, id="gpt"),
        pytest.param(ON_TWO, TINY_GPT, id="gpt on 2", marks=long_form),
        pytest.param(PYTHON, LLAMA, id="packed", marks=long_form),
        pytest.param(ON_TWO, LLAMA, id="packed on 2", marks=long_form),
        pytest.param(FSDP2, LLAMA, id="packed, sharded", marks=long_form),
        pytest.param(PYTHON, [*LLAMA, "--no_packing"], id="not packed"),
    ],
)
def test_a_step_waits_once(
    launcher: list[str], recipe: list[str], data: dict[str, Path], tmp_path: Path
) -> None:
    assert_each_step_waits_once(launcher, recipe, data, tmp_path)


@long_form
def test_a_step_of_an_adapter_waits_once(base: Path, data: dict[str, Path], tmp_path: Path) -> None:
    adapter = [FINETUNE, "--lora_r", "2", "--model_name_or_path", str(base)]
    assert_each_step_waits_once(PYTHON, [*adapter, *BYTE_DATA, *SIX_STEPS], data, tmp_path)
