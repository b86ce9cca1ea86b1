"""Data as people have it: each kind in one command, with the right targets, training, eval and stock generation."""

import gzip
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from llmtrain.data import tokenizer as tok
from tests.forked import run_forked
from tests.launching import FINETUNE, PREFERENCE, PYTHON, SMALL_LLAMA, series, write_text

END = "<|im_end|>"
# The marks around targets in a dry run, and how they are written below.
MARKS = {
    "\N{SINGLE LEFT-POINTING ANGLE QUOTATION MARK}": "[[",
    "\N{SINGLE RIGHT-POINTING ANGLE QUOTATION MARK}": "]]",
}
COUNT = 24


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base model, whose tokenizer has no chat template."""
    folder = tmp_path_factory.mktemp("base")
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    words.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def write_alpaca(folder: Path) -> list[str]:
    records = [
        {"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(COUNT)
    ]
    (folder / "alpaca.json").write_text(json.dumps(records))
    return ["--dataset", str(folder / "alpaca.json")]


TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look it up.",
        "parameters": {"type": "object", "properties": {"limit": {"default": None}}},
    },
}


def write_sharegpt(folder: Path) -> list[str]:
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
    return ["--dataset", str(folder / "sharegpt.json.gz")]


def write_hub_folder(folder: Path) -> list[str]:
    (folder / "ultra" / "data").mkdir(parents=True)
    for split, first in (("train_sft", 0), ("test_sft", 100), ("train_gen", 200)):
        rows = [
            {
                "prompt": f"p{i}",
                "messages": [
                    {"role": "user", "content": f"ask {i}"},
                    {"role": "assistant", "content": f"It is {i}."},
                ],
            }
            for i in range(first, first + COUNT)
        ]
        path = folder / "ultra" / "data" / f"{split}-00000-of-00001.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    return [
        *("--dataset", str(folder / "ultra")),
        *("--dataset_train_split", "train_sft", "--dataset_test_split", "test_sft"),
    ]


def write_completions(folder: Path) -> list[str]:
    lines = [json.dumps({"prompt": f"{i} =", "completion": f" {i}."}) for i in range(COUNT)]
    (folder / "plain.jsonl").write_text("\n".join(lines))
    return ["--dataset", str(folder / "plain.jsonl")]


def write_pairs(folder: Path) -> list[str]:
    records = [
        {"prompt": f"{i} =", "chosen": f" {i}.", "rejected": f" {i + 1}!"} for i in range(COUNT)
    ]
    (folder / "pairs.json").write_text(json.dumps({"data": records}))
    return ["--dataset", str(folder / "pairs.json")]


def write_mixture(folder: Path) -> list[str]:
    chats = write_alpaca(folder)[1]
    text = write_text(folder / "corpus.txt", sentences=60)
    return ["--dataset", chats, str(text), "--mixture", "3", "1"]


def write_weights(folder: Path) -> list[str]:
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
    return ["--dataset", str(folder / "openai.jsonl")]


CALL = '<tool_call>\n{"name": "search", "arguments": {"limit": null, "page": PAGE}}\n</tool_call>'
# What writes the data and returns the flags, the recipe, whether the model is the base model, and the targets of the
# record with the number in the dry run's first row.
KINDS: dict[str, tuple[Callable[[Path], list[str]], str, bool, list[str]]] = {
    "an Alpaca array": (write_alpaca, FINETUNE, False, ["[[It is N.<|im_end|>]]"]),
    "ShareGPT with tools": (
        write_sharegpt,
        FINETUNE,
        False,
        [f"[[{CALL.replace('PAGE', 'N')}{END}]]", f"[[It is N.{END}]]"],
    ),
    "splits of a hub folder": (write_hub_folder, FINETUNE, False, [f"[[It is N.{END}]]"]),
    "plain completions": (write_completions, FINETUNE, True, ["N =[[ N.<|endoftext|>]]"]),
    "plain pairs": (write_pairs, PREFERENCE, True, ["N =[[ N.<|endoftext|>]]"]),
    "conversations and text": (write_mixture, FINETUNE, False, [f"[[It is N.{END}]]"]),
    "weights of messages": (write_weights, FINETUNE, False, [f"[[It is N.{END}]]"]),
}


@pytest.mark.parametrize(("write", "recipe", "is_base", "targets"), KINDS.values(), ids=KINDS)
def test_data_train_as_people_have_them_in_one_command(
    tmp_path: Path,
    base: Path,
    write: Callable[[Path], list[str]],
    recipe: str,
    is_base: bool,
    targets: list[str],
) -> None:
    flags = write(tmp_path)
    if is_base:
        flags += ["--model_name_or_path", str(base)]
    elif recipe == FINETUNE:
        flags += [*SMALL_LLAMA[:2], "--tokenizer", "byte"]
    folder = tmp_path / "run"
    flags += ["--global_batch_size", "4", "--max_steps", "4", "--logging_steps", "1"]
    flags += ["--report_to", "none", "--learning_rate", "1e-2", "--output_dir", str(folder)]

    dry = run_forked([*PYTHON, recipe, *flags, "--dry_run"]).assert_ok().out
    dry = dry.translate({ord(mark): text for mark, text in MARKS.items()})
    numbers = [i for i in range(COUNT) if targets[-1].replace("N", str(i)) in dry]
    assert len(numbers) > 1
    for number in numbers:
        for target in targets:
            assert target.replace("N", str(number)) in dry
    assert "[[a wrong answer" not in dry
    assert "[[ask" not in dry
    assert not folder.exists()

    run_forked([*PYTHON, recipe, *flags]).assert_ok()
    losses = [*series(folder, "train/loss").values()]
    assert len(losses) == 4
    assert all(map(math.isfinite, [*losses, *series(folder, "eval/loss").values()]))
    if "corpus.txt" in " ".join(flags):
        assert series(folder, "eval/loss/corpus")
        assert series(folder, "eval/loss/alpaca")

    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    words = AutoTokenizer.from_pretrained(folder / "model")
    prompt = words("7 =", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] <= prompt["input_ids"].shape[1] + 4
    assert (words.chat_template is None) == is_base
