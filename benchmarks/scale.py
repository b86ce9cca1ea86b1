"""How speed grows with the width, the block size and the processes, and what many rows cost.

| series, drawn in docs/images/scale.svg | figures |
|---|---|
| width, block size, number of processes | tokens per second of recipes/gpt.py, share of the peak FLOP/s |
| number of rows | seconds to the first batch, memory, microseconds to find the place of a row |

The table compares the largest number of rows, ten million, with the smallest, ten thousand.

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.scale`.
"""

import importlib.util
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.comparison import Figures, Table, Turns, take_turns
from benchmarks.inputs import write_python_files
from benchmarks.runs import (
    CORES,
    GPT_RECIPE,
    ROOT,
    STEPS_ONLY,
    GPTShape,
    flags,
    newest_file,
    recipe_speed,
    run_for_json,
    scratch,
)
from llmtrain import DataConfig, GPTConfig, build_gpt, tokenize
from llmtrain.data.loader import train_loader
from llmtrain.data.order import GlobalBatchSampler
from llmtrain.errors import UserError
from llmtrain.lab.plan.hardware import measured_peak
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch

Series = dict[int, Figures]  # figures by size

PICTURE = ROOT / "docs/images/scale.svg"

STEPS = 30
LAYERS = 4
HEAD_WIDTH = 32
TOKENS_OF_STEP = 4096  # of each process
DEFAULT_WIDTH = 128
DEFAULT_BLOCK = 128
WIDTHS = (64, 128, 256, 512)
BLOCKS = (32, 64, 128, 256, 512, 1024)
PROCESSES = (1, 2, 4)

ROW_LENGTH = 16
ROW_COUNTS = (10_000, 100_000, 1_000_000, 10_000_000)


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        print_reading_costs(Path(sys.argv[2]))
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib draws the picture: pip install 'llmtrain[bench]'.")

    with scratch() as folder:
        series = {
            "rows": reading_series(folder),
            "width": speed_series(folder, "width", WIDTHS),
            "block": speed_series(folder, "block", BLOCKS),
            "processes": speed_series(folder, "processes", PROCESSES),
        }

    fewest = ROW_COUNTS[0]
    most = ROW_COUNTS[-1]
    table = Table("scale")
    for name, key, unit, target in (
        ("first batch", "start", "seconds", "<= 1.1"),
        ("memory", "memory", "MiB", "<= 1.02"),
        ("a row's place in the order", "order", "us", "<= 1.1"),
    ):
        table.add(
            work=f"{name}, {most:,} rows",
            against=f"{fewest:,} rows",
            ours=series["rows"][most][key],
            theirs=series["rows"][fewest][key],
            unit=unit,
            target=target,
        )
    table.write(series=series)
    draw(series)


# Speed by width, block size and processes


def speed_series(folder: Path, kind: str, sizes: tuple[int, ...]) -> Series:
    """Return ``speed`` and ``share`` for each size.

    Args:
        folder: for the runs.
        kind: what changes: ``width``, ``block`` or ``processes``.
        sizes: its values.
    """
    turns: dict[str, Turns[Figures]] = take_turns(
        {str(size): partial(measure_speed, folder / "run", **{kind: size}) for size in sizes},
        rounds=2,
        warm_up_rounds=0,
    )
    return {
        size: {
            "speed": turns[str(size)].median_of("speed"),
            "share": turns[str(size)].median_of("share"),
        }
        for size in sizes
    }


def measure_speed(
    folder: Path,
    width: int = DEFAULT_WIDTH,
    block: int = DEFAULT_BLOCK,
    processes: int | None = None,
) -> Figures:
    """Run recipes/gpt.py.

    Args:
        folder: the run folder.
        width: the width of the model.
        block: its block size.
        processes: the processes, each with one thread and a micro-batch of its own; ``None`` for
            one process with a thread on each core.

    Returns:
        The ``speed`` in tokens per second, and its ``share`` of the measured peak FLOP/s of the
        cores.
    """
    count = processes or 1
    threads = CORES if processes is None else 1
    micro_batch = TOKENS_OF_STEP // block
    shape = GPTShape(
        layers=LAYERS,
        heads=width // HEAD_WIDTH,
        width=width,
        block=block,
        batch=micro_batch * count,
    )
    speed = recipe_speed(
        GPT_RECIPE,
        folder,
        *shape.recipe_flags(architecture="gpt2", micro_batch=micro_batch),
        *flags(optim="adamw", max_steps=STEPS, logging_steps=5, **STEPS_ONLY),
        config="cpu" if count == 1 else "cpu_ddp",
        threads=threads,
        processes=None if count == 1 else count,
    )

    torch.set_num_threads(threads)
    peak_flops = measured_peak(torch.device("cpu"), torch.float32)
    flops = speed * flops_per_token(shape, newest_file(folder, "run.json"))
    # More processes than cores share the cores.
    cores_of_process = min(1, CORES / count)
    return {"speed": speed, "share": flops / (count * cores_of_process * peak_flops)}


def flops_per_token(shape: GPTShape, run_json: Path) -> float:
    """Return the FLOPs of a model per token, with the vocabulary of a run."""
    vocabulary = json.loads(run_json.read_text())["vocabulary"]
    config = GPTConfig(
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.width,
        block_size=shape.block,
    )
    with torch.device("meta"):
        return float(build_gpt(config, vocabulary).flops_per_token())


# What many rows cost


def reading_series(folder: Path) -> Series:
    """Return the costs of reading for each number of rows."""
    source = folder / "source.jsonl"
    write_python_files(source, megabytes=10)
    files = {count: folder / f"{count}.jsonl" for count in ROW_COUNTS}
    for count, file in files.items():
        write_rows(source, count, file)

    def read(file: Path) -> Figures:
        command = [sys.executable, "-m", "benchmarks.scale", "--read", file]
        costs: Figures = run_for_json(command, LLMTRAIN_CACHE=str(folder / "cache"))
        return costs

    # The warm-up round prepares the rows.
    turns: dict[str, Turns[Figures]] = take_turns(
        {str(count): partial(read, file) for count, file in files.items()},
        rounds=3,
        warm_up_rounds=1,
    )
    return {
        count: {
            cost: turns[str(count)].median_of(cost)
            for cost in ("start", "memory", "order", "speed")
        }
        for count in ROW_COUNTS
    }


def write_rows(source: Path, count: int, path: Path) -> None:
    """Write so much text that it makes ``count`` rows of bytes, repeating the documents of a file."""
    documents = [json.loads(line)["text"] for line in source.read_text().splitlines()]
    bytes_left = count * ROW_LENGTH
    with path.open("w") as file:
        while bytes_left > 0:
            for document in documents:
                text = document[:bytes_left]
                file.write(json.dumps({"text": text}) + "\n")
                bytes_left -= len(text.encode()) + 1  # each document ends with a token of its own
                if bytes_left <= 0:
                    break


def print_reading_costs(text: Path) -> None:
    """Print what reading prepared rows costs, in a process of its own.

    That is: ``start``, the seconds until the first batch; ``memory``, MiB after 200 batches of the
    first epoch and 200 of the twentieth; ``order``, the microseconds to find the place of a row in
    the shuffled order; ``speed``, in tokens per second.
    """
    batch = TOKENS_OF_STEP // ROW_LENGTH

    start = time.perf_counter()
    data = DataConfig(dataset=[str(text)], tokenizer="byte", eval_fraction=0.0)
    rows = tokenize(data, ROW_LENGTH).train
    accelerator = start_accelerator()

    def read(steps: range) -> float:
        """Return the seconds of reading the batches of these steps."""
        start = time.perf_counter()
        loader = train_loader(rows, batch, micro_batch=batch, steps=steps, seed=0)
        for _ in accelerator.prepare(loader):
            pass
        return time.perf_counter() - start

    read(range(1))
    seconds_to_first_batch = time.perf_counter() - start

    batches = 200
    twentieth_epoch = 19 * len(rows) // batch
    seconds = read(range(batches))
    seconds += read(range(twentieth_epoch, twentieth_epoch + batches))

    memory = psutil.Process().memory_info()
    mapped_bytes = getattr(memory, "shared", 0)

    steps = range(twentieth_epoch, twentieth_epoch + 1000)
    start = time.perf_counter()
    for _ in GlobalBatchSampler(len(rows), batch, steps, seed=0):
        pass
    seconds_of_order = time.perf_counter() - start

    costs: Figures = {
        "start": seconds_to_first_batch,
        "memory": (memory.rss - mapped_bytes) / 2**20,
        "order": 1e6 * seconds_of_order / (len(steps) * batch),
        "speed": 2 * batches * TOKENS_OF_STEP / seconds,
    }
    print(json.dumps(costs))


# The picture


def draw(series: dict[str, Series]) -> None:
    """Draw all series into one picture."""
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llmtrain"  # equal figures make an equal file
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6.5), layout="constrained")
    draw_speed(axes[0, 0], series["width"], f"width ({LAYERS} layers, block {DEFAULT_BLOCK})")
    draw_speed(axes[0, 1], series["block"], f"block size ({LAYERS} layers x {DEFAULT_WIDTH})")
    draw_speed(axes[1, 0], series["processes"], f"processes of one thread, on {CORES} cores")
    draw_rows(axes[1, 1], series["rows"])
    figure.savefig(PICTURE, metadata={"Date": None})


def draw_speed(axes: Any, series: Series, title: str) -> None:
    """Draw tokens per second, and the share of the peak on a second axis."""
    sizes = sorted(series)
    speeds = [series[size]["speed"] for size in sizes]
    axes.plot(sizes, speeds, "o-", color="tab:blue")
    axes.set(title=title, xscale="log", xticks=sizes, xticklabels=sizes, ylim=(0, None))
    axes.set_ylabel("tokens / s", color="tab:blue")
    axes.minorticks_off()

    percentages = [100 * series[size]["share"] for size in sizes]
    share_axes = axes.twinx()
    share_axes.plot(sizes, percentages, "s--", color="tab:orange")
    share_axes.set_ylabel("% of the measured peak", color="tab:orange")
    share_axes.set_ylim(0, 1.05 * max(100, *percentages))


def draw_rows(axes: Any, series: Series) -> None:
    """Draw the costs of many rows, as ratios to those of the fewest."""
    counts = sorted(series)
    for key, label in (
        ("start", "seconds to the first batch"),
        ("memory", "memory"),
        ("order", "time to find a row"),
    ):
        smallest = series[counts[0]][key]
        ratios = [series[count][key] / smallest for count in counts]
        axes.plot(counts, ratios, "o-", label=label)
    axes.set(
        title=f"rows of {ROW_LENGTH} tokens, beside {counts[0]:,}",
        xscale="log",
        ylim=(0, 2),
        ylabel="ratio",
    )
    axes.legend()


if __name__ == "__main__":
    launch(main)
