"""Seconds from the command to the eval loss that nanoGPT reaches with its README's command for CPUs.

That command makes 2,000 steps of 12 rows of 64 characters. The data of both sides is prepared
before. recipes/gpt.py, with the best of about 150 settings, is compared with

- that command;
- nanoGPT with the best of 65 other settings.

All settings were chosen on Python's documentation, by characters. Another text, such as
tinyshakespeare, had no influence on them.

Repeat it with `python -m benchmarks.time_to_loss --nanogpt FOLDER --text FILE`. FOLDER is a
checkout of github.com/karpathy/nanoGPT. Without a text, it is Python's documentation.
"""

import argparse
import itertools
from functools import partial
from pathlib import Path

from benchmarks.comparison import Figures, Table, take_turns
from benchmarks.inputs import ascii_of_python_docs
from benchmarks.nanogpt_runs import (
    EVAL_FRACTION,
    prepare_recipe_data,
    run_nanogpt,
    run_recipe,
    write_nanogpt_data,
)
from benchmarks.runs import GPTShape, flags, scratch
from llmtrain.console import say

README_COMMAND = [
    "n_layer=4",
    "n_head=4",
    "n_embd=128",
    "block_size=64",
    "batch_size=12",
    "max_iters=2000",
    "lr_decay_iters=2000",
]
BEST_OF_NANOGPT = [
    "n_layer=1",
    "n_head=4",
    "n_embd=128",
    "block_size=48",
    "batch_size=32",
    "learning_rate=8e-3",
    "min_lr=8e-4",
    "max_iters=700",
    "lr_decay_iters=700",
    "eval_interval=700",
]

STEPS = 84
SHAPE = GPTShape(layers=2, heads=2, width=96, block=48, batch=64)
RECIPE_FLAGS = [
    *SHAPE.recipe_flags(architecture="lfm2"),
    *flags(optim="muon", max_steps=STEPS, learning_rate=0.03, warmup_steps=8),
    *flags(lr_scheduler_type="linear", adam_beta1=0.8, adam_beta2=0.99),
]
PARTS_OF_RECIPE = ("start", "first evaluation", "steps", "last evaluation")


def write_characters(text: str, folder: Path) -> None:
    """Write a text for nanoGPT, with a token for each character, as its prepare.py does."""
    ids_of_characters = {character: id for id, character in enumerate(sorted(set(text)))}
    ids = [ids_of_characters[character] for character in text]
    first_of_eval = int((1 - EVAL_FRACTION) * len(text))
    write_nanogpt_data(
        folder,
        train_ids=ids[:first_of_eval],
        eval_ids=ids[first_of_eval:],
        vocabulary=len(ids_of_characters),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    arguments = parser.parse_args()
    if arguments.text:
        text = arguments.text.read_text()
        text_name = arguments.text.stem
    else:
        text = ascii_of_python_docs()
        text_name = "python-docs"

    with scratch() as folder:
        (folder / "text.txt").write_text(text)
        write_characters(text, folder)
        recipe_flags = [*RECIPE_FLAGS, *flags(dataset=folder / "text.txt", tokenizer="char")]
        prepare_recipe_data(folder, recipe_flags)
        seeds = itertools.count()

        def recipe() -> Figures:
            return run_recipe(folder, [*recipe_flags, *flags(seed=next(seeds))])

        turns = take_turns(
            {
                "README": partial(run_nanogpt, folder, arguments.nanogpt, README_COMMAND),
                "best of nanoGPT": partial(run_nanogpt, folder, arguments.nanogpt, BEST_OF_NANOGPT),
                "recipe": recipe,
            },
            rounds=5,
            warm_up_rounds=0,
        )

    losses = {name: contender.values_of("loss") for name, contender in turns.items()}
    for name, values in losses.items():
        say("nats", f"{name}: {', '.join(f'{value:.4f}' for value in values)}")
    loss_to_reach = losses["README"][0]
    for name in ("best of nanoGPT", "recipe"):
        if max(losses[name]) > loss_to_reach:
            say(
                "missed", f"{name}: a run ended above {loss_to_reach:.4f} nats; it needs more steps"
            )

    parts = {part: turns["recipe"].median_of(part) for part in PARTS_OF_RECIPE}
    say("seconds", ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items()))

    table = Table("time_to_loss")
    for against, name, target in (
        ("nanoGPT as published", "README", "<= 0.2"),
        ("nanoGPT, best of 65 settings", "best of nanoGPT", "<= 0.5"),
    ):
        table.add(
            work=f"seconds to {loss_to_reach:.3f} nats, {text_name}",
            against=against,
            ours=turns["recipe"].median_of("seconds"),
            theirs=turns[name].median_of("seconds"),
            unit="seconds",
            target=target,
        )
    table.write(
        losses=losses,
        parts=parts,
        seconds={name: contender.values_of("seconds") for name, contender in turns.items()},
    )


if __name__ == "__main__":
    main()
