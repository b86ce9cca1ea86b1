"""Data in the formats that people have: one command trains on each, with the right targets."""

import gzip
import json
import math
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmtrain.data import tokenizer as tok
from tests.command_line import run_cli
from tests.forked import run_forked
from tests.launching import FINETUNE, PREFERENCE, PYTHON, SMALL_SIZE, series, write_text

END = "<|im_end|>"
# The command marks targets with angle quotation marks, which the tests write as brackets.
TO_BRACKETS = str.maketrans(
    {
        "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}": "[[",
        "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}": "]]",
    }
)
COUNT = 24  # records of each data set


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small base model, whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# --- data sets
# Each function writes one, and returns the flags that name it. The record with number N ends with
# the answer N.


def write_alpaca(folder: Path) -> str:
    records = [
        {"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(COUNT)
    ]
    (folder / "alpaca.json").write_text(json.dumps(records))
    return f"--dataset {folder}/alpaca.json"


TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"limit": {"default": None}}},
    },
}


def write_sharegpt(folder: Path) -> str:
    records = []
    for i in range(COUNT):
        call = {"name": "search", "arguments": {"limit": None, "page": i}}
        conversation = [
            {"from": "human", "value": f"find {i}"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": f"found {i}"},
            {"from": "gpt", "value": f"It is {i}."},
        ]
        records.append({"conversations": conversation, "tools": json.dumps([TOOL])})
    with gzip.open(folder / "sharegpt.json.gz", "wt") as file:
        json.dump(records, file)
    return f"--dataset {folder}/sharegpt.json.gz"


def write_hub_folder(folder: Path) -> str:
    """Write Parquet files of three splits, as in a data set of the hub."""
    data = folder / "ultra" / "data"
    data.mkdir(parents=True)
    for split, first in (("train_sft", 0), ("test_sft", 100), ("train_gen", 200)):
        rows = []
        for i in range(first, first + COUNT):
            messages = [
                {"role": "user", "content": f"ask {i}"},
                {"role": "assistant", "content": f"It is {i}."},
            ]
            rows.append({"prompt": f"p{i}", "messages": messages})
        path = data / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    return f"--dataset {folder}/ultra --dataset_train_split train_sft --dataset_test_split test_sft"


def write_completions(folder: Path) -> str:
    lines = [json.dumps({"prompt": f"{i} =", "completion": f" {i}."}) for i in range(COUNT)]
    (folder / "plain.jsonl").write_text("\n".join(lines))
    return f"--dataset {folder}/plain.jsonl"


def write_pairs(folder: Path) -> str:
    records = [
        {"prompt": f"{i} =", "chosen": f" {i}.", "rejected": f" {i + 1}!"} for i in range(COUNT)
    ]
    (folder / "pairs.json").write_text(json.dumps({"data": records}))
    return f"--dataset {folder}/pairs.json"


def write_mixture(folder: Path) -> str:
    """Write conversations and a text."""
    text = write_text(folder / "corpus.txt", sentences=60)
    return f"{write_alpaca(folder)} {text} --mixture 3 1"


def write_weights(folder: Path) -> str:
    lines = []
    for i in range(COUNT):
        messages = [
            {"role": "user", "content": f"ask {i}"},
            {"role": "assistant", "content": "a wrong answer", "weight": 0},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": f"It is {i}.", "weight": 1},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "openai.jsonl").write_text("\n".join(lines))
    return f"--dataset {folder}/openai.jsonl"


# --- runs


class Kind(NamedTuple):
    """A kind of data.

    Attributes:
        write: writes the data, and returns the flags that name it.
        targets: of the record with number N, as `llmtrain rows` shows them.
        recipe: trains on the data.
        has_chat_template: whether the recipe gives the model a chat template. Otherwise it trains
            the base model.
    """

    write: Callable[[Path], str]
    targets: list[str]
    recipe: str = FINETUNE
    has_chat_template: bool = True


TOOL_CALL = '{"name": "search", "arguments": {"limit": null, "page": N}}'
KINDS = {
    "an Alpaca array": Kind(write_alpaca, [f"[[It is N.{END}]]"]),
    "ShareGPT with tools": Kind(
        write_sharegpt,
        [f"[[<tool_call>\n{TOOL_CALL}\n</tool_call>{END}]]", f"[[It is N.{END}]]"],
    ),
    "splits of a hub folder": Kind(write_hub_folder, [f"[[It is N.{END}]]"]),
    "plain completions": Kind(
        write_completions, ["N =[[ N.<|endoftext|>]]"], has_chat_template=False
    ),
    "plain pairs": Kind(
        write_pairs, ["N =[[ N.<|endoftext|>]]"], recipe=PREFERENCE, has_chat_template=False
    ),
    "conversations and text": Kind(write_mixture, [f"[[It is N.{END}]]"]),
    "weights of messages": Kind(write_weights, [f"[[It is N.{END}]]"]),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_one_command_trains_on_the_data_with_the_right_targets(
    kind: Kind, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "run"
    model = f"--config_overrides {SMALL_SIZE} --tokenizer byte"
    if not kind.has_chat_template:
        model = f"--model_name_or_path {base}"
    flags = shlex.split(
        f"{kind.write(tmp_path)} {model} --global_batch_size 4 --max_steps 4 --logging_steps 1 "
        f"--learning_rate 1e-2 --report_to none --output_dir {folder}"
    )

    status, rows, err = run_cli(capsys, "rows", kind.recipe, *flags)
    assert status == 0, err
    assert not folder.exists()
    assert_targets(rows.translate(TO_BRACKETS), kind.targets)

    run_forked([*PYTHON, kind.recipe, *flags]).assert_ok()
    losses = series(folder, "train/loss")
    assert len(losses) == 4
    for loss in (*losses.values(), *series(folder, "eval/loss").values()):
        assert math.isfinite(loss)
    if kind.write is write_mixture:
        assert series(folder, "eval/loss/corpus")
        assert series(folder, "eval/loss/alpaca")
    assert_generates(folder / "model", kind.has_chat_template)


def assert_targets(rows: str, targets: list[str]) -> None:
    """Assert that rows show the targets of several records, and no others."""

    def target_of(number: int, template: str) -> str:
        # "N" is a number, unless it is part of a word.
        return re.sub(r"\bN\b", str(number), template)

    numbers = [i for i in range(COUNT) if target_of(i, targets[-1]) in rows]
    assert len(numbers) > 1
    for number in numbers:
        for target in targets:
            assert target_of(number, target) in rows
    assert "[[a wrong answer" not in rows
    assert "[[ask" not in rows


def assert_generates(folder: Path, has_chat_template: bool) -> None:
    """Assert that transformers generates with a model."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("7 =", return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=4, do_sample=False)

    prompt_length = prompt["input_ids"].shape[1]
    assert prompt_length < tokens.shape[1] <= prompt_length + 4
    assert (tokenizer.chat_template is not None) is has_chat_template
