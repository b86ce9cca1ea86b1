"""The cost of the loop beside a bare one with the same model and optimizer, of its care, and around its updates.

python -m benchmarks.overhead
"""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.comparison import Row, in_turn, report
from benchmarks.peers import BETWEEN_READINGS, Readings, bare_update
from benchmarks.runs import (
    GPT_RECIPE,
    ROOT,
    environment,
    flags,
    median_reading,
    metrics,
    place,
    scratch,
)
from llmtrain import DataConfig, GPTConfig, OptimConfig, make_optimizer, tokenize
from llmtrain.launching.process import launch
from llmtrain.models.gpt_family import build_gpt

UPDATES = 60
BATCH, VOCABULARY = 32, 2048
SHAPE = GPTConfig(
    n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="lfm2"
)  # the recipe's own
CARE = flags(log_rows=True, save_steps=30, async_save=True, skip_nonfinite=1)
HELD_OUT = 0.05  # of the text
NO_CARE = flags(save_steps=100_000)


def run_recipe(folder: Path, *words: str) -> None:
    """Run the recipe in this process, on whole batches at once, as the bare loop does."""
    main = runpy.run_path(str(ROOT / GPT_RECIPE))["main"]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([*words, *flags(per_device_train_batch_size=BATCH), *place(folder / "run")])


def recipe(folder: Path, care: list[str]) -> float:
    """Return the recipe's tokens per second, which leave out what a save takes."""
    run_recipe(
        folder, *care, *flags(max_steps=UPDATES, logging_steps=BETWEEN_READINGS, eval_fraction=0)
    )
    return median_reading(folder / "run", "train/tokens_per_second")


def bare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[torch.Tensor]],
) -> float:
    readings = Readings(BATCH * SHAPE.block_size)
    for number, (ids,) in enumerate(batches, start=1):
        readings.updated(number, bare_update(model, optimizer, ids))
    return readings.median


def evaluation(folder: Path) -> float:
    """Return the seconds of the recipe's last evaluation, from the update before it until its reading is written."""
    run_recipe(folder, *flags(max_steps=1, logging_steps=1, eval_fraction=HELD_OUT), *NO_CARE)
    *_, update, evaluated = metrics(folder / "run")
    return float(evaluated["time"] - update["time"])


@torch.no_grad()
def forward_passes(model: torch.nn.Module, rows: torch.Tensor) -> float:
    began = time.perf_counter()
    losses = [model(ids, ids) for ids in rows.split(BATCH)]
    float(torch.stack(losses).sum())
    return time.perf_counter() - began


def seconds(*words: object, status: int = 0) -> float:
    """Return the seconds that a command of Python's takes, which must end with ``status``."""
    began = time.perf_counter()
    command = [sys.executable, *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False)
    if ended.returncode != status:
        raise SystemExit(f"{command}: {ended.stderr.decode()}")
    return time.perf_counter() - began


def main() -> None:
    with scratch() as folder:
        os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = build_gpt(SHAPE, VOCABULARY)
        optimizer = make_optimizer(
            Accelerator(cpu=True), model, OptimConfig(optim="muon")
        )  # as the recipe's is
        data = DataConfig(
            dataset=["builtin:python-docs"], tokenizer=f"bpe:{VOCABULARY}", eval_fraction=0.0
        )
        ids = tokenize(data, SHAPE.block_size).train.dataset.with_format("numpy")[
            : UPDATES * BATCH
        ]["input_ids"]
        rows = TensorDataset(torch.from_numpy(ids.astype(np.int64)))
        contenders = {
            "care": partial(recipe, folder, CARE),
            "no care": partial(recipe, folder, NO_CARE),
            "bare": lambda: bare(
                model, optimizer, DataLoader(rows, batch_size=BATCH, shuffle=True)
            ),
        }
        found = in_turn(contenders, rounds=5)
        held_out = tokenize(replace(data, eval_fraction=HELD_OUT), SHAPE.block_size).eval
        whole = held_out.dataset.with_format("numpy")[:]["input_ids"].astype(np.int64)
        ids = torch.from_numpy(whole[(whole >= 0).all(axis=1)])  # the last row is padded
        looks = {"ours": partial(evaluation, folder), "bare": partial(forward_passes, model, ids)}
        evaluated = in_turn(looks, rounds=5)
    answers = {
        "--help": partial(seconds, GPT_RECIPE, "--help"),
        "a flag that does not exist": partial(seconds, GPT_RECIPE, "--n_layers", 2, status=2),
        "import": partial(seconds, "-c", "import torch"),
    }
    answered = in_turn(answers, rounds=5)
    figures = {
        name: 1e3 * BATCH * SHAPE.block_size / found[name].value for name in contenders
    }  # ms an update
    report(
        "overhead",
        [
            Row(
                "an update of the recipe",
                "a bare loop",
                figures["no care"],
                figures["bare"],
                "ms",
                "<= 1.02",
            ),
            Row(
                "an update with all care",
                "with none",
                figures["care"],
                figures["no care"],
                "ms",
                "<= 1.01",
            ),
            Row(
                "an evaluation",
                "its forward passes",
                *(evaluated[name].value for name in looks),
                "seconds",
                "<= 1.05",
            ),
            *(
                Row(
                    f"the recipe, {name}",
                    "import torch",
                    answered[name].value,
                    answered["import"].value,
                    "seconds",
                    "<= 0.6",
                )
                for name in ("--help", "a flag that does not exist")
            ),
        ],
        care=" ".join(CARE),
        cpu_seconds={name: found[name].cpu_seconds for name in contenders},
    )


if __name__ == "__main__":
    launch(main)
