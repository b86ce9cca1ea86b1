"""Text to rows beside datasets.map, and rows to batches beside what a step of training needs.

python -m benchmarks.data
"""

import json
import os
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import BIN, peer, run, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, launch, make_optimizer, prepare, say, start_accelerator
from llmtrain.data.builtin import python_docs
from llmtrain.data.loader import train_loader
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.training.loop import train_step

MEGABYTES, BLOCK, ROWS = 100, 256, 32


def write_text(path: Path) -> int:
    """The Python files of this interpreter and its packages, a document each; returns their bytes."""
    size = 0
    with path.open("w") as file:
        for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
            for source in sorted(Path(folder).rglob("*.py")):
                text = source.read_bytes().decode(errors="replace")
                if text.strip() and size < MEGABYTES * 10**6:
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return size


def write_tokenizer(folder: Path) -> None:
    texts = [record.value["text"] if isinstance(record.value, dict) else str(record.value) for record in python_docs()]
    as_pretrained(train_tokenizer("bpe:4096", texts, lambda: iter(texts)), BLOCK).save_pretrained(folder)
