"""Runs that train an adapter further, in real processes."""

import math
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from llmtrain.cli import main
from llmtrain.data import tokenizer as tok
from llmtrain.record.tensor_files import read_tensors
from tests.forked import run_forked
from tests.launching import (
    FINETUNE,
    PREFERENCE,
    PYTHON,
    accelerate,
    read_json,
    series,
    write_chats,
    write_pairs,
)

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
# All rows are in every step, so each step has the same ones.
FLAGS = ["--max_length", "128", "--no_packing", "--save_steps", "2"]
FLAGS += ["--logging_steps", "1"]
FLAGS += ["--learning_rate", "0.02", "--warmup_steps", "0", "--lr_scheduler_type", "constant"]


DATA = ["--global_batch_size", "12", "--eval_fraction", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base, conversations, and a run of three steps that has trained an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=257, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 128)
    tokenizer.save_pretrained(folder / "base")
    write_chats(folder / "chats.jsonl", 12)

    flags = ["--model_name_or_path", str(folder / "base"), "--lora_r", "3", "--use_dora"]
    flags += ["--chat_template", "chatml", "--max_steps", "3", "--output_dir", str(folder / "run")]
    flags += [*FLAGS, *DATA, "--dataset", str(folder / "chats.jsonl")]
    run_forked([*PYTHON, FINETUNE, *flags]).assert_ok()
    return folder


@pytest.mark.parametrize(
    "launcher",
    [accelerate("cpu_ddp"), accelerate("fsdp2", "--mixed_precision", "no")],
    ids=["DDP", "FSDP2"],
)
def test_the_first_step_from_an_adapter_is_the_next_step_of_its_run(
    launcher: list[str], folder: Path, tmp_path: Path
) -> None:
    checkpoint = folder / "run" / "checkpoints" / "step-00000002"
    flags = ["--model_name_or_path", str(checkpoint), "--continue_adapter", "--max_steps", "1"]
    flags += [*FLAGS, *DATA, "--dataset", str(folder / "chats.jsonl")]
    run_forked([*launcher, FINETUNE, *flags, "--output_dir", str(tmp_path)]).assert_ok()
    for quantity in ("train/loss", "train/grad_norm"):
        expected = series(folder / "run", quantity)[3]
        assert series(tmp_path, quantity)[1] == pytest.approx(expected, rel=1e-5), quantity
    assert not [*folder.rglob("merged*")]
    weights = read_json(tmp_path / "run.json")["fingerprint"]["initial_weights"]["weights"]
    assert weights.keys() == {"sha256", "adapter"}

    # AdamW's first step changes each value by at most the learning rate.
    start = dict(read_tensors(checkpoint / "model"))
    end = dict(read_tensors(tmp_path / "model"))
    assert start.keys() == end.keys()
    for name, tensor in end.items():
        assert 0 < (tensor - start[name]).abs().max() < 0.021, name


def test_preferences_are_compared_with_the_adapter_before_training(
    folder: Path, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    flags = ["--model_name_or_path", str(folder / "run"), "--continue_adapter", "--max_steps", "2"]
    flags += [*FLAGS, "--dataset", str(pairs), "--output_dir", str(tmp_path / "run")]
    run_forked([*PYTHON, PREFERENCE, *flags]).assert_ok()
    losses = series(tmp_path / "run", "train/loss")
    assert losses[1] == pytest.approx(math.log(2), abs=1e-6), "policy and reference are the same"
    assert losses[2] != pytest.approx(math.log(2), abs=1e-3)
    assert not [*folder.rglob("merged*")]


def test_a_reward_model_is_trained_as_an_adapter_with_its_head(
    folder: Path, tmp_path: Path
) -> None:
    """Sharded in bfloat16, with rows for the tokens of a template, and merged."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    flags = ["--model_name_or_path", str(folder / "base"), "--lora_r", "2", "--max_steps", "2"]
    flags += ["--loss_type", "reward", "--chat_template", "chatml", *FLAGS]
    flags += ["--dataset", str(pairs), "--output_dir", str(tmp_path / "run")]
    run_forked([*accelerate("fsdp2"), PREFERENCE, *flags]).assert_ok()
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "model", num_labels=1
    )
    main(["export", str(tmp_path / "run"), "--merge"])
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "merged")
    ids = torch.arange(200, 259)[None]
    scores = [model.eval()(ids).logits for model in (adapted, merged)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
