"""Between log entries, a step waits for its device once, however the model is trained."""

import shlex
from pathlib import Path
from typing import Any, NamedTuple

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
# The first step prepares the others, and the last one saves.
COUNTED_STEPS = 4

FSDP2 = accelerate("fsdp2", "--num_processes", "2", "--mixed_precision", "no")
ON_TWO = torchrun(2)


class Training(NamedTuple):
    """A launcher, and the recipe with its flags."""

    launcher: list[str]
    recipe: str
    flags: list[str]

    @classmethod
    def of_gpt(cls, launcher: list[str], flags: str = "") -> "Training":
        return cls(launcher, GPT, [*TINY, *flags.split()])

    @classmethod
    def of_llama(cls, launcher: list[str], flags: str = "") -> "Training":
        data_flags = [*BYTE_DATA, *SIX_STEPS]
        return cls(launcher, FINETUNE, ["--from_config", "llama", *data_flags, *flags.split()])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to train an adapter for."""
    folder = tmp_path_factory.mktemp("base")
    chats = write_chats(folder / "chats.jsonl")
    training = Training.of_llama(PYTHON)
    flags = shlex.split(
        f"--max_steps 1 --warmup_steps 0 --dataset {chats} --output_dir {folder / 'run'}"
    )
    run_forked([*PYTHON, FINETUNE, *training.flags, *FLAGS, *flags]).assert_ok()
    return folder / "run" / "model"


def counts_by_step(training: Training, tmp_path: Path, text_file: Path) -> list[dict[str, Any]]:
    """Train for six steps. Return what `syncs_ranks.py` has counted in all but the first and last."""
    if training.recipe == GPT:
        dataset = text_file
    else:
        dataset = write_chats(tmp_path / "chats.jsonl")
    counts_file = tmp_path / "counts.json"
    data_flags = shlex.split(f"--dataset {dataset} --output_dir {tmp_path / 'run'}")
    program = ["tests/system/syncs_ranks.py", str(counts_file), training.recipe]

    run_forked([*training.launcher, *program, *training.flags, *FLAGS, *data_flags]).assert_ok()

    _, *counted_steps, _ = read_json(counts_file)
    assert len(counted_steps) == COUNTED_STEPS
    return counted_steps


def assert_each_step_waits_once(steps: list[dict[str, Any]]) -> None:
    """Assert that each step reads the numbers of the step before it, and waits nowhere else."""
    # The numbers of the first step are read in that step, by the check of states.
    assert steps[0]["waits"] == {}
    for step in steps[1:]:
        [(place, count)] = step["waits"].items()
        assert place.startswith("tolist in device_numbers.py")
        assert count == 1


@pytest.mark.parametrize(
    "training",
    [
        pytest.param(Training.of_gpt(PYTHON, "--dropout 0.1"), id="gpt"),
        pytest.param(Training.of_gpt(ON_TWO), id="gpt on 2"),
        pytest.param(Training.of_llama(PYTHON), id="packed"),
        pytest.param(Training.of_llama(ON_TWO), id="packed on 2", marks=long_form),
        pytest.param(Training.of_llama(FSDP2), id="packed, sharded"),
        pytest.param(Training.of_llama(PYTHON, "--no_packing"), id="not packed"),
    ],
)
def test_a_step_waits_once(training: Training, tmp_path: Path, text_file: Path) -> None:
    assert_each_step_waits_once(counts_by_step(training, tmp_path, text_file))


def test_a_step_of_an_adapter_waits_once(base: Path, tmp_path: Path, text_file: Path) -> None:
    flags = ["--lora_r", "2", "--model_name_or_path", str(base), *BYTE_DATA, *SIX_STEPS]
    training = Training(PYTHON, FINETUNE, flags)

    assert_each_step_waits_once(counts_by_step(training, tmp_path, text_file))


@pytest.mark.parametrize(
    ("training", "kinds_of_blocks"),
    [
        pytest.param(Training.of_gpt(PYTHON, "--dropout 0.1"), 2, id="gpt"),
        pytest.param(
            Training.of_gpt(FSDP2, "--dropout 0.1"), 2, id="gpt, sharded", marks=long_form
        ),
        pytest.param(Training.of_llama(FSDP2), 1, id="packed, sharded", marks=long_form),
    ],
)
def test_nothing_is_compiled_after_the_first_step(
    training: Training, kinds_of_blocks: int, tmp_path: Path, text_file: Path
) -> None:
    compiled = training._replace(flags=[*training.flags, "--torch_compile", "always"])

    steps = counts_by_step(compiled, tmp_path, text_file)

    assert [step["graphs"] for step in steps] == [kinds_of_blocks] * COUNTED_STEPS
