"""Causal language models: recipes/finetune.py and recipes/gpt.py, against the Trainer of transformers.

| measured | compared with |
|---|---|
| tokens per second of a small Llama in float32 | the Trainer with its defaults |
| the same in bf16, if the CPU has instructions for it | the Trainer with its fastest flags |
| seconds from the command to the first step of that Llama, with the data cached | the Trainer |
| the same for recipes/gpt.py as it comes | the Trainer with a GPT-2 of that shape |

Both sides have the same rows, batch, precision and threads. The fastest flags are fused AdamW, and
compiled or not, whichever is faster.

Repeat it with `python -m benchmarks.trainer`.
"""

import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from benchmarks.comparison import Table, take_turns
from benchmarks.runs import (
    FINETUNE_RECIPE,
    GPT_RECIPE,
    PRECISION_NAMES,
    flags,
    half_precision,
    launcher,
    new_run_flags,
    newest_file,
    recipe_speed,
    run,
    run_for_json,
    run_peer,
    scratch,
)
from llmtrain import DataConfig, tokenize

STEPS = 40
BLOCK = 256
BATCH = 8
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

# The defaults of recipes/gpt.py.
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

HALF = half_precision()
DATA = flags(dataset="builtin:python-docs", eval_fraction=0)


def main() -> None:
    table = Table("trainer")
    with scratch() as folder:
        # The recipes find the rows in the same cache.
        os.environ["LLMTRAIN_CACHE"] = str(folder / "cache")
        llama = write_model_and_rows(folder / "llama", LLAMA)
        gpt2 = write_model_and_rows(folder / "gpt2", GPT2)
        llama_flags = flags(
            from_config=llama,
            tokenizer=llama,
            block_size=BLOCK,
            global_batch_size=BATCH,
            per_device_train_batch_size=BATCH,
        )

        speeds = compare_speeds(table, folder, llama, llama_flags)
        compare_first_steps(table, folder, llama, gpt2, llama_flags)
    table.write(speeds=speeds)


def write_model_and_rows(folder: Path, config: PretrainedConfig) -> Path:
    """Write the config of a model, its tokenizer, and the recipe's full rows for the Trainer."""
    block = config.max_position_embeddings
    data = DataConfig(
        dataset=["builtin:python-docs"],
        tokenizer=f"bpe:{config.vocab_size}",
        eval_fraction=0.0,
    )
    tokenized = tokenize(data, block)
    tokenized.tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)

    ids = tokenized.train.column("input_ids")
    is_full = (ids >= 0).all(axis=1)
    rows = ids[is_full][:, :block]
    datasets.Dataset.from_dict({"input_ids": rows.tolist()}).save_to_disk(str(folder / "rows"))
    return folder


# Tokens per second


def compare_speeds(
    table: Table, folder: Path, llama: Path, llama_flags: list[str]
) -> dict[str, list[float]]:
    """Add the rows about tokens per second; return the speeds of all turns."""
    recipe = partial(
        recipe_speed,
        FINETUNE_RECIPE,
        folder / "run",
        *llama_flags,
        *DATA,
        *flags(max_steps=STEPS, save_steps=100_000),
    )
    trainer = partial(run_peer, "trainer", llama, llama / "rows", batch=BATCH, steps=STEPS)
    best_flags: dict[str, object] = {"optim": "adamw_torch_fused", "bf16": HALF == "bf16"}
    compiled_flags = {**best_flags, "torch_compile": True}
    turns = take_turns(
        {
            "recipe, float32": recipe,
            "Trainer, defaults": trainer,
            "recipe, half": partial(recipe, precision=HALF),
            "Trainer, best": partial(trainer, flags=json.dumps(best_flags)),
            "Trainer, best, compiled": partial(trainer, flags=json.dumps(compiled_flags)),
        },
        rounds=3,
        warm_up_rounds=0,
    )

    work = f"Llama, 4 layers x 256, block {BLOCK}"
    table.add(
        work=f"{work}, float32",
        against="Trainer at its defaults",
        ours=turns["recipe, float32"].median,
        theirs=turns["Trainer, defaults"].median,
        unit="tokens/s",
        target=">= 1.3",
    )

    is_compiled_faster = turns["Trainer, best, compiled"].median > turns["Trainer, best"].median
    fastest = "Trainer, best, compiled" if is_compiled_faster else "Trainer, best"
    options = [name for name, value in best_flags.items() if value]
    if is_compiled_faster:
        options.append("compiled")
    table.add(
        work=f"{work}, {PRECISION_NAMES[HALF]}",
        against=f"Trainer, {', '.join(options)}",
        ours=turns["recipe, half"].median,
        theirs=turns[fastest].median,
        unit="tokens/s",
        target=">= 1.05",
    )
    return {name: contender.results for name, contender in turns.items()}


# Seconds to the first step


def compare_first_steps(
    table: Table, folder: Path, llama: Path, gpt2: Path, llama_flags: list[str]
) -> None:
    """Add the rows about the seconds from the command to the first step."""
    contenders: dict[str, Callable[[], float]] = {
        "recipe, Llama": partial(recipe_first_step, folder, FINETUNE_RECIPE, *llama_flags),
        "Trainer, Llama": partial(trainer_first_step, llama, BATCH),
        "recipe, GPT": partial(recipe_first_step, folder, GPT_RECIPE),
        "Trainer, GPT": partial(trainer_first_step, gpt2, GPT_BATCH),
    }
    seconds = take_turns(contenders, rounds=5)
    for model in ("Llama", "GPT"):
        table.add(
            work=f"launch to first step, data cached, {model}",
            against="Trainer",
            ours=seconds[f"recipe, {model}"].median,
            theirs=seconds[f"Trainer, {model}"].median,
            unit="seconds",
            target="<= 0.85",
        )


def recipe_first_step(folder: Path, recipe: str, *recipe_flags: str) -> float:
    """Return the seconds from the command of a recipe to the log entry of its first step."""
    command = [
        *launcher(),
        recipe,
        *recipe_flags,
        *DATA,
        *flags(max_steps=1, logging_steps=1),
        *new_run_flags(folder / "first"),
    ]
    start = time.time()
    run(command, LLMTRAIN_CACHE=str(folder / "cache"))
    return newest_file(folder / "first", "metrics.jsonl").stat().st_mtime - start


def trainer_first_step(model: Path, batch: int) -> float:
    """Return the seconds from the command to the end of the Trainer's first step."""
    command = [*launcher(), "-m", "benchmarks.peers", "trainer", model, model / "rows"]
    start = time.time()
    end = float(run_for_json([*command, *flags(batch=batch, steps=1, first_step=True)]))
    return end - start


if __name__ == "__main__":
    main()
