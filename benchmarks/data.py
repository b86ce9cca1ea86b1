"""Text to rows beside datasets.map, and rows to batches beside an update's need of them.

python -m benchmarks.data
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.comparison import Row, forget, in_turn, report
from benchmarks.inputs import write_code, write_tokenizer
from benchmarks.runs import figure, peer, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, make_optimizer, tokenize
from llmtrain.data.loader import train_loader
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import Ranks
from llmtrain.training.step import train_step

MEGABYTES, BLOCK, ROWS = 100, 256, 32


def preparing(text: Path, tokenizer: Path) -> None:
    """Make the rows with nothing cached, as a first run does; print the seconds."""
    began = time.perf_counter()
    tokenize(DataConfig(dataset=[str(text)], tokenizer=str(tokenizer), eval_fraction=0.0), BLOCK)
    print(time.perf_counter() - began)


def tokenising(folder: Path) -> Row:
    text, tokenizer = folder / "text.jsonl", folder / "tokenizer"
    size = write_code(text, MEGABYTES) / 1e6
    write_tokenizer(tokenizer)
    tries = iter(range(100))

    def ours() -> float:
        command = [sys.executable, "-m", "benchmarks.data", "--prepare", text, tokenizer]
        return float(size / figure(command, LLMTRAIN_CACHE=str(folder / f"ours-{next(tries)}")))

    def theirs() -> float:
        return size / peer(
            "map", tokenizer, text, "--length", BLOCK, "--cache", folder / f"theirs-{next(tries)}"
        )

    found = in_turn({"ours": ours, "theirs": theirs}, rounds=3, uncounted=0)
    work, against = (
        f"tokenising {size:.0f} MB of text on two cores",
        "datasets.map(num_proc=2), grouped",
    )
    return Row(work, against, found["ours"].value, found["theirs"].value, "MB/s", ">= 1.5")


def loading(folder: Path) -> list[Row]:
    """Return the tokens per second of the loader alone, beside those of a step of the recipe's own size."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
    rows = tokenize(DataConfig(dataset=["builtin:python-docs"], tokenizer="bpe:2048"), 128).train
    accelerator = start_accelerator()
    model = GPT(GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128), 2048)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = ReplicatedEngine(Ranks(accelerator), model)
    tokens = ROWS * 128

    def load(cold: bool) -> float:
        if cold:
            forget(folder / "cache")
        loader = accelerator.prepare(train_loader(rows, ROWS, ROWS, range(100), 0))
        began = time.perf_counter()
        for _ in loader:
            pass
        return 100 * tokens / (time.perf_counter() - began)

    ids = torch.randint(2048, (ROWS, 129))
    batches = [{"input_ids": ids, "labels": ids}]

    def step() -> float:
        began = time.perf_counter()
        for _ in range(10):
            train_step(engine, optimizer, batches, max_grad_norm=1.0)
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
