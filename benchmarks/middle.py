"""Updates and seconds to a loss with ten million weights: ours beside nanoGPT with AdamW at its best learning rate.

python -m benchmarks.middle --nanogpt FOLDER --text FILE     a text of some megabytes

Both train 6 layers x 384 on 8 rows of 256 tokens (bpe of 4,096), nanoGPT for 150 updates, once with each
learning rate. The lowest of its held-out losses, on the very text, is what ours has to reach in fewer.
"""

import argparse
import itertools
import pickle
import shutil
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import GPT_RECIPE, flags, gpt_flags, half, metrics, newest, place, run, scratch
from benchmarks.time_to_loss import ONCE, nanogpt
from llmtrain.console import say

UPDATES, RATES = 150, ("5e-4", "1e-3", "2e-3")
THEIRS = [
    "n_layer=6",
    "n_head=6",
    "n_embd=384",
    "block_size=256",
    "batch_size=8",
    f"max_iters={UPDATES}",
]
THEIRS += [
    f"lr_decay_iters={UPDATES}",
    f"eval_interval={UPDATES}",
    "warmup_iters=15",
    "min_lr=1e-4",
]
OURS_UPDATES = 75
OURS = gpt_flags(6, 6, 384, 256, 8, architecture="lfm2") + flags(
    optim="muon", max_steps=OURS_UPDATES
)
OURS += flags(learning_rate=0.02, warmup_steps=10, lr_scheduler_type="linear")


def run_recipe(folder: Path, text: Path, *more: str) -> None:
    data = flags(dataset=text, tokenizer="bpe:4096", eval_fraction=0.1)
    variables = {"LLMTRAIN_CACHE": str(folder / "cache"), "ACCELERATE_MIXED_PRECISION": half()}
    run(
        [sys.executable, GPT_RECIPE, *OURS, *ONCE, *data, *place(folder / "run"), *more],
        **variables,
    )


def write_data(text: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokens that ours has, as nanoGPT reads them: the last tenth of the text is held out."""
    first = int(0.9 * len(text))
    folder.mkdir(parents=True)
    for name, part in (("train", text[:first]), ("val", text[first:])):
        pieces = [part[start : start + 10_000] for start in range(0, len(part), 10_000)]
        ids = itertools.chain.from_iterable(
            tokenizer(pieces, add_special_tokens=False)["input_ids"]
        )
        np.fromiter(ids, np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(tokenizer)}))


def ours(folder: Path, text: Path, losses: list[float]) -> float:
    """Return the seconds until the last evaluation is written."""
    began = time.time()
    run_recipe(folder, text)
    losses.append(metrics(folder / "run")[-1]["eval/loss"])
    return newest(folder / "run", "metrics.jsonl").stat().st_mtime - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--text", type=Path, required=True, help="a file of UTF-8 text")
    arguments = parser.parse_args()
    names = [*(f"nanoGPT, AdamW {rate}" for rate in RATES), "ours"]
    losses: dict[str, list[float]] = {name: [] for name in names}
    with scratch() as folder:
        text = shutil.copy(arguments.text, folder / "text.txt")
        run_recipe(folder, text, "--dry_run")
        (words,) = folder.glob("cache/*/tokenizer")
        write_data(
            text.read_text(), PreTrainedTokenizerFast.from_pretrained(words), folder / "data/text"
        )
        shutil.copy(arguments.nanogpt / "configurator.py", folder)
        theirs = {
            name: partial(
                nanogpt, folder, arguments.nanogpt, [*THEIRS, f"learning_rate={rate}"], losses[name]
            )
            for name, rate in zip(names, RATES, strict=False)
        }
        found = in_turn(
            {**theirs, "ours": partial(ours, folder, text, losses["ours"])}, rounds=1, uncounted=0
        )
    for name, values in losses.items():
        say("nats", f"{name}: {values[0]:.4f} in {found[name].value:.1f} s")
    best = min(theirs, key=lambda name: losses[name][0])
    if losses["ours"][0] > losses[best][0]:
        say("missed", f"ours ended above {losses[best][0]:.4f} nats; it needs more updates.")
    work = f"to {losses[best][0]:.3f} nats, 6 x 384, {arguments.text.stem}"
    report(
        "middle",
        [
            Row(f"updates {work}", best, OURS_UPDATES, UPDATES, "updates", "<= 0.6"),
            Row(
                f"seconds {work}", best, found["ours"].value, found[best].value, "seconds", "<= 0.6"
            ),
        ],
        losses=losses,
    )


if __name__ == "__main__":
    main()
