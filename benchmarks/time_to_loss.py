"""Seconds from the command to the held-out loss that nanoGPT reaches by its README's command for a CPU: 2,000 updates
of 12 x 64 characters. Against that command, and against nanoGPT with settings that were looked for as long as ours.

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
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import GPT_RECIPE, peer, run, scratch
from llmtrain import say
from llmtrain.data.builtin import python_docs

CHARACTERS = 1_115_394  # as many as tinyshakespeare has
ALIKE = ["device=cpu", "compile=False", "eval_iters=20", "log_interval=1", "dropout=0.0", "always_save_checkpoint=True"]
SHAPE = ["n_layer=4", "n_head=4", "n_embd=128", "block_size=64", "batch_size=12"]
PUBLISHED = [*SHAPE, "max_iters=2000", "lr_decay_iters=2000"]
TUNED = ["n_layer=2", "n_head=4", "n_embd=128", "block_size=32", "batch_size=32", "learning_rate=4e-3", "min_lr=4e-5"]
TUNED += ["max_iters=950", "lr_decay_iters=950", "eval_interval=950"]
OURS = ["--n_layer", "2", "--n_head", "2", "--n_embd", "128", "--block_size", "32"]
OURS += ["--global_batch_size", "48", "--per_device_train_batch_size", "48", "--optim", "muon", "--max_steps", "240"]
OURS += ["--learning_rate", "0.03", "--lr_scheduler_type", "linear", "--warmup_steps", "20"]
OURS += ["--adam_beta1", "0.85", "--adam_beta2", "0.99"]
ONCE = ["--eval_steps", "100000", "--save_steps", "100000", "--logging_steps", "100"]


def write_data(text: str, folder: Path) -> None:
    """As nanoGPT's data/shakespeare_char/prepare.py does: the last tenth is held out."""
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    ids = np.array([letters[letter] for letter in text], np.uint16)
    cut = int(0.9 * len(text))
    folder.mkdir(parents=True)
    ids[:cut].tofile(folder / "train.bin")
    ids[cut:].tofile(folder / "val.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(letters)}))


def nanogpt(folder: Path, nanogpt: Path, settings: list[str], losses: list[float]) -> float:
    """Its own train.py, as it is, in a folder that has what it looks for."""
    flags = [f"--{setting}" for setting in [*ALIKE, *settings, "dataset=text", "out_dir=out"]]
    began = time.time()
    run(
        [sys.executable, str(nanogpt / "train.py"), str(nanogpt / "config/train_shakespeare_char.py"), *flags],
        cwd=folder,
    )
    seconds = time.time() - began
    losses.append(peer("loss", nanogpt, folder / "out/ckpt.pt", folder / "data/text/val.bin"))
    return seconds


def ours(folder: Path, text: Path, seed: int, *more: str) -> tuple[float, float]:
    """Seconds until the last evaluation was written, and its loss in nats."""
    data = ["--dataset", str(text), "--tokenizer", "char", "--eval_fraction", "0.1", "--seed", str(seed)]
    place = ["--report_to", "none", "--output_dir", str(folder / "run"), "--resume_from_checkpoint", "never"]
    began = time.time()
    environment = {"LLMTRAIN_CACHE": str(folder / "cache"), "ACCELERATE_MIXED_PRECISION": "bf16"}
    run([sys.executable, GPT_RECIPE, *OURS, *ONCE, *data, *place, *more], **environment)
    if more:
        return 0.0, 0.0
    newest = max(folder.glob("run*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    last = json.loads(newest.read_text().splitlines()[-1])
    return newest.stat().st_mtime - began, last["eval/loss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT")
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    arguments = parser.parse_args()
    docs = "".join(record["text"] for record in python_docs()).encode("ascii", "ignore").decode()[:CHARACTERS]
    with scratch() as folder:
        text = folder / "text.txt"
        text.write_text(arguments.text.read_text() if arguments.text else docs)
        write_data(text.read_text(), folder / "data/text")
        shutil.copy(arguments.nanogpt / "configurator.py", folder)  # which train.py looks for where it is started
        ours(folder, text, 0, "--dry_run")  # prepares the data
        seeds, found_losses = itertools.count(), []
        published: list[float] = []
        tuned: list[float] = []

        def seconds() -> float:
            value, loss = ours(folder, text, next(seeds))
            found_losses.append(loss)
            return value if loss <= published[0] else float("inf")

        found = in_turn(
            {
                "published": partial(nanogpt, folder, arguments.nanogpt, PUBLISHED, published),
                "tuned": partial(nanogpt, folder, arguments.nanogpt, TUNED, tuned),
                "ours": seconds,
            },
            rounds=5,
            uncounted=0,
        )
    losses = {"nanoGPT as published": published, "nanoGPT tuned": tuned, "ours": found_losses}
    for name, values in losses.items():
        say("nats", f"{name}: {', '.join(f'{value:.4f}' for value in values)}")
    work = f"seconds to {published[0]:.3f} nats, {arguments.text.stem if arguments.text else 'python-docs'}"
    mine = found["ours"].value
    report(
        "time_to_loss",
        [
            Row(work, "nanoGPT as published", mine, found["published"].value, "seconds", "<= 0.2"),
            Row(work, "nanoGPT tuned as long", mine, found["tuned"].value, "seconds", "<= 0.5"),
        ],
        losses=losses,
        seconds={name: medians.values for name, medians in found.items()},
    )


if __name__ == "__main__":
    main()
