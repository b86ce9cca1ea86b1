"""Run the commands of the tutorials as they stand, offline.

The hub names in a command, such as ``Qwen/Qwen3-0.6B``, are folders in the working folder of the
test. They hold small models and data sets in the layout of the hub, and a local folder takes
precedence over the hub. So the test runs the very command that a reader types.

Only blocks marked as ``sh`` run here. ``test_pages`` runs those marked as ``bash``, and checks the
flags of both.
"""

import json
import os
import random
import re
import shlex
import signal
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pyarrow
import pyarrow.parquet
import pytest

from llmtrain.data import builtin
from llmtrain.data import tokenizer as tok
from tests.data.chats import QWEN3
from tests.launching import (
    BIN,
    ROOT,
    long_form,
    read_json,
    start_process,
    wait,
    wait_for_log_entries,
    write_chats,
    write_pairs,
    write_text,
)

TUTORIALS = ROOT / "docs" / "tutorials"
# The commands of these pages run one after the other in one folder. The sh blocks of the other
# tutorials need several machines, kill their runs at a certain step, or are timed lessons.
JOURNEYS = {"pretrain": ["pretrain.md"], "align": ["finetune.md", "align.md"]}

# First words of commands that need a network or another program.
NOT_HERE = ("curl", "pip", "vllm")

# Commands that train on a builtin data set have been measured at their full length. Here they are
# short, and read a few documents.
SHORT = ["--max_steps", "3", "--eval_fraction", "0.002", "--max_train_samples", "200"]
# A model for a GPU is narrow here. It would take minutes, and 12 GB.
NARROW = ["--n_embd", "64"]


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        page: the name of the page.
        text: the command on one line.
        is_interrupted: whether the output below it shows that the reader presses Ctrl-C.
    """

    page: str
    text: str
    is_interrupted: bool


def commands_of(page: Path) -> list[Command]:
    """Return the commands in the sh blocks of a page."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    commands = []
    for index, (language, text) in enumerate(blocks):
        if language != "sh":
            continue

        outputs = ""
        for following, output in blocks[index + 1 :]:
            if following == "sh":
                break
            outputs += output

        lines = [
            " ".join(re.sub(r"(^|\s)#.*", "", line).split())
            for line in text.replace("\\\n", " ").splitlines()
        ]
        lines = [line for line in lines if line]
        for number, line in enumerate(lines, start=1):
            is_interrupted = number == len(lines) and "^C" in outputs
            commands.append(Command(page.name, line, is_interrupted))
    return commands


# --- what the commands find in their folder


def write_qwen3(folder: Path) -> None:
    """Write a small Qwen3 with a tokenizer and a chat template after the real one."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    text = ["user assistant system\n", "abcd dcba The answer is yes. " * 20]
    backend = tok.train_tokenizer("bpe:300", iter(text), lambda: iter(text))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = tok.as_pretrained(backend, block_size=2048)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(folder)

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)


def write_splits(folder: Path, records: list[dict[str, object]], eval_split: str = "test") -> None:
    """Write records as a data set in the layout of the hub, with an eval split."""
    (folder / "data").mkdir(parents=True)
    splits = {"train": records[5:], eval_split: records[:5]}
    for split, part in splits.items():
        table = pyarrow.Table.from_pylist(part)
        pyarrow.parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")


def write_preferences(folder: Path) -> None:
    """Write pairs with the fields of trl-lib/ultrafeedback_binarized."""
    write_pairs(folder / "pairs.jsonl", count=24)
    records = []
    for line in (folder / "pairs.jsonl").read_text().splitlines():
        pair = json.loads(line)
        question = {"role": "user", "content": pair["prompt"]}
        answers = {
            name: [question, {"role": "assistant", "content": pair[name]}]
            for name in ("chosen", "rejected")
        }
        records.append({**answers, "score_chosen": 8.0, "score_rejected": 6.5})
    write_splits(folder / "trl-lib" / "ultrafeedback_binarized", records)


def prepare(folder: Path) -> None:
    """Write what the commands of all tutorials read."""
    for name in ("recipes", "accelerate_configs", "docs"):
        (folder / name).symlink_to(ROOT / name)

    documents = islice(builtin.CORPORA["builtin:python-docs"](), 40)
    text = "\n".join(document["text"] for document in documents)
    (folder / "input.txt").write_text(text[:200_000])
    write_text(folder / "small.txt")

    write_qwen3(folder / "Qwen" / "Qwen3-0.6B")
    write_chats(folder / "chats.jsonl", count=24)
    chats = [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]
    for chat in chats:
        chat.update(source="made up", num_turns=len(chat["messages"]) // 2)
    write_splits(folder / "trl-lib" / "Capybara", chats)
    write_preferences(folder)

    draw = random.Random(0)
    names = ["Lily", "Tom", "the dog", "the bird", "Mum"]
    stories = [
        {"text": f"One day, {draw.choice(names)} saw {draw.choice(names)}. They were happy."}
        for _ in range(200)
    ]
    write_splits(folder / "roneneldan" / "TinyStories", stories, eval_split="validation")


# --- the test


def run_command(command: Command, folder: Path) -> str:
    """Run a command in a folder, and return what it printed.

    A command that the reader interrupts gets SIGINT when it has logged its first step.
    """
    environment = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "ACCELERATE_USE_CPU": "true",
        "WANDB_MODE": "offline",
    }
    text = command.text
    if "recipes/" in text and "builtin:" in text and "llmtrain plan" not in text:
        text = shlex.join([*shlex.split(text), *SHORT])
    if "recipes/" in text and "--n_embd 512" in text and "llmtrain plan" not in text:
        text = shlex.join([*shlex.split(text), *NARROW])

    is_simple = not set("|;&<>") & set(text)
    process = start_process(
        ["bash", "-ec", f"cd {folder}; {'exec ' if is_simple else ''}{text} < /dev/null"],
        environment,
    )
    if command.is_interrupted:
        words = shlex.split(text)
        run_folder = folder / words[words.index("--output_dir") + 1]
        wait_for_log_entries(process, run_folder, 3)
        process.send_signal(signal.SIGINT)

    ended = wait(process, timeout=300)
    expected = 130 if command.is_interrupted else 0
    assert ended.status == expected, (
        f"{command.page}: {text}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
    )
    return ended.out


@long_form
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("journey", JOURNEYS)
def test_the_commands_of_a_tutorial_run_as_they_stand(journey: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    for name in JOURNEYS[journey]:
        for command in commands_of(TUTORIALS / name):
            if not command.text.startswith(NOT_HERE):
                run_command(command, tmp_path)

    for status in (tmp_path / "runs").glob("*/status.json"):
        assert read_json(status)["state"] == "finished", status
