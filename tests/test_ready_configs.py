"""recipes/configs: each file is what --print_config prints, and trains a tiny model of its class."""

import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.config.command_line import parse
from llmtrain.config.yaml_file import settings_in
from llmtrain.data.tokenizer import as_pretrained, set_template, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.launching.accelerator import forget_accelerator
from recipes import finetune
from tests.launching import ROOT, long_form, write_chats
from tests.multimodal import write_checkpoint

CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
# These are trained by `make test`, and the others by its long form.
TRAINED_ALWAYS = ["qwen3-0.6b-lora", "qwen1.5-1.8b-kto"]

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}
EXPERTS = {
    "num_hidden_layers": 24,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 16,
}
# The type of each model in transformers, and how its tiny stand-in differs from others. A name
# with a capital is a multimodal class of tests/multimodal.py.
STAND_INS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-0.6B": ("qwen3", {"tie_word_embeddings": True}),
    "Qwen/Qwen3.5-4B": ("Qwen3_5", {}),
    "meta-llama/Llama-3.1-8B": ("llama", {}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", {}),
    "google/gemma-3-4b-it": ("Gemma3", {}),
    "mistralai/Mistral-7B-Instruct-v0.3": ("mistral", {}),
    "allenai/OLMo-2-0425-1B": ("olmo2", {}),
    "unsloth/gpt-oss-20b-BF16": ("gpt_oss", EXPERTS),
    "alignment-handbook/zephyr-7b-sft-full": ("mistral", {}),
    "trl-lib/qwen1.5-1.8b-sft": ("qwen2", {}),
    "Qwen/Qwen2-0.5B-Instruct": ("qwen2", {"tie_word_embeddings": True}),
}


@pytest.fixture(autouse=True)
def _one_after_the_other() -> Iterator[None]:
    yield
    forget_accelerator()


def command_in(path: Path) -> str:
    """The command in the comment of a file."""
    (command,) = re.findall(r"^#   (accelerate launch .*)$", path.read_text(), re.MULTILINE)
    return str(command)


def recipe_of(path: Path) -> dict[str, Any]:
    (recipe,) = re.findall(r"recipes/\w+\.py", command_in(path))
    return runpy.run_path(str(ROOT / recipe))


def printed(recipe: dict[str, Any], capsys: pytest.CaptureFixture, *argv: str) -> str:
    """What --print_config prints."""
    capsys.readouterr()
    with pytest.raises(SystemExit):
        parse(recipe["DEFAULTS"], [*argv, "--print_config"])
    return str(capsys.readouterr().out)


@each_config
def test_a_file_is_what_print_config_prints_and_sets_only_what_differs(
    path: Path, capsys: pytest.CaptureFixture
) -> None:
    recipe = recipe_of(path)
    text = printed(recipe, capsys, "--config", str(path))
    written = [line for line in path.read_text().splitlines() if re.match(r"\w", line)]
    assert [line for line in text.splitlines() if re.match(r"\w", line)] == written

    defaults = settings_in(printed(recipe, capsys))
    for name, value in yaml.safe_load(text).items():
        assert value != defaults[name], name


def write_stand_in(name: str, folder: Path) -> None:
    """Write a tiny model of the class of a named model, with a tokenizer that has a template."""
    model_type, sizes = STAND_INS[name]
    if model_type[0].isupper():
        write_checkpoint(model_type, folder)
        return
    config = AutoConfig.for_model(model_type, **{**SMALL, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def write_data(content: dict[str, Any], folder: Path) -> None:
    """Write a data set with the splits that a file names, and records for its job."""
    records: list[dict[str, Any]] = []
    for number in range(20):
        question = f"{number} and 1?"
        answer = f"{number + 1}"
        if "from_config" in content:
            records.append({"text": f"{number} and 1 are {answer}. " * 10})
        elif content.get("loss_type") == ["kto"]:
            records.append({"prompt": question, "completion": "yes", "label": number % 2 == 0})
        elif "beta" in content or "loss_type" in content:
            records.append({"prompt": question, "chosen": answer, "rejected": "no"})
        else:
            records.append({"messages": [message("user", question), message("assistant", answer)]})
    splits = {content.get("dataset_train_split", "train"): Dataset.from_list(records)}
    if "dataset_test_split" in content:
        splits[content["dataset_test_split"]] = Dataset.from_list(records[:4])
    for split, rows in splits.items():
        rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TRAINING = "--max_length 64 --global_batch_size 4 --max_steps 2 --warmup_steps 1 --report_to none"


@pytest.mark.parametrize(
    "path",
    [
        path if path.stem in TRAINED_ALWAYS else pytest.param(path, marks=long_form)
        for path in CONFIGS
    ],
    ids=lambda path: path.stem,
)
def test_a_file_trains_a_tiny_model_of_its_class(path: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    model_flag = "model_name_or_path" if "model_name_or_path" in content else "from_config"
    write_stand_in(content[model_flag], tmp_path / "model")
    write_data(content, tmp_path / "data")
    paths = f"--{model_flag} {tmp_path}/model --dataset {tmp_path}/data --output_dir {tmp_path}/run"
    tokenizer = f"--tokenizer {tmp_path}/model" if "tokenizer" in content else ""

    flags = shlex.split(f"--config {path} {TRAINING} {paths} {tokenizer}")
    recipe_of(path)["main"](flags)

    is_adapter = "lora_r" in content
    weights = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    assert (tmp_path / "run" / "model" / weights).is_file()


def test_a_model_of_a_class_that_transformers_lacks_is_one_line(tmp_path: Path) -> None:
    write_stand_in("Qwen/Qwen3-0.6B", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "of_next_year"}')
    chats = write_chats(tmp_path / "chats.jsonl")
    flags = f"--model_name_or_path {tmp_path}/model --dataset {chats} --output_dir {tmp_path}/run"

    with pytest.raises(UserError, match="of_next_year") as caught:
        finetune.main(shlex.split(f"{flags} {TRAINING}"))
    assert "\n" not in str(caught.value)
