"""Runs with weights in bfloat16 and moments in 8 bits: resumed, on other layouts, and finished."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.forked import run_forked
from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    SIX_STEPS,
    SMALL_LLAMA,
    TINY,
    long_form,
    metrics,
    read_json,
    write_pairs,
)
from tests.record.checkpoint_files import tensors_digest

# Matrices of 64 x 64 are large enough for moments in 8 bits.
FLAGS = [*TINY, *shlex.split("--n_embd 64 --save_steps 3")]
LITTLE_MEMORY = "--dtype bfloat16 --optim adamw_torch_8bit"


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


# --- resumed runs


def train(flags: str) -> str:
    """Train a GPT, and return the output."""
    return run_forked([*PYTHON, GPT, *FLAGS, *shlex.split(flags)]).assert_ok().out


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [
        pytest.param(LITTLE_MEMORY, torch.bfloat16, id="bfloat16 and 8 bits"),
        pytest.param("--dtype bfloat16 --optim muon", torch.bfloat16, id="bfloat16 and Muon"),
        pytest.param("--optim adamw_torch_8bit", torch.float32, id="8 bits", marks=long_form),
    ],
)
def test_a_resumed_run_has_the_same_bits_and_its_model_the_dtype_of_training(
    flags: str, dtype: torch.dtype, text_file: Path, tmp_path: Path
) -> None:
    reference = tmp_path / "reference"
    resumed = tmp_path / "resumed"
    run_flags = f"{flags} --dataset {text_file}"
    train(f"{run_flags} --output_dir {reference}")
    checkpoint = checkpoint_of(reference, 3)
    train(f"{run_flags} --output_dir {resumed} --resume_from_checkpoint {checkpoint}")

    digest = tensors_digest(checkpoint_of(resumed, 6))
    assert digest == tensors_digest(checkpoint_of(reference, 6))
    assert metrics(resumed)[-1]["eval/loss"] == metrics(reference)[-1]["eval/loss"]

    model = reference / "model"
    tensors = load_file(model / "model.safetensors").values()
    assert {tensor.dtype for tensor in tensors} == {dtype}
    assert f"torch.{read_json(model / 'config.json')['dtype']}" == str(dtype)
    assert AutoModelForCausalLM.from_pretrained(model).dtype == dtype


# --- layouts


@long_form
@pytest.mark.parametrize(("layouts", "flag"), [("2,4", ""), ("2,4", "--bitwise")])
def test_any_layout_makes_the_same_steps(layouts: str, flag: str, text_file: Path) -> None:
    verify = shlex.split(f"{BIN}/llmtrain verify layout --steps 4 --layouts {layouts}")
    flags = [*FLAGS, *shlex.split(f"{LITTLE_MEMORY} {flag} --dataset {text_file}")]
    lines = run_forked([*PYTHON, *verify, GPT, *flags]).assert_ok().out.splitlines()

    assert "passed: the same run" in lines
    if flag == "--bitwise":
        assert len({line.split()[-1] for line in lines if "process" in line}) == 1


# --- without autocast, a matrix product does not take inputs of two dtypes


def test_frozen_weights_and_an_adapter_of_a_reward_model_train_in_bfloat16(
    text_file: Path, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    flags = rf"--from_config llama --freeze 'layers\.0\.' --dataset {text_file} --output_dir {base}"
    train_in_bfloat16(FINETUNE, [*SMALL_LLAMA, *shlex.split(flags)])
    assert metrics(base)[-1]["eval/loss"] > 0

    folder = tmp_path / "run"
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    flags = (
        f"--model_name_or_path {base}/model --loss_type reward --lora_r 4 "
        f"--dataset {pairs} --output_dir {folder}"
    )
    train_in_bfloat16(PREFERENCE, [*SIX_STEPS, *shlex.split(flags)])
    assert metrics(folder)[-1]["eval/loss"] > 0


def train_in_bfloat16(recipe: str, flags: list[str]) -> None:
    more_flags = [*shlex.split(LITTLE_MEMORY), "--max_steps", "3"]
    run_forked([*PYTHON, recipe, *flags, *more_flags]).assert_ok()
