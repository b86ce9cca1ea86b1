"""Runs with weights in bfloat16 and moments in 8 bits: resumed, on other layouts, and finished."""

import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from llmtrain.record.checkpoint import tensors_digest
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
        pytest.param("--dtype bfloat16", torch.bfloat16, id="bfloat16", marks=long_form),
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


def test_a_state_of_another_optimizer_is_not_restored(text_file: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    train(f"--optim adamw_torch_8bit --dataset {text_file} --output_dir {first}")

    out = train(
        f"--optim adamw --max_steps 7 --resume_from_checkpoint {first} --dataset {text_file} "
        f"--output_dir {tmp_path}/second"
    )

    assert (
        "the checkpoint has the state of the optimizer EightBitAdamW for weights in float32; AdamW "
        "for weights in float32 starts without a state"
    ) in out


# --- layouts


def verify_layouts(layouts: str, flags: str) -> list[str]:
    """Run `llmtrain verify layout` on a GPT, and return the lines of its report."""
    verify = shlex.split(f"{BIN}/llmtrain verify layout --steps 4 --layouts {layouts}")
    command = [*PYTHON, *verify, GPT, *FLAGS, *shlex.split(flags)]
    return run_forked(command).assert_ok().out.splitlines()


@long_form
def test_any_layout_makes_the_same_steps(text_file: Path) -> None:
    lines = verify_layouts("1x1x8,2x2x2,4x1x2", f"{LITTLE_MEMORY} --dataset {text_file}")
    assert "passed: the same run" in lines


@long_form
def test_a_bitwise_run_has_the_same_bits_on_two_and_four_processes(text_file: Path) -> None:
    lines = verify_layouts("2,4", f"{LITTLE_MEMORY} --bitwise --dataset {text_file}")
    assert "passed: the same run" in lines
    digests = {line.split()[-1] for line in lines if "process" in line}
    assert len(digests) == 1


# --- frozen weights
# Without autocast, a matrix product does not take inputs of two dtypes.


def test_frozen_weights_stay_beside_trained_ones_in_bfloat16(
    text_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    flags = shlex.split(
        rf"{LITTLE_MEMORY} --from_config llama --freeze 'layers\.0\.' --max_steps 3 "
        f"--dataset {text_file} --output_dir {folder}"
    )

    run_forked([*PYTHON, FINETUNE, *SMALL_LLAMA, *flags]).assert_ok()

    assert metrics(folder)[-1]["eval/loss"] > 0


@long_form
def test_an_adapter_of_a_reward_model_trains_in_bfloat16(tmp_path: Path) -> None:
    base = tmp_path / "base"
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(base)
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    folder = tmp_path / "run"
    flags = shlex.split(
        f"{LITTLE_MEMORY} --loss_type reward --lora_r 4 --tokenizer byte --max_steps 3 "
        f"--model_name_or_path {base} --dataset {pairs} --output_dir {folder}"
    )

    run_forked([*PYTHON, PREFERENCE, *SIX_STEPS, *flags]).assert_ok()

    assert metrics(folder)[-1]["eval/loss"] > 0
