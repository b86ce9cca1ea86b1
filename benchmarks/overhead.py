"""What recipes/gpt.py costs beyond the steps of its model: the loop, an evaluation, and the start.

| measured | compared with |
|---|---|
| a step of the recipe | a bare loop with the same model, optimizer, rows and batch |
| a step with row logs and background saves | a step without them; the save itself is not counted |
| an evaluation | the forward passes on the same rows |
| the recipe with --help, and with an unknown flag | python -c "import torch" |

Repeat it with `python -m benchmarks.overhead`.
"""

import contextlib
import io
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.comparison import Table, Turns, take_turns
from benchmarks.peers import LOGGING_STEPS, Speedometer, bare_step
from benchmarks.runs import (
    GPT_RECIPE,
    ROOT,
    environment,
    flags,
    median_metric,
    metrics,
    new_run_flags,
    scratch,
)
from llmtrain import DataConfig, GPTConfig, OptimConfig, make_optimizer, tokenize
from llmtrain.launching.process import launch
from llmtrain.models.lfm2 import build_gpt

STEPS = 60
BATCH = 32
VOCABULARY = 2048
EVAL_FRACTION = 0.05

# The default model of the recipe.
MODEL = GPTConfig(n_layer=4, n_head=4, n_embd=128, block_size=128, architecture="lfm2")

WITH_CARE = flags(log_rows=True, save_steps=30, async_save=True, skip_nonfinite=1)
WITHOUT_CARE = flags(save_steps=100_000)


def main() -> None:
    table = Table("overhead")
    with scratch() as folder:
        os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        model = build_gpt(MODEL, VOCABULARY)

        steps = compare_steps(table, model, folder / "run")
        compare_evaluations(table, model, folder / "run")
    compare_start(table)

    table.write(
        care=" ".join(WITH_CARE),
        cpu_seconds={name: turns.median_cpu_seconds for name, turns in steps.items()},
    )


# Steps


def compare_steps(table: Table, model: torch.nn.Module, folder: Path) -> dict[str, Turns[float]]:
    """Add the rows about steps; return the turns that they are from."""
    rows = TensorDataset(tokenized_rows(split="train", eval_fraction=0.0)[: STEPS * BATCH])
    optimizer = make_optimizer(Accelerator(cpu=True), model, OptimConfig(optim="muon"))
    speeds = take_turns(
        {
            "care": lambda: recipe_steps(folder, WITH_CARE),
            "no care": lambda: recipe_steps(folder, WITHOUT_CARE),
            "bare": lambda: bare_steps(model, optimizer, rows),
        },
        rounds=5,
    )

    milliseconds = {
        name: 1000 * BATCH * MODEL.block_size / turns.median for name, turns in speeds.items()
    }
    table.add(
        work="a step of the recipe",
        against="a bare loop",
        ours=milliseconds["no care"],
        theirs=milliseconds["bare"],
        unit="ms",
        target="<= 1.02",
    )
    table.add(
        work="a step with row logs and background saves",
        against="a step without",
        ours=milliseconds["care"],
        theirs=milliseconds["no care"],
        unit="ms",
        target="<= 1.01",
    )
    return speeds


def recipe_steps(folder: Path, care: list[str]) -> float:
    """Return the tokens per second of the recipe, which leave out the time of a save."""
    recipe_flags = flags(max_steps=STEPS, logging_steps=LOGGING_STEPS, eval_fraction=0)
    run_recipe(folder, [*recipe_flags, *care])
    return median_metric(folder, "train/tokens_per_second")


def bare_steps(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: TensorDataset
) -> float:
    """Return the tokens per second of a bare loop."""
    batches: DataLoader[tuple[torch.Tensor]] = DataLoader(rows, batch_size=BATCH, shuffle=True)
    speedometer = Speedometer(BATCH * MODEL.block_size)
    for step, (ids,) in enumerate(batches, start=1):
        loss = bare_step(model, optimizer, ids)
        speedometer.end_step(step, loss)
    return speedometer.median


def run_recipe(folder: Path, recipe_flags: list[str]) -> None:
    """Run the recipe in this process, with steps of one micro-batch like those of the bare loop."""
    main = runpy.run_path(str(ROOT / GPT_RECIPE))["main"]
    micro_batch = flags(per_device_train_batch_size=BATCH)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main([*recipe_flags, *micro_batch, *new_run_flags(folder)])


def tokenized_rows(split: str, eval_fraction: float) -> torch.Tensor:
    """Return the full rows [N, T + 1] of the recipe's data.

    Args:
        split: ``train`` or ``eval``.
        eval_fraction: how much of the text is for evaluation.
    """
    data = DataConfig(
        dataset=["builtin:python-docs"],
        tokenizer=f"bpe:{VOCABULARY}",
        eval_fraction=eval_fraction,
    )
    rows = getattr(tokenize(data, MODEL.block_size), split)
    ids = rows.column("input_ids")
    is_full = (ids >= 0).all(axis=1)  # the last row is padded
    return torch.from_numpy(ids[is_full])


# An evaluation


def compare_evaluations(table: Table, model: torch.nn.Module, folder: Path) -> None:
    """Add the row about an evaluation."""
    rows = tokenized_rows(split="eval", eval_fraction=EVAL_FRACTION)
    seconds = take_turns(
        {
            "evaluation": lambda: recipe_evaluation(folder),
            "forward passes": lambda: forward_passes(model, rows),
        },
        rounds=5,
    )
    table.add(
        work="an evaluation",
        against="its forward passes",
        ours=seconds["evaluation"].median,
        theirs=seconds["forward passes"].median,
        unit="seconds",
        target="<= 1.05",
    )


def recipe_evaluation(folder: Path) -> float:
    """Return the seconds from the log entry of the last step to that of the evaluation after it."""
    recipe_flags = flags(max_steps=1, logging_steps=1, eval_fraction=EVAL_FRACTION)
    run_recipe(folder, [*recipe_flags, *WITHOUT_CARE])
    step_entry, eval_entry = metrics(folder)[-2:]
    return float(eval_entry["time"] - step_entry["time"])


@torch.no_grad()
def forward_passes(model: torch.nn.Module, rows: torch.Tensor) -> float:
    """Return the seconds of the losses of all rows."""
    start = time.perf_counter()
    losses = [model(ids, ids) for ids in rows.split(BATCH)]
    torch.stack(losses).sum().item()
    return time.perf_counter() - start


# The start


def compare_start(table: Table) -> None:
    """Add the rows about commands that end before torch is imported."""
    seconds = take_turns(
        {
            "--help": lambda: run_python(GPT_RECIPE, "--help"),
            "a flag that does not exist": lambda: run_python(
                GPT_RECIPE, "--n_layers", "2", status=2
            ),
            "import torch": lambda: run_python("-c", "import torch"),
        },
        rounds=5,
    )
    for name in ("--help", "a flag that does not exist"):
        table.add(
            work=f"the recipe, {name}",
            against="import torch",
            ours=seconds[name].median,
            theirs=seconds["import torch"].median,
            unit="seconds",
            target="<= 0.6",
        )


def run_python(*words: str, status: int = 0) -> float:
    """Return the seconds of a Python command, which must end with ``status``."""
    start = time.perf_counter()
    command = [sys.executable, *words]
    process = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, check=False)
    seconds = time.perf_counter() - start
    if process.returncode != status:
        raise SystemExit(f"{command}: {process.stderr.decode()}")
    return seconds


if __name__ == "__main__":
    launch(main)
