"""Seconds from the command to the held-out loss that nanoGPT reaches by its README's command for a CPU: 2,000 updates
of 12 x 64 characters. Against that command, and against nanoGPT with the best of 65 other settings (ours: of about 75).

python -m benchmarks.time_to_loss --nanogpt FOLDER [--text FILE]     tinyshakespeare, say; without it Python's own docs

Both sides have their data prepared. All settings were chosen on Python's documentation, by characters: another text has
had no say in them.
"""

import argparse
import itertools
import json
import pickle
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import GPT_RECIPE, half, newest, peer, run, scratch
from llmtrain import say
from llmtrain.data.builtin import python_docs

CHARACTERS = 1_115_394  # as many as tinyshakespeare has
ALIKE = ["device=cpu", "compile=False", "eval_iters=20", "log_interval=1", "dropout=0.0", "always_save_checkpoint=True"]
SHAPE = ["n_layer=4", "n_head=4", "n_embd=128", "block_size=64", "batch_size=12"]
PUBLISHED = [*SHAPE, "max_iters=2000", "lr_decay_iters=2000"]
TUNED = ["n_layer=1", "n_head=4", "n_embd=128", "block_size=48", "batch_size=32", "learning_rate=8e-3", "min_lr=8e-4"]
TUNED += ["max_iters=700", "lr_decay_iters=700", "eval_interval=700"]
OURS = ["--n_layer", "2", "--n_head", "2", "--n_embd", "128", "--block_size", "32"]
OURS += ["--global_batch_size", "48", "--per_device_train_batch_size", "48", "--optim", "muon", "--max_steps", "240"]
OURS += ["--learning_rate", "0.03", "--lr_scheduler_type", "linear", "--warmup_steps", "20"]
OURS += ["--adam_beta1", "0.85", "--adam_beta2", "0.99"]
ONCE = ["--eval_steps", "100000", "--save_steps", "100000", "--logging_steps", "100"]


def tuned_on() -> str:
    return "".join(record["text"] for record in python_docs()).encode("ascii", "ignore").decode()[:CHARACTERS]


def write_data(text: str, folder: Path) -> None:
    """As nanoGPT's data/shakespeare_char/prepare.py does: the last tenth is held out."""
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = np.array([letters[letter] for letter in text], np.uint16)
    cut = int(0.9 * len(text))
    folder.mkdir(parents=True)
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def nanogpt(folder: Path, checkout: Path, settings: list[str], losses: list[float]) -> float:
    """Its own train.py, in a folder that has what it looks for: seconds until the checkpoint of its last update
    is there, whose loss is taken afterwards."""
    flags = [f"--{setting}" for setting in [*ALIKE, *settings, "dataset=text", "out_dir=out"]]
    began = time.time()
    script, config = checkout / "train.py", checkout / "config/train_shakespeare_char.py"
    run([sys.executable, str(script), str(config), *flags], cwd=folder)
    seconds = (folder / "out/ckpt.pt").stat().st_mtime - began
    losses.append(peer("loss", checkout, folder / "out/ckpt.pt", folder / "data/text/val.bin"))
    return seconds


def run_recipe(folder: Path, text: Path, *more: str) -> None:
    data = ["--dataset", str(text), "--tokenizer", "char", "--eval_fraction", "0.1"]
    place = ["--report_to", "none", "--output_dir", str(folder / "run"), "--resume_from_checkpoint", "never"]
    environment = {"LLMTRAIN_CACHE": str(folder / "cache"), "ACCELERATE_MIXED_PRECISION": half()}
    run([sys.executable, GPT_RECIPE, *OURS, *ONCE, *data, *place, *more], **environment)


def ours(folder: Path, text: Path, seeds: Iterator[int], losses: list[float]) -> float:
    """Seconds until the last evaluation is written, whose loss is taken."""
    began = time.time()
    run_recipe(folder, text, "--seed", str(next(seeds)))
    metrics = newest(folder / "run", "metrics.jsonl")
    losses.append(json.loads(metrics.read_text().splitlines()[-1])["eval/loss"])
    return metrics.stat().st_mtime - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    arguments = parser.parse_args()
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text(arguments.text.read_text() if arguments.text else tuned_on())
        write_data(text.read_text(), folder / "data/text")
        shutil.copy(arguments.nanogpt / "configurator.py", folder)  # which train.py looks for where it is started
        run_recipe(folder, text, "--dry_run")  # prepares the data
        losses: dict[str, list[float]] = {"published": [], "tuned": [], "ours": []}
        found = in_turn(
            {
                "published": partial(nanogpt, folder, arguments.nanogpt, PUBLISHED, losses["published"]),
                "tuned": partial(nanogpt, folder, arguments.nanogpt, TUNED, losses["tuned"]),
                "ours": partial(ours, folder, text, itertools.count(), losses["ours"]),
            },
            rounds=5,
            uncounted=0,
        )
    for name, values in losses.items():
        say("nats", f"{name}: {', '.join(f'{value:.4f}' for value in values)}")
    aim = losses["published"][0]
    for name in ("tuned", "ours"):
        if max(losses[name]) > aim:
            raise SystemExit(f"{name}: a run ended above {aim:.4f} nats; it needs more updates.")
    work = f"seconds to {aim:.3f} nats, {arguments.text.stem if arguments.text else 'python-docs'}"
    mine = found["ours"].value
    report(
        "time_to_loss",
        [
            Row(work, "nanoGPT as published", mine, found["published"].value, "seconds", "<= 0.2"),
            Row(work, "nanoGPT, best of 65 settings", mine, found["tuned"].value, "seconds", "<= 0.5"),
        ],
        losses=losses,
        seconds={name: medians.values for name, medians in found.items()},
    )


if __name__ == "__main__":
    main()
