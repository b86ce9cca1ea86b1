"""Seconds to prepare conversations: from a file to packed rows on disk.

| measured | compared with |
|---|---|
| conversations of 1, 4, 10 and 40 turns, in one process | one apply_chat_template with its mask each |
| the same | the preparation of TRL's SFTTrainer, packed and with a loss mask |
| 40,000 conversations of one turn, in two processes | the same in one process |

Any preparation renders each conversation with its mask once, so the first comparison is with a
part of the work.

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.chats`.
"""

import json
import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from benchmarks.comparison import Table, take_turns
from benchmarks.inputs import write_tokenizer
from benchmarks.runs import run_peer, scratch
from llmtrain import ChatConfig, DataConfig, tokenize
from llmtrain.data import builtin
from llmtrain.launching.process import launch


@dataclass(frozen=True)
class Conversations:
    """Generated conversations, and the aim for the ratio to the template's seconds."""

    turns: int
    count: int
    target: str


CONVERSATIONS = [
    Conversations(turns=1, count=3000, target="<= 1.3"),
    Conversations(turns=4, count=1000, target="<= 1.3"),
    Conversations(turns=10, count=400, target="<= 1.3"),
    Conversations(turns=40, count=100, target="<= 3.0"),
]
COUNT_FOR_TWO_PROCESSES = 40_000
ROW_LENGTH = 16_384


def write_conversations(path: Path, turns: int, count: int) -> Path:
    """Write conversations of ``turns`` turns with random passages of Python's documentation."""
    text = " ".join(document["text"] for document in builtin.python_docs())
    words = text.split()
    generator = random.Random(turns)

    def passage(fewest: int, most: int) -> str:
        length = generator.randint(fewest, most)
        start = generator.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    with path.open("w") as file:
        for _ in range(count):
            messages = []
            for _ in range(turns):
                messages.append({"role": "user", "content": passage(10, 60)})
                messages.append({"role": "assistant", "content": passage(20, 120)})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def prepare(folder: Path, conversations: Path, processes: int) -> float:
    """Return the seconds of llmtrain with an empty cache."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / f"cache-{time.monotonic_ns()}")
    data = DataConfig(
        dataset=[str(conversations)],
        tokenizer=str(folder / "tokenizer"),
        eval_fraction=0.0,
    )
    chat = ChatConfig(dataset_num_proc=processes)

    start = time.perf_counter()
    tokenize(data, ROW_LENGTH, chat)
    return time.perf_counter() - start


def apply_template(tokenizer: Any, conversations: Path) -> float:
    """Return the seconds of reading the file and applying the template to each conversation."""
    start = time.perf_counter()
    with conversations.open() as file:
        for line in file:
            tokenizer.apply_chat_template(
                json.loads(line)["messages"],
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
    return time.perf_counter() - start


def prepare_with_trl(folder: Path, conversations: Path) -> float:
    """Return the seconds of TRL with an empty cache, without the start of its process."""
    return run_peer(
        "sft-preparation",
        folder / "tokenizer",
        conversations,
        length=ROW_LENGTH,
        cache=folder / f"trl-{time.monotonic_ns()}",
    )


def main() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    table = Table("chats")
    with scratch() as folder:
        write_tokenizer(folder / "tokenizer", has_template=True)
        compare_with_others(table, folder)
        compare_processes(table, folder)
    table.write()


def compare_with_others(table: Table, folder: Path) -> None:
    """Add the rows about one process, the template and TRL."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer", model_max_length=1 << 20)
    for case in CONVERSATIONS:
        file = folder / f"{case.turns}.jsonl"
        conversations = write_conversations(file, case.turns, case.count)
        seconds = take_turns(
            {
                "llmtrain": partial(prepare, folder, conversations, processes=1),
                "template": partial(apply_template, tokenizer, conversations),
                "TRL": partial(prepare_with_trl, folder, conversations),
            },
            rounds=5,
        )
        work = f"{case.count} conversations of {case.turns} turns to rows, one process"
        table.add(
            work=work,
            against="apply_chat_template with its mask",
            ours=seconds["llmtrain"].median,
            theirs=seconds["template"].median,
            unit="s",
            target=case.target,
        )
        table.add(
            work=work,
            against="TRL",
            ours=seconds["llmtrain"].median,
            theirs=seconds["TRL"].median,
            unit="s",
            target="<= 1.0",
        )


def compare_processes(table: Table, folder: Path) -> None:
    """Add the row about two processes."""
    count = COUNT_FOR_TWO_PROCESSES
    conversations = write_conversations(folder / "many.jsonl", turns=1, count=count)
    seconds = take_turns(
        {
            "two": partial(prepare, folder, conversations, processes=2),
            "one": partial(prepare, folder, conversations, processes=1),
        },
        rounds=3,
    )
    table.add(
        work=f"{count:,} conversations of 1 turn to rows, two processes",
        against="one process",
        ours=seconds["two"].median,
        theirs=seconds["one"].median,
        unit="s",
        target="<= 0.6",
    )


if __name__ == "__main__":
    launch(main)
