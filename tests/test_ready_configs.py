"""recipes/configs: each file is what --print_config prints, and trains a tiny model of its class."""

import json
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
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from docs.tables.memory_table import MEASURED_MODELS, MODELS
from llmtrain.cli import main as llmtrain
from llmtrain.config.command_line import parse
from llmtrain.config.yaml_file import settings_in
from llmtrain.data.tokenizer import as_pretrained, set_template, train_tokenizer
from llmtrain.devices import RESERVED_MEMORY
from llmtrain.errors import UserError
from llmtrain.files import write_json
from llmtrain.lab.plan.hardware import PlanRequest
from llmtrain.lab.plan.layouts import plan_layout, plan_without_layouts, shardings
from llmtrain.launching.accelerator import forget_accelerator
from recipes import finetune
from tests.launching import ROOT, long_form, write_chats
from tests.multimodal import write_checkpoint

CONFIGS = sorted((ROOT / "recipes" / "configs").glob("*.yaml"))
each_config = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
# These are trained by `make test`, and the others by its long form.
TRAINED_ALWAYS = ["qwen3-0.6b-lora", "qwen3-1.7b-kto", "gpt-124m"]

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
_SMOLLM3: dict[str, Any] = {"model_type": "smollm3", "tie_word_embeddings": True}
# What the config.json of each model on the hub says about its size. For a size that is absent, it
# has the default of its class in transformers.
SIZES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-0.6B": MODELS["Qwen3-0.6B"],
    "Qwen/Qwen3-1.7B": MODELS["Qwen3-1.7B"],
    "Qwen/Qwen3-4B": MODELS["Qwen3-4B"],
    "HuggingFaceTB/SmolLM3-3B": _SMOLLM3,
    "HuggingFaceTB/SmolLM3-3B-Base": _SMOLLM3,
    "meta-llama/Llama-3.1-8B-Instruct": MEASURED_MODELS["Llama 8B"],
    "mistralai/Ministral-3-8B-Instruct-2512-BF16": {
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3"},
        "tie_word_embeddings": False,
    },
    "google/gemma-4-12B-it": {
        "model_type": "gemma4_unified",
        "text_config": {
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
    },
    "Qwen/Qwen3.5-27B": {
        "model_type": "qwen3_5",
        "text_config": {
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "linear_num_value_heads": 48,
        },
    },
    "allenai/Olmo-3-1025-7B": {
        "model_type": "olmo3",
        "vocab_size": 100278,
        "max_position_embeddings": 65536,
    },
    "unsloth/gpt-oss-20b-BF16": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 24,
        "num_local_experts": 32,
    },
}
# The classes in tests/multimodal.py of multimodal models, and how other tiny models differ.
STAND_INS: dict[str, Any] = {
    "mistral3": "Mistral3",
    "gemma4_unified": "Gemma4Unified",
    "qwen3_5": "Qwen3_5",
    "smollm3": {"pad_token_id": 0},
    "olmo3": {"sliding_window": 16},
    "gpt_oss": {
        "num_hidden_layers": 24,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "sliding_window": 16,
    },
}
# How the names of data sets of text begin.
TEXTS = ("HuggingFaceFW/", "HuggingFaceTB/finemath")
# The layout of each accelerate config.
LAYOUTS = {"single_gpu": "one process", "multi_gpu": "DDP", "fsdp2": "FSDP2"}


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


@each_config
def test_the_page_has_the_memory_in_the_comment(path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "ready-configs.md").read_text()
    [memory] = re.findall(r"predicts (\d+ GiB)", path.read_text())
    assert re.search(rf"^\|.*/{re.escape(path.name)}\).*\| {memory},", page, re.MULTILINE)


@each_config
def test_init_copies_a_file_with_its_recipe(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "mine"
    llmtrain(["init", str(folder), "--recipe", path.stem, "--json"])
    start = json.loads(capsys.readouterr().out)["start"]

    assert Path(start[-3]).read_text() == (ROOT / "recipes" / Path(start[-3]).name).read_text()
    assert start[-2:] == ["--config", str(folder / path.name)]
    assert shlex.join(start) in (folder / path.name).read_text()


def write_stand_in(name: str, folder: Path) -> None:
    """Write a tiny model of the class of a named model, with a tokenizer that has a template."""
    model_type = SIZES[name]["model_type"]
    stand_in = STAND_INS.get(model_type, {})
    if isinstance(stand_in, str):
        write_checkpoint(stand_in, folder)
        return
    tied = {"tie_word_embeddings": SIZES[name].get("tie_word_embeddings", False)}
    config = AutoConfig.for_model(model_type, **{**SMALL, **tied, **stand_in})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path, vocabulary: int = 257) -> None:
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 64)
    tokenizer.add_tokens([f"<{number}>" for number in range(vocabulary - len(tokenizer))])
    set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def write_data(content: dict[str, Any], folder: Path) -> None:
    """Write a data set with the splits that a file names, and records for its job."""
    records: list[dict[str, Any]] = []
    for number in range(20):
        question = f"{number} and 1?"
        answer = f"{number + 1}"
        if content["dataset"][0].startswith(TEXTS):
            records.append({"text": f"{number} and 1 are {answer}. " * 100})
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


TRAINING = "--global_batch_size 4 --max_steps 2 --warmup_steps 1 --report_to none"
TINY_GPT = "--n_layer 2 --n_head 2 --n_embd 32"
tried_always = pytest.mark.parametrize(
    "path",
    [
        path if path.stem in TRAINED_ALWAYS else pytest.param(path, marks=long_form)
        for path in CONFIGS
    ],
    ids=lambda path: path.stem,
)


@tried_always
def test_a_file_trains_a_tiny_model_of_its_class(path: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(path.read_text())
    write_data(content, tmp_path / "data")
    flags = f"--config {path} --max_length 64 {TRAINING} --output_dir {tmp_path}/run"
    flags += f" --dataset {tmp_path}/data"
    for name in {"model_name_or_path", "teacher_model_name_or_path"} & content.keys():
        write_stand_in(content[name], tmp_path / name)
        flags += f" --{name} {tmp_path}/{name}"
    if "model_name_or_path" not in content:
        write_tokenizer(tmp_path / "model")
        flags += f" {TINY_GPT} --tokenizer {tmp_path}/model"

    recipe_of(path)["main"](shlex.split(flags))

    is_adapter = "lora_r" in content
    weights = "adapter_model.safetensors" if is_adapter else "model.safetensors"
    assert (tmp_path / "run" / "model" / weights).is_file()


@tried_always
def test_the_comment_has_what_plan_predicts_for_the_model_at_full_size(
    path: Path, tmp_path: Path
) -> None:
    content = yaml.safe_load(path.read_text())
    folder = tmp_path / "model"
    write_data(content, tmp_path / "data")
    flags = f"--config {path} --dataset {tmp_path}/data --max_steps 20000"
    for name in {"model_name_or_path", "teacher_model_name_or_path"} & content.keys():
        write_tokenizer(tmp_path / name)
        write_json(tmp_path / name / "config.json", SIZES[content[name]])
        flags += f" --{name} {tmp_path}/{name}"
    if "model_name_or_path" not in content:
        write_tokenizer(folder, vocabulary=50257)
        flags += f" --tokenizer {folder}"
    command = command_in(path)
    [(config, recipe)] = re.findall(r"accelerate_configs/(\w+).* (recipes/\w+\.py)", command)
    [processes] = map(int, re.findall(r"--num_processes (\d+)", command) or [1])

    request = PlanRequest(str(ROOT / recipe), shlex.split(flags), processes, "h100-80gb")
    plan = plan_without_layouts(request)
    sharding = dict(shardings(processes, per_machine=8))[LAYOUTS[config]]
    planned = plan.memory.recipe
    share = planned.settings.data.global_batch_size // processes
    rows = min(planned.settings.data.per_device_train_batch_size, share)
    layout = plan_layout(plan, plan.memory, LAYOUTS[config], sharding, rows=rows)

    if isinstance(planned.model, PreTrainedModel):
        text_config = planned.model.config.get_text_config()
        size = f"{text_config.num_hidden_layers} layers x {text_config.hidden_size}"
    else:
        size = f"{content['n_layer']} layers x {content['n_embd']}"
    gpus = "an H100" if processes == 1 else f"each of {processes} H100"
    memory = f"{layout.bytes.total / 2**30:.0f} GiB on {gpus} ({planned.class_name}, {size})"
    comment = path.read_text().partition("\n#\n")[0].replace("\n# ", " ")
    assert memory in comment
    assert layout.bytes.total < (1 - RESERVED_MEMORY) * plan.device.memory
    is_text = content["dataset"][0].startswith(TEXTS)
    assert ("does not pack" in comment) == (not is_text and not planned.rows.is_packed)


def test_a_model_of_a_class_that_transformers_lacks_is_one_line(tmp_path: Path) -> None:
    write_stand_in("Qwen/Qwen3-0.6B", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "of_next_year"}')
    chats = write_chats(tmp_path / "chats.jsonl")
    flags = f"--model_name_or_path {tmp_path}/model --dataset {chats} --output_dir {tmp_path}/run"

    with pytest.raises(UserError, match="of_next_year") as caught:
        finetune.main(shlex.split(f"{flags} {TRAINING}"))
    assert "\n" not in str(caught.value)
