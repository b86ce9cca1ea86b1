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
from benchmarks.runs import peer, run, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, launch, make_optimizer, prepare, start_accelerator
from llmtrain.data.builtin import python_docs
from llmtrain.data.chat import set_template
from llmtrain.data.loader import train_loader
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer
from llmtrain.training.loop import train_step

MEGABYTES, BLOCK, ROWS = 100, 256, 32


def write_text(path: Path, megabytes: int = MEGABYTES) -> int:
    """The Python files of this interpreter and its packages, a document each; returns their bytes."""
    size = 0
    with path.open("w") as file:
        for folder in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
            for source in sorted(Path(folder).rglob("*.py")):
                text = source.read_bytes().decode(errors="replace")
                if text.strip() and size < megabytes * 10**6:
                    file.write(json.dumps({"text": text}) + "\n")
                    size += len(text.encode())
    return size


def write_tokenizer(folder: Path, chat: bool = False) -> None:
    """Of 4,096 tokens; for conversations it has a template."""
    texts = [record["text"] for record in python_docs()]
    tokenizer = as_pretrained(train_tokenizer("bpe:4096", texts, lambda: iter(texts)), BLOCK)
    if chat:
        set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def preparing(text: Path, tokenizer: Path) -> None:
    """As in a first run, with nothing cached: prints the seconds."""
    began = time.perf_counter()
    prepare(DataConfig(dataset=[str(text)], tokenizer=str(tokenizer), eval_fraction=0.0), BLOCK)
    print(time.perf_counter() - began)


def tokenising(folder: Path) -> Row:
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer"
    size = write_text(text) / 1e6
    write_tokenizer(tokenizer)
    tries = iter(range(100))

    def ours() -> float:
        command = [sys.executable, "-m", "benchmarks.data", "--prepare", str(text), str(tokenizer)]
        return size / float(run(command, LLMTRAIN_CACHE=str(folder / f"ours-{next(tries)}")).splitlines()[-1])

    def theirs() -> float:
        return size / peer("map", tokenizer, text, "--length", BLOCK, "--cache", folder / f"theirs-{next(tries)}")

    found = in_turn({"ours": ours, "theirs": theirs}, rounds=3, uncounted=0)
    work, against = f"tokenising {size:.0f} MB of text on two cores", "datasets.map(num_proc=2), grouped"
    return Row(work, against, found["ours"].value, found["theirs"].value, "MB/s", ">= 1.5")


def loading(folder: Path) -> list[Row]:
    """Tokens per second of the loader alone, beside those of a step of the recipe's own size."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
    rows = prepare(DataConfig(dataset=["builtin:python-docs"], tokenizer="bpe:2048"), 128).train
    accelerator = start_accelerator()
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128), vocab_size=2048)
    optimizer = make_optimizer(model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = ROWS * 128

    def load(cold: bool) -> float:
        if cold:  # what the system keeps of the files
            for file in (folder / "cache").rglob("*.arrow"):
                with file.open("rb") as opened:
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        loader = accelerator.prepare(train_loader(rows, ROWS, ROWS, range(100), 0))
        began = time.perf_counter()
        for _ in loader:
            pass
        return 100 * tokens / (time.perf_counter() - began)

    ids = torch.randint(2048, (ROWS, 129))

    def step() -> float:
        began = time.perf_counter()
        for _ in range(10):
            train_step(accelerator, model, optimizer, [{"input_ids": ids, "labels": ids}], 1.0)
        return 10 * tokens / (time.perf_counter() - began)

    found = in_turn({"cold": partial(load, True), "warm": partial(load, False), "step": step})
    against = "what a step of the recipe takes"
    return [
        Row(f"loader, {kind}", against, found[kind].value, found["step"].value, "tokens/s", ">= 20")
        for kind in ("cold", "warm")
    ]


def main() -> None:
    if sys.argv[1:2] == ["--prepare"]:
        return preparing(*map(Path, sys.argv[2:]))
    with scratch() as folder:
        report("data", [*loading(folder), tokenising(folder)])


if __name__ == "__main__":
    launch(main)
