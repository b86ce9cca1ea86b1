"""Windows of shards against a permutation of all rows: how well they mix, and the eval loss.

| measured | compared with |
|---|---|
| the share of a batch's pairs of rows that are from one shard | a permutation; Streaming's py1e |
| the eval loss on sorted text, after an epoch and before a window ends | a permutation |

A permutation of all rows has every shard open all the time. A window of 64 has at most 64 of them.

py1e is computed from its description: the shards come in a random order, and the samples of each
are spread over a range of `shuffle_block_size` samples
(https://docs.mosaicml.com/projects/streaming/en/stable/dataset_configuration/shuffling.html).
Here the range has as many rows as the shards of a window.

The text is Python's documentation, sorted by topic and module, in 256 shards. An epoch has four
windows of 64. In the other case, the functions of Python's library follow, in the order of its
files, and a run ends after the first window, so it has seen a quarter of the shards: windows are at
their worst. Windows of one shard are the control: if their loss is no higher, the table shows
nothing. The GPT has two layers of width 64.

Repeat it with `python -m benchmarks.windows`. One thread trains.
"""

import math
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.comparison import Table
from benchmarks.runs import flags, metrics, new_run_flags, run, scratch
from llmtrain.console import say
from llmtrain.data.order import WINDOW, GlobalBatchSampler
from llmtrain.launching.process import launch

# The pairs of rows.
PAIR_SHARDS = 200
ROWS_PER_SHARD = 500
ROWS = PAIR_SHARDS * ROWS_PER_SHARD
BATCH = 256

# The eval loss.
SEEDS = 3
TEXT_SHARDS = 256


class Case(NamedTuple):
    """Runs on one text.

    Attributes:
        name: how much of the text they see.
        text: the data sets.
        steps: the steps of 32 rows.
    """

    name: str
    text: tuple[str, ...]
    steps: int


CASES = [
    Case("an epoch", text=("builtin:python-docs",), steps=177),
    Case("a window", text=("builtin:python-docs", "builtin:python-functions"), steps=120),
]


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        window, *recipe_flags = sys.argv[2:]
        train(int(window), recipe_flags)
        return

    table = Table("windows")
    compare_pairs(table)
    losses = {case.name: compare_losses(table, case) for case in CASES}
    table.write(eval_losses=losses)


# The pairs of rows


def compare_pairs(table: Table) -> None:
    """Add the rows about the pairs of a batch."""
    permutation = order_in_windows(PAIR_SHARDS)
    for window in (WINDOW, 8):
        windows = order_in_windows(window)
        for name, order in (
            ("a permutation of all rows", permutation),
            (f"py1e over {window} shards", order_of_py1e(window * ROWS_PER_SHARD)),
        ):
            table.add(
                work=f"pairs from one shard, windows of {window} of {PAIR_SHARDS}",
                against=name,
                ours=100 * pair_shares(windows).mean(),
                theirs=100 * pair_shares(order).mean(),
                unit="%",
            )
        shares = pair_shares(windows)
        say("worst", f"windows of {window}: {shares.max():.1%} of the pairs of a batch")


def order_in_windows(window: int) -> np.ndarray:
    """Return the rows of an epoch, in complete batches."""
    steps = range(ROWS // BATCH)
    sampler = GlobalBatchSampler(
        ROWS, BATCH, steps, seed=0, shard_rows=[ROWS_PER_SHARD] * PAIR_SHARDS, window=window
    )
    return np.array([[slot.row for slot in slots] for slots in sampler]).flatten()


def order_of_py1e(block_size: int) -> np.ndarray:
    """Return the rows of an epoch in the order of Streaming's py1e, on one node."""
    random_numbers = np.random.default_rng(0)
    shards = np.repeat(random_numbers.permutation(PAIR_SHARDS), ROWS_PER_SHARD)
    rows = shards * ROWS_PER_SHARD + np.tile(np.arange(ROWS_PER_SHARD), PAIR_SHARDS)
    middles = np.arange(ROWS) // ROWS_PER_SHARD * ROWS_PER_SHARD + ROWS_PER_SHARD / 2
    places = middles + random_numbers.uniform(-block_size / 2, block_size / 2, ROWS)
    return rows[np.argsort(places)]


def pair_shares(order: np.ndarray) -> np.ndarray:
    """Return the share of pairs of rows from one shard in each complete batch."""
    batches = order[: len(order) // BATCH * BATCH].reshape(-1, BATCH) // ROWS_PER_SHARD
    counts = np.stack([np.bincount(batch, minlength=PAIR_SHARDS) for batch in batches])
    pairs: np.ndarray = (counts * (counts - 1)).sum(axis=1)
    return pairs / (BATCH * (BATCH - 1))


# The eval loss


def compare_losses(table: Table, case: Case) -> dict[str, list[float]]:
    """Add the rows about the eval loss; return the losses of the runs."""
    windows = {"windows of 64": WINDOW, "windows of 1": 1, "permutation": TEXT_SHARDS}
    losses: dict[str, list[float]] = {name: [] for name in windows}
    with scratch() as folder:
        for seed in range(SEEDS):
            for name, window in windows.items():
                losses[name].append(eval_loss(folder, case, window, seed))

    report_losses(table, case, losses)
    return losses


def report_losses(table: Table, case: Case, losses: dict[str, list[float]]) -> None:
    """Add the rows about the eval loss, and print how certain the differences are."""
    for name, values in losses.items():
        say(
            name,
            f"{statistics.mean(values):.4f}, standard deviation {statistics.stdev(values):.4f}",
        )
    for name in ("windows of 64", "windows of 1"):
        # Runs of one seed begin with the same weights.
        differences = np.subtract(losses[name], losses["permutation"])
        standard_error = differences.std(ddof=1) / math.sqrt(SEEDS)
        say(
            name,
            f"{differences.mean():+.4f} nats, {differences.mean() / standard_error:+.1f} standard "
            "errors",
        )
        table.add(
            work=f"eval loss after {case.name}, {name} of {TEXT_SHARDS} shards",
            against="a permutation of all rows",
            ours=statistics.mean(losses[name]),
            theirs=statistics.mean(losses["permutation"]),
            unit="nats",
            target="<= 1.01" if name == "windows of 64" else "",
        )


def eval_loss(folder: Path, case: Case, window: int, seed: int) -> float:
    """Train in a process of its own, and return the last eval loss."""
    run_folder = folder / f"window-{window}-seed-{seed}"
    recipe_flags = flags(
        dataset=case.text,
        n_layer=2,
        n_head=2,
        n_embd=64,
        seed=seed,
        max_steps=case.steps,
        eval_steps=case.steps,
        save_steps=case.steps,
        threads=1,
    )
    command = [sys.executable, "-m", "benchmarks.windows", "--train", window, *recipe_flags]
    run([*command, *new_run_flags(run_folder)], threads=1, LLMTRAIN_CACHE=str(folder / "cache"))
    losses = [entry["eval/loss"] for entry in metrics(run_folder) if "eval/loss" in entry]
    say("run", f"seed {seed}, windows of {window}: {losses[-1]:.4f}")
    return float(losses[-1])


def train(window: int, recipe_flags: list[str]) -> None:
    """Train as ``recipes/gpt.py`` does, with rows in shards that are fewer than a real shard's."""
    import llmtrain as lt
    from llmtrain.data.loader import train_loader
    from llmtrain.data.shards import ArrayRows, TokenRows
    from recipes import gpt

    settings = lt.parse(gpt.DEFAULTS, recipe_flags)
    rows = gpt.tokenized(settings)
    accelerator = lt.start(settings)
    bundle = lt.place(accelerator, gpt.build, settings, rows)
    optimizer = lt.make_optimizer(accelerator, bundle.model, settings.optim)
    columns = rows.train.read(np.arange(len(rows.train)))
    shards = []
    for numbers in np.array_split(np.arange(len(rows.train)), TEXT_SHARDS):
        shards.append(ArrayRows({name: column[numbers] for name, column in columns.items()}))

    with lt.open_run(accelerator, settings, rows, bundle, optimizer) as run:
        _, eval_batches = lt.loaders(run)
        train_batches = train_loader(
            TokenRows(shards),
            settings.data.global_batch_size,
            micro_batch=run.layout.micro_batch,
            steps=range(settings.optim.max_steps),
            seed=settings.optim.seed,
            prepare=bundle.prepare_batch,
            window=window,
        )
        lt.train(run, *accelerator.prepare(bundle.model, optimizer, train_batches, eval_batches))


if __name__ == "__main__":
    launch(main)
