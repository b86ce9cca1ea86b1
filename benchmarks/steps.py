"""Tokens per second of recipes/gpt.py and of nanoGPT, with two sizes of the model.

Both sides have the same number of layers and heads, width, batch, precision and threads, and
train with AdamW. Each side is eager and compiled, and the faster of these is compared:

- the recipe with the architectures gpt2 and lfm2;
- nanoGPT, for which fused AdamW is tried as well.

Repeat it with `python -m benchmarks.steps --nanogpt FOLDER`. FOLDER is a checkout of
github.com/karpathy/nanoGPT.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.comparison import Table, take_turns
from benchmarks.runs import (
    GPT_RECIPE,
    PRECISION_NAMES,
    STEPS_ONLY,
    GPTShape,
    flags,
    half_precision,
    recipe_speed,
    run_peer,
    scratch,
)
from llmtrain.console import say

TOKENS_OF_NANOGPT = 1_000_000  # random ones; nanoGPT draws its batches from them
TARGETS = {"gpt2": ">= 1", "lfm2": ">= 1.15"}


@dataclass(frozen=True)
class Model:
    """What both sides train.

    Attributes:
        shape: the size of the model and of the batch.
        tokenizer: the tokenizer of the recipe.
        vocabulary: the tokens of that tokenizer.
        precision: the value of ``--mixed_precision``.
        steps: the steps of a run.
    """

    shape: GPTShape
    tokenizer: str
    vocabulary: int
    precision: str
    steps: int

    @property
    def description(self) -> str:
        """The size of the model and its precision."""
        size = f"{self.shape.layers} x {self.shape.width}"
        batch = f"block {self.shape.block}, batch {self.shape.batch}"
        return f"{size}, {batch}, {PRECISION_NAMES[self.precision]}"


SMALL = Model(
    shape=GPTShape(layers=4, heads=4, width=128, block=64, batch=12),
    tokenizer="byte",
    vocabulary=257,
    precision="no",
    steps=300,
)
LARGE = Model(
    shape=GPTShape(layers=6, heads=6, width=384, block=256, batch=8),
    tokenizer="bpe:4096",
    vocabulary=4096,
    precision=half_precision(),
    steps=40,
)


def recipe_contenders(model: Model, folder: Path) -> dict[str, Callable[[], float]]:
    """Return the recipe with each architecture, eager and compiled."""
    contenders: dict[str, Callable[[], float]] = {}
    for architecture in TARGETS:
        for name, torch_compile in (("eager", "never"), ("compiled", "always")):
            contenders[f"{architecture}, {name}"] = partial(
                recipe_speed,
                GPT_RECIPE,
                folder / "run",
                *model.shape.recipe_flags(architecture),
                *flags(tokenizer=model.tokenizer, max_steps=model.steps, logging_steps=10),
                *flags(optim="adamw", learning_rate=1e-3, torch_compile=torch_compile),
                *flags(**STEPS_ONLY),
                precision=model.precision,
            )
    return contenders


def nanogpt_contenders(model: Model, nanogpt: str, folder: Path) -> dict[str, Callable[[], float]]:
    """Return nanoGPT's loop on random tokens, with and without fused AdamW and compilation."""
    tokens = folder / "tokens"
    random = np.random.default_rng(seed=0)
    random.integers(model.vocabulary, size=TOKENS_OF_NANOGPT, dtype=np.uint16).tofile(tokens)

    contenders: dict[str, Callable[[], float]] = {}
    for name, is_fused, is_compiled in (
        ("eager", False, False),
        ("fused", True, False),
        ("compiled, fused", True, True),
    ):
        contenders[f"nanoGPT, {name}"] = partial(
            run_peer,
            "nanogpt",
            nanogpt,
            tokens=tokens,
            vocabulary=model.vocabulary,
            shape=model.shape,
            steps=model.steps,
            bf16=model.precision == "bf16",
            fused=is_fused,
            compile=is_compiled,
        )
    return contenders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    arguments = parser.parse_args()

    table = Table("steps")
    for model in (SMALL, LARGE):
        with scratch() as folder:
            recipes = recipe_contenders(model, folder)
            peers = nanogpt_contenders(model, arguments.nanogpt, folder)
            turns = take_turns({**recipes, **peers}, rounds=3, warm_up_rounds=0)

        speeds = {name: contender.median for name, contender in turns.items()}
        for name, contender in turns.items():
            rounds = ", ".join(f"{speed:,.0f}" for speed in contender.results)
            say("tokens/s", f"{model.description}: {name} {speeds[name]:,.0f} ({rounds})")

        fastest_peer = max(peers, key=speeds.__getitem__)
        for architecture, target in TARGETS.items():
            variants = [name for name in recipes if name.startswith(architecture)]
            fastest = max(variants, key=speeds.__getitem__)
            table.add(
                work=f"{fastest}, {model.description}",
                against=fastest_peer,
                ours=speeds[fastest],
                theirs=speeds[fastest_peer],
                unit="tokens/s",
                target=target,
            )
    table.write()


if __name__ == "__main__":
    main()
