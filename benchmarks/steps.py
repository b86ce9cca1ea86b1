"""Tokens a second of recipes/gpt.py beside nanoGPT's loop: the same shape, batch, precision and threads, in turn.

python -m benchmarks.steps --nanogpt FOLDER         FOLDER: a checkout of github.com/karpathy/nanoGPT
"""

import argparse
from functools import partial

import numpy as np

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import (
    GPT_RECIPE,
    NAMES,
    UPDATES_ALONE,
    flags,
    gpt_flags,
    half,
    peer,
    recipe,
    scratch,
)
from llmtrain.console import say

SHAPES = {  # layers, heads, width, block, batch; vocabulary; precision; updates; target
    "4 x 128, block 64, batch 12, float32": ((4, 4, 128, 64, 12), "byte", 257, "no", 300),
    f"6 x 384, block 256, batch 8, {NAMES[half()]}": (
        (6, 6, 384, 256, 8),
        "bpe:4096",
        4096,
        half(),
        40,
    ),
}
TARGETS = {"gpt2": ">= 1", "lfm2": ">= 1.15"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--nanogpt", required=True, help="a checkout of github.com/karpathy/nanoGPT"
    )
    arguments = parser.parse_args()
    rows = []
    with scratch() as folder:
        for work, (shape, tokenizer, vocabulary, precision, updates) in SHAPES.items():
            tokens = folder / "tokens"
            np.random.default_rng(0).integers(vocabulary, size=1_000_000, dtype=np.uint16).tofile(
                tokens
            )
            common = [
                arguments.nanogpt,
                "--tokens",
                tokens,
                "--vocabulary",
                vocabulary,
                "--steps",
                updates,
            ]
            common += ["--shape", *shape, *(["--bf16"] if precision == "bf16" else [])]
            kinds = {"eager": [], "fused": ["--fused"], "compiled, fused": ["--fused", "--compile"]}
            theirs = {
                f"nanoGPT, {name}": partial(peer, "nanogpt", *common, *more)
                for name, more in kinds.items()
            }
            words = flags(tokenizer=tokenizer, max_steps=updates, logging_steps=10, **UPDATES_ALONE)
            words += flags(optim="adamw", learning_rate=1e-3)  # as nanoGPT's
            mine = {
                f"{architecture}, {name}": partial(
                    recipe,
                    GPT_RECIPE,
                    folder / "run",
                    *gpt_flags(*shape, architecture=architecture),
                    *words,
                    "--torch_compile",
                    compiled,
                    precision=precision,
                )
                for architecture in TARGETS
                for name, compiled in (("eager", "never"), ("compiled", "always"))
            }
            found = in_turn({**mine, **theirs}, rounds=3, uncounted=0)
            for name, medians in found.items():
                say(
                    "tokens/s",
                    f"{work}: {name} {medians.value:,.0f} ({[round(value) for value in medians.values]})",
                )
            best = max(theirs, key=lambda name: found[name].value)
            for architecture, target in TARGETS.items():
                own = [name for name in mine if name.startswith(architecture)]
                at_best = max(own, key=lambda name: found[name].value)
                rows.append(
                    Row(
                        f"{at_best}, {work}",
                        best,
                        found[at_best].value,
                        found[best].value,
                        "tokens/s",
                        target,
                    )
                )
    report("steps", rows)


if __name__ == "__main__":
    main()
