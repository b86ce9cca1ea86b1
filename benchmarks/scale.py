"""Speed by width, block size and processes, and the cost of ten million rows; drawn in docs/images/scale.svg.

python -m benchmarks.scale        (needs: pip install 'llmtrain[bench]')
"""

import importlib.util
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.comparison import Row, report, take_turns
from benchmarks.inputs import write_python_files
from benchmarks.runs import (
    CORES,
    GPT_RECIPE,
    ROOT,
    STEPS_ONLY,
    flags,
    gpt_flags,
    newest_file,
    recipe_speed,
    run_for_json,
    scratch,
)
from llmtrain import DataConfig, GPTConfig, build_gpt, tokenize
from llmtrain.data.loader import train_loader
from llmtrain.data.samplers import GlobalBatchSampler
from llmtrain.errors import UserError
from llmtrain.lab.plan.calibration import measured_peak
from llmtrain.launching.accelerator import start_accelerator
from llmtrain.launching.process import launch

Series = dict[int, dict[str, float]]  # by size: figures by name

WIDTHS = (64, 128, 256, 512)
BLOCKS = (32, 64, 128, 256, 512, 1024)
PROCESSES = (1, 2, 4)
ROWS = (10_000, 100_000, 1_000_000, 10_000_000)
TOKENS, ROW = 4096, 16  # tokens of an update; of a row where rows are counted
PICTURE = ROOT / "docs/images/scale.svg"


def speed(
    folder: Path, width: int = 128, block: int = 128, processes: int = 0
) -> tuple[float, float]:
    """Return the tokens a second of recipes/gpt.py with 4 layers, and its share of the measured peak.

    Where a number of ``processes`` is given, each has one thread and as large a batch as one alone.
    """
    batch = TOKENS // block
    words = gpt_flags(4, width // 32, width, block, batch * max(processes, 1), per_device=batch)
    words += flags(optim="adamw", max_steps=30, logging_steps=5, **STEPS_ONLY)
    if processes > 1:
        tokens = recipe_speed(
            GPT_RECIPE, folder, *words, config="cpu_ddp", threads=1, processes=processes
        )
    else:
        tokens = recipe_speed(GPT_RECIPE, folder, *words, threads=1 if processes else CORES)

    shape = GPTConfig(n_layer=4, n_head=width // 32, n_embd=width, block_size=block)
    vocabulary = json.loads(newest_file(folder, "run.json").read_text())["vocabulary"]
    with torch.device("meta"):
        flops = build_gpt(shape, vocabulary).flops_per_token()
    torch.set_num_threads(1 if processes else CORES)
    peak = measured_peak(torch.device("cpu"), torch.float32)
    return tokens, tokens / max(processes, 1) * flops / peak


def write_rows(source: Path, rows: int, path: Path) -> None:
    """Write as much of ``source``, again and again, as gives so many rows of ``ROW`` bytes."""
    left = rows * ROW
    with path.open("w") as file:
        while left > 0:
            for line in source.read_text().splitlines():
                text = json.loads(line)["text"][:left]
                left -= len(text.encode()) + 1  # each document ends with a token of its own
                file.write(json.dumps({"text": text}) + "\n")
                if left <= 0:
                    break


def reading(text: Path) -> None:
    """Print what reading the prepared rows takes, in a process of its own.

    That is: seconds until they are open and a first batch is there; MiB that the process holds after 200 batches of the
    first epoch and 200 of the twentieth; microseconds that a row's place in the order takes; tokens a second.
    """
    data = DataConfig(dataset=[str(text)], tokenizer="byte", eval_fraction=0.0)
    began = time.perf_counter()
    rows = tokenize(data, ROW).train
    accelerator = start_accelerator()
    batch = TOKENS // ROW

    def batches(steps: range) -> float:
        began = time.perf_counter()
        for _ in accelerator.prepare(train_loader(rows, batch, batch, steps, seed=0)):
            pass
        return time.perf_counter() - began

    batches(range(1))
    start = time.perf_counter() - began
    far = 19 * len(rows) // batch
    seconds = batches(range(200)) + batches(range(far, far + 200))
    info = psutil.Process().memory_info()
    memory = (info.rss - getattr(info, "shared", 0)) / 2**20  # without what is mapped of files
    began = time.perf_counter()
    for _ in GlobalBatchSampler(len(rows), batch, range(far, far + 1000), seed=0):
        pass
    order = 1e6 * (time.perf_counter() - began) / 1000 / batch
    print(
        json.dumps(
            {"start": start, "memory": memory, "order": order, "speed": 400 * TOKENS / seconds}
        )
    )


def read_rows(folder: Path) -> Series:
    write_python_files(source := folder / "source.jsonl", 10)
    found: dict[int, list[dict[str, float]]] = {}
    for rows in ROWS:
        write_rows(source, rows, folder / f"{rows}.jsonl")
    for _ in range(4):  # of which the first prepares
        for rows in ROWS:
            command = [sys.executable, "-m", "benchmarks.scale", "--read", folder / f"{rows}.jsonl"]
            found.setdefault(rows, []).append(
                run_for_json(command, LLMTRAIN_CACHE=str(folder / "cache"))
            )
    return {
        rows: {key: statistics.median(one[key] for one in tries[1:]) for key in tries[0]}
        for rows, tries in found.items()
    }


def measured(folder: Path) -> dict[str, Series]:
    """Return what is drawn: for each width, block size and number of processes ``speed`` and ``share``."""
    found: dict[str, Series] = {}
    for kind, values in {"width": WIDTHS, "block": BLOCKS, "processes": PROCESSES}.items():
        shares: dict[int, list[float]] = {value: [] for value in values}

        def one(kind: str, value: int, shares: list[float]) -> float:
            tokens, share = speed(folder / "run", **{kind: value})
            shares.append(share)
            return tokens

        contenders = {str(value): partial(one, kind, value, shares[value]) for value in values}
        medians = take_turns(contenders, rounds=2, warm_up_rounds=0)
        found[kind] = {
            v: {"speed": medians[str(v)].median, "share": statistics.median(shares[v])}
            for v in values
        }
    for count in (
        PROCESSES
    ):  # each takes the peak of a core for its own; more than there are have only what there are
        found["processes"][count]["share"] *= max(count / CORES, 1)
    return {"rows": read_rows(folder), **found}


def draw(found: dict[str, Series]) -> None:
    import matplotlib
    from matplotlib import pyplot

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "llmtrain"  # the same figures make the same file
    figure, ((width, block), (processes, rows)) = pyplot.subplots(
        2, 2, figsize=(9, 6.5), layout="constrained"
    )
    for axes, kind, title in (
        (width, "width", "width (4 layers, block 128)"),
        (block, "block", "block size (4 layers x 128)"),
        (processes, "processes", f"processes of one thread, on {CORES} cores"),
    ):
        values = sorted(found[kind])
        axes.plot(values, [found[kind][value]["speed"] for value in values], "o-", color="tab:blue")
        axes.set(title=title, xscale="log", xticks=values, xticklabels=values, ylim=(0, None))
        axes.set_ylabel("tokens / s", color="tab:blue")
        axes.minorticks_off()
        other = axes.twinx()
        shares = [100 * found[kind][value]["share"] for value in values]
        other.plot(values, shares, "s--", color="tab:orange")
        other.set_ylabel("% of the measured peak", color="tab:orange")
        other.set_ylim(0, max(100, *shares) * 1.05)
    counts = sorted(found["rows"])
    labels = {
        "start": "seconds to the first batch",
        "memory": "memory",
        "order": "time to find a row",
    }
    for key, label in labels.items():
        least = found["rows"][counts[0]][key]
        rows.plot(
            counts, [found["rows"][count][key] / least for count in counts], "o-", label=label
        )
    rows.set(
        title=f"rows of {ROW} tokens, beside {counts[0]:,}",
        xscale="log",
        ylim=(0, 2),
        ylabel="ratio",
    )
    rows.legend()
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        return reading(Path(sys.argv[2]))
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError("matplotlib draws what is measured: pip install 'llmtrain[bench]'.")
    with scratch() as folder:
        found = measured(folder)
    few, many = (found["rows"][count] for count in (ROWS[0], ROWS[-1]))
    work, against = f"{ROWS[-1]:,} rows", f"{ROWS[0]:,} rows"
    report(
        "scale",
        [
            Row(f"first batch, {work}", against, many["start"], few["start"], "seconds", "<= 1.1"),
            Row(f"memory, {work}", against, many["memory"], few["memory"], "MiB", "<= 1.02"),
            Row(
                f"a row's place in the order, {work}",
                against,
                many["order"],
                few["order"],
                "us",
                "<= 1.1",
            ),
        ],
        series=found,
    )
    draw(found)


if __name__ == "__main__":
    launch(main)
