"""Runs with weights in bfloat16 and moments in 8 bits: resumed, on other layouts, and finished."""

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
    SMALL_LLAMA,
    TINY,
    long_form,
    metrics,
    read_json,
    write_pairs,
)

BOTH = ["--dtype", "bfloat16", "--optim", "adamw_torch_8bit"]
KINDS = {
    "both": BOTH,
    "bfloat16 with Muon": ["--dtype", "bfloat16", "--optim", "muon"],
    "8 bits": ["--optim", "adamw_torch_8bit"],
    "bfloat16": ["--dtype", "bfloat16"],
    "Adafactor": ["--optim", "adafactor"],
}
SHORT = ("both", "bfloat16 with Muon")
# A matrix of 64 x 64 is in 8 bits.
FLAGS = [*TINY, "--n_embd", "64", "--save_steps", "3"]


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step:08d}"


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in SHORT else long_form) for k in KINDS]
)
def test_a_resumed_run_ends_in_the_same_bits(kind: str, text_file: Path, tmp_path: Path) -> None:
    command = [*PYTHON, GPT, *FLAGS, "--dataset", str(text_file), *KINDS[kind]]
    straight = tmp_path / "straight"
    run_forked([*command, "--output_dir", str(straight)]).assert_ok()
    source = ["--resume_from_checkpoint", str(checkpoint_of(straight, 3))]
    resumed = tmp_path / "resumed"
    run_forked([*command, *source, "--output_dir", str(resumed)]).assert_ok()

    assert tensors_digest(checkpoint_of(resumed, 6)) == tensors_digest(checkpoint_of(straight, 6))
    assert metrics(resumed)[-1]["eval/loss"] == metrics(straight)[-1]["eval/loss"]

    dtypes = {
        tensor.dtype for tensor in load_file(straight / "model" / "model.safetensors").values()
    }
    trained = torch.bfloat16 if "bfloat16" in kind or kind == "both" else torch.float32
    assert dtypes == {trained}
    assert read_json(straight / "model" / "config.json")["dtype"] == str(trained).partition(".")[2]
    assert AutoModelForCausalLM.from_pretrained(straight / "model").dtype == trained


@long_form
@pytest.mark.parametrize("flags", [["--layouts", "1x1x8,2x2x2,4x1x2"], ["--layouts", "2,4"]])
def test_any_layout_makes_the_same_steps(flags: list[str], text_file: Path) -> None:
    is_bitwise = flags[1] == "2,4"
    own = ["--bitwise"] if is_bitwise else []
    command = [*PYTHON, str(BIN / "llmtrain"), "verify", "layout", "--steps", "4", *flags, GPT]
    ended = run_forked([*command, *FLAGS, *BOTH, *own, "--dataset", str(text_file)]).assert_ok()
    assert "passed: the same run" in ended.out
    if is_bitwise:
        digests = {line.split()[-1] for line in ended.out.splitlines() if "process" in line}
        assert len(digests) == 1


def test_a_state_of_another_form_is_not_taken_over(text_file: Path, tmp_path: Path) -> None:
    command = [*PYTHON, GPT, *FLAGS, "--dataset", str(text_file), "--optim", "adamw_torch_8bit"]
    first = tmp_path / "first"
    run_forked([*command, "--output_dir", str(first)]).assert_ok()
    changes = ["--optim", "adamw", "--max_steps", "7", "--resume_from_checkpoint", str(first)]
    ended = run_forked([*command, *changes, "--output_dir", str(tmp_path / "second")]).assert_ok()
    assert (
        "the checkpoint has the state of the optimizer EightBitAdamW for weights in float32; AdamW "
        "for weights in float32 starts without a state"
    ) in ended.out


@pytest.mark.parametrize("frozen", ["--freeze", "--lora_r"])
def test_frozen_weights_beside_trained_ones_in_bfloat16(
    frozen: str, text_file: Path, tmp_path: Path
) -> None:
    """Without autocast, a product takes no inputs of two dtypes."""
    flags = [*SMALL_LLAMA, *BOTH, "--max_steps", "3", "--output_dir", str(tmp_path / "run")]
    if frozen == "--freeze":
        flags += ["--from_config", "llama", "--freeze", r"layers\.0\.", "--dataset", str(text_file)]
        command = [*PYTHON, FINETUNE, *flags]
    else:
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
        flags = [*TINY[10:], *BOTH, "--max_steps", "3", "--output_dir", str(tmp_path / "run")]
        flags += ["--loss_type", "reward", "--lora_r", "4", "--tokenizer", "byte"]
        flags += ["--model_name_or_path", str(base), "--dataset", str(pairs)]
        command = [*PYTHON, PREFERENCE, *flags]
    run_forked(command).assert_ok()
    assert metrics(tmp_path / "run")[-1]["eval/loss"] > 0
