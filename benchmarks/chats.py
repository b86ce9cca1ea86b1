"""Preparing conversations: files to rows, beside ``apply_chat_template`` alone and beside TRL.

The least that any preparation does is one ``apply_chat_template`` with its mask per conversation.

python -m benchmarks.chats
"""

import json
import os
import random
import time
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.comparison import Row, in_turn, report
from benchmarks.inputs import write_tokenizer
from benchmarks.runs import peer, scratch
from llmtrain import ChatConfig, DataConfig, tokenize
from llmtrain.data import builtin
from llmtrain.launching.process import launch

# Turns of a conversation, conversations, and the largest ratio to aim at.
SIZES = [(1, 3000, 1.3), (4, 1000, 1.3), (10, 400, 1.3), (40, 100, 3.0)]
MANY = 40_000  # conversations of one turn, for several processes
LONGEST = 16_384


def write_conversations(path: Path, turns: int, count: int) -> Path:
    """Write conversations of words from Python's documentation, each of ``turns`` turns."""
    words = " ".join(record["text"] for record in builtin.python_docs()).split()
    draw = random.Random(turns)

    def text(fewest: int, most: int) -> str:
        length = draw.randint(fewest, most)
        start = draw.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(turns):
                messages.append({"role": "user", "content": text(10, 60)})
                messages.append({"role": "assistant", "content": text(20, 120)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def ours(folder: Path, path: Path, processes: int) -> float:
    """Return the seconds from the file to packed rows on disk."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / f"cache-{time.monotonic_ns()}")
    data = DataConfig(dataset=[str(path)], tokenizer=str(folder / "tokenizer"), eval_fraction=0.0)
    chat = ChatConfig(dataset_num_proc=processes)
    began = time.perf_counter()
    tokenize(data, LONGEST, chat)
    return time.perf_counter() - began


def template_alone(tokenizer: Any, path: Path) -> float:
    """Return the seconds of reading the file and applying the template to each conversation."""
    began = time.perf_counter()
    with path.open() as file:
        for line in file:
            tokenizer.apply_chat_template(
                json.loads(line)["messages"],
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
    return time.perf_counter() - began


def of_trl(folder: Path, path: Path) -> float:
    """Return the seconds in which TRL makes packed rows, in a process of its own."""
    cache = folder / f"trl-{time.monotonic_ns()}"
    return peer(
        "sft-preparation", folder / "tokenizer", path, "--length", LONGEST, "--cache", cache
    )


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rows = []
    with scratch() as folder:
        write_tokenizer(folder / "tokenizer", chat=True)
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", model_max_length=1 << 20)
        for turns, count, target in SIZES:
            path = write_conversations(folder / f"{turns}.jsonl", turns, count)
            found = in_turn(
                {
                    "ours": partial(ours, folder, path, processes=1),
                    "template": partial(template_alone, tokenizer, path),
                    "trl": partial(of_trl, folder, path),
                },
                rounds=5,
            )
            work = f"{count} conversations of {turns} turns to rows, one process"
            rows.append(
                Row(
                    work,
                    "apply_chat_template with its mask",
                    found["ours"].value,
                    found["template"].value,
                    "s",
                    f"<= {target}",
                )
            )
            rows.append(Row(work, "TRL", found["ours"].value, found["trl"].value, "s", "<= 1.0"))

        many = write_conversations(folder / "many.jsonl", turns=1, count=MANY)
        found = in_turn(
            {
                "two": partial(ours, folder, many, processes=2),
                "one": partial(ours, folder, many, processes=1),
            },
            rounds=3,
        )
        rows.append(
            Row(
                f"{MANY:,} conversations of 1 turn to rows, two processes",
                "one process",
                found["two"].value,
                found["one"].value,
                "s",
                "<= 0.6",
            )
        )
    report("chats", rows)


if __name__ == "__main__":
    launch(main)
