"""Steps and seconds to a loss, with ten million weights: recipes/gpt.py against nanoGPT.

Both train 6 layers x 384 on 8 rows of 256 tokens with a vocabulary of 4,096, and evaluate on the
last tenth of the text. nanoGPT makes 150 steps with AdamW, once with each of three learning rates.
The recipe, with Muon, has to reach the lowest of the three eval losses in fewer steps and seconds.

Repeat it with `python -m benchmarks.middle --nanogpt FOLDER --text FILE`. FOLDER is a checkout of
github.com/karpathy/nanoGPT, and the text has some megabytes.
"""

import argparse
import shutil
from functools import partial
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from benchmarks.comparison import Table, take_turns
from benchmarks.nanogpt_runs import (
    EVAL_FRACTION,
    prepare_recipe_data,
    run_nanogpt,
    run_recipe,
    write_nanogpt_data,
)
from benchmarks.runs import GPTShape, flags, scratch
from llmtrain.console import say

VOCABULARY = 4096
SHAPE = GPTShape(layers=6, heads=6, width=384, block=256, batch=8)

NANOGPT_STEPS = 150
NANOGPT_LEARNING_RATES = ("5e-4", "1e-3", "2e-3")
NANOGPT_SETTINGS = [
    f"n_layer={SHAPE.layers}",
    f"n_head={SHAPE.heads}",
    f"n_embd={SHAPE.width}",
    f"block_size={SHAPE.block}",
    f"batch_size={SHAPE.batch}",
    f"max_iters={NANOGPT_STEPS}",
    f"lr_decay_iters={NANOGPT_STEPS}",
    f"eval_interval={NANOGPT_STEPS}",
    "warmup_iters=15",
    "min_lr=1e-4",
]

RECIPE_STEPS = 75
RECIPE_FLAGS = [
    *SHAPE.recipe_flags(architecture="lfm2"),
    *flags(optim="muon", max_steps=RECIPE_STEPS, learning_rate=0.02, warmup_steps=10),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", type=Path, required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument("--text", type=Path, required=True, help="a file of UTF-8 text")
    arguments = parser.parse_args()

    with scratch() as folder:
        text = folder / "text.txt"
        shutil.copy(arguments.text, text)
        recipe_flags = [*RECIPE_FLAGS, *flags(dataset=text)]
        prepare_recipe_data(folder, recipe_flags)
        [tokenizer] = folder.glob("cache/*/tokenizer")
        write_tokens(text.read_text(), PreTrainedTokenizerFast.from_pretrained(tokenizer), folder)

        nanogpt_contenders = {
            f"nanoGPT, AdamW {rate}": partial(
                run_nanogpt,
                folder,
                arguments.nanogpt,
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

    goal = f"to {losses[best]:.3f} nats, 6 x 384, {arguments.text.stem}"
    table = Table("middle")
    table.add(
        work=f"steps {goal}",
        against=best,
        ours=RECIPE_STEPS,
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


if __name__ == "__main__":
    main()
