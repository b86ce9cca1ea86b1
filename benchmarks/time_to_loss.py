"""Seconds from the command to the held-out loss that nanoGPT reaches by its README's command for a CPU.

That is 2,000 updates of 12 x 64 characters. Against that command, and against nanoGPT with the best of 65 other
settings (ours: of about 150).

python -m benchmarks.time_to_loss --nanogpt FOLDER [--text FILE]     tinyshakespeare, say; without it Python's own docs

Both sides have their data prepared. All settings were chosen on Python's documentation, by characters: another text has
had no say in them.
"""

import argparse
import itertools
import pickle
import shutil
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparison import Row, in_turn, report
from benchmarks.inputs import letters_of_docs
from benchmarks.runs import (
    GPT_RECIPE,
    flags,
    gpt_flags,
    half,
    metrics,
    newest,
    peer,
    place,
    run,
    scratch,
)
from llmtrain.console import say

ALIKE = [
    "device=cpu",
    "compile=False",
    "eval_iters=20",
    "log_interval=1",
    "dropout=0.0",
    "always_save_checkpoint=True",
]
SHAPE = ["n_layer=4", "n_head=4", "n_embd=128", "block_size=64", "batch_size=12"]
PUBLISHED = [*SHAPE, "max_iters=2000", "lr_decay_iters=2000"]
TUNED = [
    "n_layer=1",
    "n_head=4",
    "n_embd=128",
    "block_size=48",
    "batch_size=32",
    "learning_rate=8e-3",
    "min_lr=8e-4",
]
TUNED += ["max_iters=700", "lr_decay_iters=700", "eval_interval=700"]
OURS = gpt_flags(2, 2, 96, 48, 64, architecture="lfm2") + flags(
    optim="muon", max_steps=84, learning_rate=0.03
)
OURS += flags(warmup_steps=8, lr_scheduler_type="linear", adam_beta1=0.8, adam_beta2=0.99)
ONCE = flags(eval_steps=100_000, save_steps=100_000, logging_steps=100)
PARTS = ("start", "first evaluation", "updates", "last evaluation")


def write_data(text: str, folder: Path) -> None:
    """Write what nanoGPT's data/shakespeare_char/prepare.py writes: the last tenth is held out."""
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = np.array([letters[letter] for letter in text], np.uint16)
    first = int(0.9 * len(text))  # of those held out
    folder.mkdir(parents=True)
    ids[:first].tofile(folder / "train.bin")
    ids[first:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def nanogpt(folder: Path, checkout: Path, settings: list[str], losses: list[float]) -> float:
    """Run its own train.py in a folder that has what it looks for; returns the seconds until its last checkpoint.

    The loss of that is taken afterwards.
    """
    words = [f"--{setting}" for setting in [*ALIKE, *settings, "dataset=text", "out_dir=out"]]
    began = time.time()
    script, config = checkout / "train.py", checkout / "config/train_shakespeare_char.py"
    run([sys.executable, script, config, *words], cwd=folder)
    seconds = (folder / "out/ckpt.pt").stat().st_mtime - began
    losses.append(peer("loss", checkout, folder / "out/ckpt.pt", folder / "data/text/val.bin"))
    return seconds


def run_recipe(folder: Path, text: Path, *more: str) -> None:
    data = flags(dataset=text, tokenizer="char", eval_fraction=0.1)
    variables = {"LLMTRAIN_CACHE": str(folder / "cache"), "ACCELERATE_MIXED_PRECISION": half()}
    run(
        [sys.executable, GPT_RECIPE, *OURS, *ONCE, *data, *place(folder / "run"), *more],
        **variables,
    )


def ours(
    folder: Path, text: Path, seeds: Iterator[int], losses: list[float], parts: list[list[float]]
) -> float:
    """Return the seconds until the last evaluation is written, whose loss is taken; and note its :data:`PARTS`."""
    began = time.time()
    run_recipe(folder, text, "--seed", str(next(seeds)))
    lines = metrics(folder / "run")
    losses.append(lines[-1]["eval/loss"])
    first = next(line for line in lines if "eval/loss" in line)
    times = [began, *(line["time"] for line in (lines[0], first, lines[-2], lines[-1]))]
    parts.append([end - start for start, end in itertools.pairwise(times)])
    return newest(folder / "run", "metrics.jsonl").stat().st_mtime - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    arguments = parser.parse_args()
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text(arguments.text.read_text() if arguments.text else letters_of_docs())
        write_data(text.read_text(), folder / "data/text")
        shutil.copy(
            arguments.nanogpt / "configurator.py", folder
        )  # which train.py looks for where it is started
        run_recipe(folder, text, "--dry_run")  # prepares the data
        losses: dict[str, list[float]] = {"published": [], "tuned": [], "ours": []}
        parts: list[list[float]] = []
        found = in_turn(
            {
                "published": partial(
                    nanogpt, folder, arguments.nanogpt, PUBLISHED, losses["published"]
                ),
                "tuned": partial(nanogpt, folder, arguments.nanogpt, TUNED, losses["tuned"]),
                "ours": partial(ours, folder, text, itertools.count(), losses["ours"], parts),
            },
            rounds=5,
            uncounted=0,
        )
    for name, values in losses.items():
        say("nats", f"{name}: {', '.join(f'{value:.4f}' for value in values)}")
    apart = dict(zip(PARTS, map(statistics.median, zip(*parts, strict=True)), strict=True))
    say("seconds", ", ".join(f"{name} {value:.2f}" for name, value in apart.items()))
    aim = losses["published"][0]
    for name in ("tuned", "ours"):
        if max(losses[name]) > aim:
            say("missed", f"{name}: a run ended above {aim:.4f} nats; it needs more updates.")
    work = f"seconds to {aim:.3f} nats, {arguments.text.stem if arguments.text else 'python-docs'}"
    mine = found["ours"].value
    report(
        "time_to_loss",
        [
            Row(work, "nanoGPT as published", mine, found["published"].value, "seconds", "<= 0.2"),
            Row(
                work,
                "nanoGPT, best of 65 settings",
                mine,
                found["tuned"].value,
                "seconds",
                "<= 0.5",
            ),
        ],
        losses=losses,
        parts=apart,
        seconds={name: medians.values for name, medians in found.items()},
    )


if __name__ == "__main__":
    main()
