"""A Llama on text by recipes/finetune.py and by transformers' Trainer: tokens a second, seconds to the first update.

The seconds are from the command on; they are taken also of recipes/gpt.py, beside a Trainer of a GPT-2 of its shape.

python -m benchmarks.trainer
"""

import json
import os
import time
from functools import partial
from pathlib import Path

import datasets
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import (
    FINETUNE_RECIPE,
    GPT_RECIPE,
    NAMES,
    figure,
    flags,
    half,
    launcher,
    newest,
    peer,
    place,
    recipe,
    run,
    scratch,
)
from llmtrain import DataConfig, tokenize

BLOCK, BATCH, UPDATES = 256, 8, 40
BEST = {
    "optim": "adamw_torch_fused",
    "bf16": half() == "bf16",
}  # of what helps on a CPU; compiled or not, as is faster
SIZES = flags(block_size=BLOCK, global_batch_size=BATCH, per_device_train_batch_size=BATCH)
TEXT = flags(dataset="builtin:python-docs", eval_fraction=0)
LLAMA = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=BLOCK,
    bos_token_id=0,
    eos_token_id=0,
    tie_word_embeddings=False,
)
# what recipes/gpt.py trains by default
GPT_BATCH = 32
GPT2 = GPT2Config(
    vocab_size=2048,
    n_positions=128,
    n_embd=128,
    n_layer=4,
    n_head=4,
    bos_token_id=0,
    eos_token_id=0,
)


def write_model(folder: Path, config: PretrainedConfig) -> Path:
    """Write the shape of the model, its tokenizer, and the same rows for the Trainer."""
    data = DataConfig(
        dataset=["builtin:python-docs"], tokenizer=f"bpe:{config.vocab_size}", eval_fraction=0.0
    )
    block = config.max_position_embeddings
    tokenized = tokenize(data, block)
    tokenized.tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    rows = tokenized.train.dataset.with_format("numpy")[:]["input_ids"]
    whole = rows[(rows >= 0).all(axis=1)][:, :block]
    datasets.Dataset.from_dict({"input_ids": whole.tolist()}).save_to_disk(str(folder / "rows"))
    return folder


def first_step(folder: Path, script: str, *words: str) -> float:
    """Return the seconds from the command to the first update, with data in the cache."""
    began = time.time()
    command = [
        *launcher(),
        script,
        *words,
        *TEXT,
        *flags(max_steps=1, logging_steps=1),
        *place(folder / "first"),
    ]
    run(command, LLMTRAIN_CACHE=str(folder / "cache"))
    return newest(folder / "first", "metrics.jsonl").stat().st_mtime - began


def trainers_first_step(model: Path, batch: int) -> float:
    arguments = ["trainer", model, model / "rows", "--batch", batch, "--steps", 1, "--first_step"]
    began = time.time()
    return float(figure([*launcher(), "-m", "benchmarks.peers", *arguments])) - began


def main() -> None:
    with scratch() as folder:
        os.environ["LLMTRAIN_CACHE"] = str(
            folder / "cache"
        )  # where the recipes find the rows as well
        model, small = write_model(folder / "llama", LLAMA), write_model(folder / "gpt2", GPT2)
        shape = [*flags(from_config=model, tokenizer=model), *SIZES]
        words = [*shape, *TEXT, *flags(max_steps=UPDATES, save_steps=100_000)]
        trainer = ["trainer", model, model / "rows", "--batch", BATCH, "--steps", UPDATES]
        speed = in_turn(
            {
                "ours": partial(recipe, FINETUNE_RECIPE, folder / "run", *words),
                "defaults": partial(peer, *trainer),
                "ours, half": partial(
                    recipe, FINETUNE_RECIPE, folder / "run", *words, precision=half()
                ),
                "best": partial(peer, *trainer, "--flags", json.dumps(BEST)),
                "best, compiled": partial(
                    peer, *trainer, "--flags", json.dumps(BEST | {"torch_compile": True})
                ),
            },
            rounds=3,
            uncounted=0,
        )
        launched = in_turn(
            {
                "ours": partial(first_step, folder, FINETUNE_RECIPE, *shape),
                "theirs": partial(trainers_first_step, model, BATCH),
                "our gpt": partial(first_step, folder, GPT_RECIPE),
                "their gpt": partial(trainers_first_step, small, GPT_BATCH),
            },
            rounds=5,
        )
    work, start = "Llama, 4 layers x 256, block 256", "launch to first update, data cached,"
    best = max("best", "best, compiled", key=lambda name: speed[name].value)
    chosen = [name for name, value in BEST.items() if value]
    against = f"Trainer, {', '.join(chosen)}{best.removeprefix('best')}"
    report(
        "trainer",
        [
            Row(
                f"{work}, float32",
                "Trainer at its defaults",
                speed["ours"].value,
                speed["defaults"].value,
                "tokens/s",
                ">= 1.3",
            ),
            Row(
                f"{work}, {NAMES[half()]}",
                against,
                speed["ours, half"].value,
                speed[best].value,
                "tokens/s",
                ">= 1.05",
            ),
            *(
                Row(
                    f"{start} {kind}",
                    "Trainer",
                    launched[ours].value,
                    launched[theirs].value,
                    "seconds",
                    "<= 0.85",
                )
                for kind, ours, theirs in (
                    ("Llama", "ours", "theirs"),
                    ("GPT", "our gpt", "their gpt"),
                )
            ),
        ],
        speeds={name: medians.values for name, medians in speed.items()},
    )


if __name__ == "__main__":
    main()
