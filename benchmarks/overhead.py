"""What the loop costs beside a bare one with the same model and optimizer, and what all of its care costs.

python -m benchmarks.overhead
"""

import contextlib
import io
import os
import runpy
import statistics
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import GPT_RECIPE, ROOT, readings, scratch
from llmtrain import GPT, DataConfig, GPTConfig, OptimConfig, launch, make_optimizer, prepare

UPDATES, READING = 60, 10
BATCH, VOCABULARY = 32, 2048
SHAPE = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128)  # the recipe's own
CARE = ["--log_rows", "--check_replicas_steps", "10", "--save_steps", "30", "--async_save", "--skip_nonfinite", "1"]
NO_CARE = ["--check_replicas_steps", "0", "--save_steps", "100000"]


def recipe(folder: Path, flags: list[str]) -> float:
    """The recipe in this process: tokens per second, the median of its readings, which leave out what a save takes."""
    main = runpy.run_path(str(ROOT / GPT_RECIPE))["main"]
    flags = [*flags, "--max_steps", str(UPDATES), "--logging_steps", str(READING), "--eval_fraction", "0"]
    flags += ["--output_dir", str(folder / "run"), "--resume_from_checkpoint", "never", "--report_to", "none"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(flags)
    return statistics.median(readings(folder / "run", "train/tokens_per_second")[1:])


def bare(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: DataLoader) -> float:
    speeds, began = [], time.perf_counter()
    for number, (ids,) in enumerate(batches, start=1):
        loss = model(ids, ids) / (BATCH * SHAPE.block_size)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number % READING == 0:
            loss.item()
            speeds.append(READING * BATCH * SHAPE.block_size / (time.perf_counter() - began))
            began = time.perf_counter()
    return statistics.median(speeds[1:])


def main() -> None:
    with scratch() as folder:
        os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = GPT(SHAPE, VOCABULARY)
        optimizer = make_optimizer(model, OptimConfig(optim="muon"))  # as the recipe's is
        data = DataConfig(dataset=["builtin:python-docs"], tokenizer=f"bpe:{VOCABULARY}", eval_fraction=0.0)
        ids = prepare(data, SHAPE.block_size).train.dataset.with_format("numpy")[: UPDATES * BATCH]["input_ids"]
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
