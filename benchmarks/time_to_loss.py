"""Steps and seconds to a loss: recipes/gpt.py against nanoGPT, in two tables.

**time_to_loss**: seconds from the command to the eval loss that nanoGPT reaches with its README's
command for CPUs. That command makes 2,000 steps of 12 rows of 64 characters. The data of both sides
is prepared before. recipes/gpt.py, with the best of about 150 settings, is compared with

- that command;
- nanoGPT with the best of 65 other settings.

All settings were chosen on Python's documentation, by characters. Another text, such as
tinyshakespeare, had no influence on them.

**middle**, only with --text: both train 6 layers x 384, ten million weights, on 8 rows of 256 tokens
with a vocabulary of 4,096, and evaluate on the last tenth of the text. nanoGPT makes 150 steps with
AdamW, once with each of three learning rates. The recipe, with Muon, has to reach the lowest of the
three eval losses in fewer steps and seconds.

Repeat it with `python -m benchmarks.time_to_loss --nanogpt FOLDER [--text FILE]`. FOLDER is a
checkout of github.com/karpathy/nanoGPT. The text has some megabytes; without it, the first table
takes Python's documentation.
"""

import argparse
import itertools
import shutil
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from benchmarks.comparison import Figures, Table, take_turns
from benchmarks.inputs import ascii_of_python_docs
from benchmarks.nanogpt import (
    EVAL_FRACTION,
    prepare_recipe_data,
    run_nanogpt,
    run_recipe,
    write_nanogpt_data,
)
from benchmarks.runs import GPTShape, flags, scratch
from llmtrain.console import say

# --- time_to_loss

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

CHARACTER_STEPS = 84
CHARACTER_SHAPE = GPTShape(layers=2, heads=2, width=96, block=48, batch=64)
CHARACTER_FLAGS = [
    *CHARACTER_SHAPE.recipe_flags(architecture="lfm2"),
    *flags(optim="muon", max_steps=CHARACTER_STEPS, learning_rate=0.03, warmup_steps=8),
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


def measure_time_to_loss(nanogpt: Path, text_file: Path | None) -> None:
    """Measure the table of small models of characters."""
    if text_file:
        text = text_file.read_text()
        text_name = text_file.stem
    else:
        text = ascii_of_python_docs()
        text_name = "python-docs"

    with scratch() as folder:
        (folder / "text.txt").write_text(text)
        write_characters(text, folder)
        recipe_flags = [*CHARACTER_FLAGS, *flags(dataset=folder / "text.txt", tokenizer="char")]
        prepare_recipe_data(folder, recipe_flags)
        seeds = itertools.count()

        def recipe() -> Figures:
            return run_recipe(folder, [*recipe_flags, *flags(seed=next(seeds))])

        turns = take_turns(
            {
                "README": partial(run_nanogpt, folder, nanogpt, README_COMMAND),
                "best of nanoGPT": partial(run_nanogpt, folder, nanogpt, BEST_OF_NANOGPT),
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


# --- middle

VOCABULARY = 4096
MIDDLE_SHAPE = GPTShape(layers=6, heads=6, width=384, block=256, batch=8)

NANOGPT_STEPS = 150
NANOGPT_LEARNING_RATES = ("5e-4", "1e-3", "2e-3")
NANOGPT_SETTINGS = [
    f"n_layer={MIDDLE_SHAPE.layers}",
    f"n_head={MIDDLE_SHAPE.heads}",
    f"n_embd={MIDDLE_SHAPE.width}",
    f"block_size={MIDDLE_SHAPE.block}",
    f"batch_size={MIDDLE_SHAPE.batch}",
    f"max_iters={NANOGPT_STEPS}",
    f"lr_decay_iters={NANOGPT_STEPS}",
    f"eval_interval={NANOGPT_STEPS}",
    "warmup_iters=15",
    "min_lr=1e-4",
]

MIDDLE_STEPS = 75
MIDDLE_FLAGS = [
    *MIDDLE_SHAPE.recipe_flags(architecture="lfm2"),
    *flags(optim="muon", max_steps=MIDDLE_STEPS, learning_rate=0.02, warmup_steps=10),
    *flags(lr_scheduler_type="linear", tokenizer=f"bpe:{VOCABULARY}"),
]


def write_tokens(text: str, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a text for nanoGPT, with the recipe's tokens."""

    def encode(part: str) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(part), 10_000):
            piece = part[start : start + 10_000]
            ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
        return ids

    first_of_eval = int((1 - EVAL_FRACTION) * len(text))
    write_nanogpt_data(
        folder,
        train_ids=encode(text[:first_of_eval]),
        eval_ids=encode(text[first_of_eval:]),
        vocabulary=len(tokenizer),
    )


def measure_middle(nanogpt: Path, text_file: Path) -> None:
    """Measure the table of models with ten million weights."""
    with scratch() as folder:
        text = folder / "text.txt"
        shutil.copy(text_file, text)
        recipe_flags = [*MIDDLE_FLAGS, *flags(dataset=text)]
        prepare_recipe_data(folder, recipe_flags)
        [tokenizer] = folder.glob("cache/*/tokenizer")
        write_tokens(text.read_text(), PreTrainedTokenizerFast.from_pretrained(tokenizer), folder)

        nanogpt_contenders = {
            f"nanoGPT, AdamW {rate}": partial(
                run_nanogpt,
                folder,
                nanogpt,
                [*NANOGPT_SETTINGS, f"learning_rate={rate}"],
            )
            for rate in NANOGPT_LEARNING_RATES
        }
        turns = take_turns(
            {**nanogpt_contenders, "recipe": partial(run_recipe, folder, recipe_flags)},
            rounds=1,
            warm_up_rounds=0,
        )

    losses = {name: contender.median_of("loss") for name, contender in turns.items()}
    seconds = {name: contender.median_of("seconds") for name, contender in turns.items()}
    for name in turns:
        say("nats", f"{name}: {losses[name]:.4f} in {seconds[name]:.1f} s")
    best = min(nanogpt_contenders, key=losses.__getitem__)
    if losses["recipe"] > losses[best]:
        say("missed", f"the recipe ended above {losses[best]:.4f} nats; it needs more steps")

    goal = f"to {losses[best]:.3f} nats, 6 x 384, {text_file.stem}"
    table = Table("middle")
    table.add(
        work=f"steps {goal}",
        against=best,
        ours=MIDDLE_STEPS,
        theirs=NANOGPT_STEPS,
        unit="steps",
        target="<= 0.6",
    )
    table.add(
        work=f"seconds {goal}",
        against=best,
        ours=seconds["recipe"],
        theirs=seconds[best],
        unit="seconds",
        target="<= 0.6",
    )
    table.write(losses=losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--text", type=Path, help="a file of UTF-8 text")
    arguments = parser.parse_args()

    measure_time_to_loss(arguments.nanogpt, arguments.text)
    if arguments.text:
        measure_middle(arguments.nanogpt, arguments.text)


if __name__ == "__main__":
    main()
