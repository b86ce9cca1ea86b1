"""Runs that train an adapter further, and adapters of reward models."""

import math
import shlex
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
    long_form,
    series,
    write_chats,
    write_pairs,
)

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LEARNING_RATE = 0.02
FLAGS = shlex.split(
    f"--max_length 128 --no_packing --save_steps 2 --logging_steps 1 --warmup_steps 0 "
    f"--learning_rate {LEARNING_RATE} --lr_scheduler_type constant"
)
# With all twelve rows in every step, each step has the same rows.
ALL_ROWS = "--global_batch_size 12 --eval_fraction 0"


def train(recipe: str, flags: str, launcher: list[str] = PYTHON) -> None:
    run_forked([*launcher, recipe, *FLAGS, *shlex.split(flags)]).assert_ok()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, conversations, and a run that has trained an adapter."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=257, **LLAMA)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 128)
    tokenizer.save_pretrained(folder / "base")
    write_chats(folder / "chats.jsonl", 12)

    train(
        FINETUNE,
        f"--model_name_or_path {folder}/base --lora_r 3 --use_dora --chat_template chatml "
        f"{ALL_ROWS} --max_steps 3 --dataset {folder}/chats.jsonl --output_dir {folder}/run",
    )
    return folder


@long_form
@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param(accelerate("cpu_ddp"), id="DDP"),
        pytest.param(accelerate("fsdp2"), id="FSDP2"),
    ],
)
def test_the_first_step_from_an_adapter_is_the_next_step_of_its_run(
    launcher: list[str], folder: Path, tmp_path: Path
) -> None:
    checkpoint = folder / "run" / "checkpoints" / "step-00000002"

    train(
        FINETUNE,
        f"--model_name_or_path {checkpoint} --continue_adapter {ALL_ROWS} --max_steps 1 "
        f"--dataset {folder}/chats.jsonl --output_dir {tmp_path}",
        launcher=launcher,
    )

    for key in ("train/loss", "train/grad_norm"):
        third_step = series(folder / "run", key)[3]
        assert series(tmp_path, key)[1] == pytest.approx(third_step, rel=1e-5), key
    assert not [*folder.rglob("merged*")]

    # AdamW's first step changes each value by at most the learning rate, and its weight decay.
    before = dict(read_tensors(checkpoint / "model"))
    after = dict(read_tensors(tmp_path / "model"))
    assert after.keys() == before.keys()
    for name, tensor in after.items():
        largest_change = (tensor - before[name]).abs().max()
        assert 0 < largest_change < 1.05 * LEARNING_RATE, name


def test_the_reference_of_preferences_is_the_adapter_before_training(
    folder: Path, tmp_path: Path
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)

    train(
        PREFERENCE,
        f"--model_name_or_path {folder}/run --continue_adapter --max_steps 2 "
        f"--dataset {pairs} --output_dir {tmp_path}/run",
    )

    # The loss of DPO is log 2 if the model equals its reference.
    losses = series(tmp_path / "run", "train/loss")
    assert losses[1] == pytest.approx(math.log(2), abs=1e-6)
    assert losses[2] != pytest.approx(math.log(2), abs=1e-3)


@long_form
def test_a_merged_reward_model_has_the_scores_of_its_adapter_and_head(
    folder: Path, tmp_path: Path
) -> None:
    """It is trained sharded, in bfloat16, and with rows for the tokens of a template."""
    pairs = write_pairs(tmp_path / "pairs.jsonl", 16)
    run = tmp_path / "run"
    train(
        PREFERENCE,
        f"--model_name_or_path {folder}/base --lora_r 2 --loss_type reward "
        f"--chat_template chatml --max_steps 2 --dataset {pairs} --output_dir {run}",
        launcher=accelerate("fsdp2"),
    )

    main(["export", str(run), "--merge"])

    adapted = AutoPeftModelForSequenceClassification.from_pretrained(run / "model", num_labels=1)
    merged = AutoModelForSequenceClassification.from_pretrained(run / "merged")
    token_ids = torch.arange(200, 259)[None]
    with torch.no_grad():
        expected = adapted.eval()(token_ids).logits
        scores = merged.eval()(token_ids).logits
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-5)
