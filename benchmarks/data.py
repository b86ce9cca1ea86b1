"""The speed of data preparation and of the loader.

| measured | compared with |
|---|---|
| tokens per second of the loader, with files on disk and in memory | the tokens per second of a step |
| megabytes per second from a file of text to rows, with nothing cached | datasets.map, on two processes |

The step is one of the default size of recipes/gpt.py, and the loader should not slow it down.

Repeat it on two cores with `python -m benchmarks.data`.
"""

import itertools
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.comparison import Table, drop_from_page_cache, take_turns
from benchmarks.inputs import write_python_files, write_tokenizer
from benchmarks.runs import run_for_json, run_peer, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, make_optimizer, tokenize
from llmtrain.data.loader import train_loader
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch
from llmtrain.parallel.ddp import ReplicatedEngine
from llmtrain.parallel.ranks import ranks_of
from llmtrain.training.step import train_step

# The loader, and a step to compare it with.
VOCABULARY = 2048
MODEL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128)
BATCH = 32
TOKENS_OF_STEP = BATCH * MODEL.block_size
LOADED_BATCHES = 100
STEPS = 10

# The preparation of a text.
MEGABYTES = 100
ROW_LENGTH = 256


def main() -> None:
    if sys.argv[1:2] == ["--prepare"]:
        text, tokenizer = sys.argv[2:]
        print_seconds_of_preparation(text, tokenizer)
        return

    table = Table("data")
    with scratch() as folder:
        compare_loader(table, folder)
        compare_preparation(table, folder)
    table.write()


# The loader


def compare_loader(table: Table, folder: Path) -> None:
    """Add the rows about the loader."""
    os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
    data = DataConfig(dataset=["builtin:python-docs"], tokenizer=f"bpe:{VOCABULARY}")
    rows = tokenize(data, MODEL.block_size).train
    accelerator = start_accelerator()
    model = GPT(MODEL, VOCABULARY)
    optimizer = make_optimizer(accelerator, model, OptimConfig())
    model, optimizer = accelerator.prepare(model, optimizer)
    engine = ReplicatedEngine(ranks_of(accelerator), model)
    ids = torch.randint(VOCABULARY, (BATCH, MODEL.block_size + 1))
    batches_of_step = [{"input_ids": ids, "labels": ids}]

    def load() -> float:
        loader = train_loader(rows, BATCH, micro_batch=BATCH, steps=range(LOADED_BATCHES), seed=0)
        batches = accelerator.prepare(loader)
        start = time.perf_counter()
        for _ in batches:
            pass
        return LOADED_BATCHES * TOKENS_OF_STEP / (time.perf_counter() - start)

    def load_from_disk() -> float:
        drop_from_page_cache(folder / "cache")
        return load()

    def step() -> float:
        start = time.perf_counter()
        for _ in range(STEPS):
            train_step(engine, optimizer, batches_of_step, max_grad_norm=1.0)
        return STEPS * TOKENS_OF_STEP / (time.perf_counter() - start)

    speeds = take_turns({"cold": load_from_disk, "warm": load, "step": step})
    for name in ("cold", "warm"):
        table.add(
            work=f"loader, {name}",
            against="a step of the recipe",
            ours=speeds[name].median,
            theirs=speeds["step"].median,
            unit="tokens/s",
            target=">= 20",
        )


# The preparation of a text


def compare_preparation(table: Table, folder: Path) -> None:
    """Add the row about a file of text."""
    text = folder / "text.jsonl"
    tokenizer = folder / "tokenizer"
    megabytes = write_python_files(text, MEGABYTES) / 1e6
    write_tokenizer(tokenizer)
    numbers = itertools.count()  # of caches: each turn has an empty one

    def prepare() -> float:
        command = [sys.executable, "-m", "benchmarks.data", "--prepare", text, tokenizer]
        cache = folder / f"llmtrain-{next(numbers)}"
        return float(megabytes / run_for_json(command, LLMTRAIN_CACHE=str(cache)))

    datasets_map = partial(run_peer, "map", tokenizer, text, length=ROW_LENGTH)

    def prepare_with_datasets() -> float:
        return megabytes / datasets_map(cache=folder / f"datasets-{next(numbers)}")

    speeds = take_turns(
        {"llmtrain": prepare, "datasets": prepare_with_datasets},
        rounds=3,
        warm_up_rounds=0,
    )
    table.add(
        work=f"tokenising {megabytes:.0f} MB of text on two cores",
        against="datasets.map(num_proc=2), grouped",
        ours=speeds["llmtrain"].median,
        theirs=speeds["datasets"].median,
        unit="MB/s",
        target=">= 1.5",
    )


def print_seconds_of_preparation(text: str, tokenizer: str) -> None:
    """Make the rows of a text as a first run does, in a process of its own."""
    data = DataConfig(dataset=[text], tokenizer=tokenizer, eval_fraction=0.0)
    start = time.perf_counter()
    tokenize(data, ROW_LENGTH)
    print(time.perf_counter() - start)


if __name__ == "__main__":
    launch(main)
