"""The cost of the loop beside a bare one with the same model and optimizer, and of all of its care.

python -m benchmarks.overhead
"""

import contextlib
import io
import os
import runpy
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.comparison import Row, in_turn, report
from benchmarks.peers import BETWEEN_READINGS, Readings, bare_update
from benchmarks.runs import GPT_RECIPE, ROOT, flags, median_reading, place, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, make_optimizer, tokenize
from llmtrain.launching.process import launch

UPDATES = 60
BATCH, VOCABULARY = 32, 2048
SHAPE = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="lfm2")  # the recipe's own
CARE = flags(log_rows=True, save_steps=30, async_save=True, skip_nonfinite=1)
NO_CARE = flags(save_steps=100_000)


def recipe(folder: Path, care: list[str]) -> float:
    """Run the recipe in this process; returns its tokens per second, which leave out what a save takes."""
    main = runpy.run_path(str(ROOT / GPT_RECIPE))["main"]
    sizes = flags(max_steps=UPDATES, logging_steps=BETWEEN_READINGS, eval_fraction=0)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([*care, *sizes, *place(folder / "run")])
    return median_reading(folder / "run", "train/tokens_per_second")


def bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader[tuple[torch.Tensor]]) -> float:
    readings = Readings(BATCH * SHAPE.block_size)
    for number, (ids,) in enumerate(batches, start=1):
        readings.updated(number, bare_update(model, optimizer, ids))
    return readings.median


def main() -> None:
    with scratch() as folder:
        os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = GPT.of(SHAPE, VOCABULARY)
        optimizer = make_optimizer(Accelerator(cpu=True), model, OptimConfig(optim="muon"))  # as the recipe's is
        data = DataConfig(dataset=["builtin:python-docs"], tokenizer=f"bpe:{VOCABULARY}", eval_fraction=0.0)
        ids = tokenize(data, SHAPE.block_size).train.dataset.with_format("numpy")[: UPDATES * BATCH]["input_ids"]
        rows = TensorDataset(torch.from_numpy(ids.astype(np.int64)))
        contenders = {
            "care": partial(recipe, folder, CARE),
            "no care": partial(recipe, folder, NO_CARE),
            "bare": lambda: bare(model, optimizer, DataLoader(rows, batch_size=BATCH, shuffle=True)),
        }
        found = in_turn(contenders, rounds=5)
    figures = {name: 1e3 * BATCH * SHAPE.block_size / found[name].value for name in contenders}  # ms an update
    report(
        "overhead",
        [
            Row("an update of the recipe", "a bare loop", figures["no care"], figures["bare"], "ms", "<= 1.02"),
            Row("an update with all care", "with none", figures["care"], figures["no care"], "ms", "<= 1.01"),
        ],
        care=" ".join(CARE),
        cpu_seconds={name: found[name].cpu_seconds for name in contenders},
    )


if __name__ == "__main__":
    launch(main)
