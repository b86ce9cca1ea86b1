"""DPO: tokens per second of recipes/preference.py and of TRL's DPOTrainer, and the peak memory.

Both train a small Llama in float32 on pairs of builtin:python-preferences, with the same maximum
length and as many tokens in a micro-batch. A pair counts its prompt twice, because DPOTrainer
computes it twice, and padding does not count.

| measured | compared with |
|---|---|
| the speed of the recipe | DPOTrainer without gradient checkpointing |
| the same | DPOTrainer that also precomputes the reference log-probabilities |
| the peak memory of the recipe | the recipe with --loss_type orpo, which has no reference model |

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.preference`.
"""

import json
from functools import partial
from pathlib import Path

from benchmarks.comparison import Table, take_turns
from benchmarks.inputs import write_llama, write_preference_pairs
from benchmarks.runs import (
    PREFERENCE_RECIPE,
    STEPS_ONLY,
    dataset_audit,
    flags,
    metrics,
    recipe_speed,
    run_peer,
    scratch,
    speed_with_prompts,
)

PAIRS = 400  # of the data
LENGTH = 1024  # tokens of a row
ROWS_OF_STEP = 2  # of the recipe, which packs pairs into rows
PAIRS_OF_STEP = 8  # of TRL, which pads pairs
STEPS = 30

TRL = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-6}
BEST_TRL = {**TRL, "precompute_ref_log_probs": True}


def recipe(folder: Path, pairs: Path, model: Path, loss_type: str) -> float:
    """Return the speed of the recipe, prompts included."""
    recipe_flags = flags(
        model_name_or_path=model,
        dataset=pairs,
        block_size=LENGTH - 1,
        global_batch_size=ROWS_OF_STEP,
        per_device_train_batch_size=ROWS_OF_STEP,
        max_steps=STEPS,
        logging_steps=5,
        loss_type=loss_type,
        **STEPS_ONLY,
    )
    speed = recipe_speed(PREFERENCE_RECIPE, folder, *recipe_flags)
    return speed_with_prompts(folder, speed)


def peak_memory(folder: Path) -> float:
    """Return the peak memory of the newest run, in GiB."""
    entries = [entry["memory"] for entry in metrics(folder) if "memory" in entry]
    return max(max(memory["host"]) for memory in entries)


def lengths(folder: Path) -> dict[str, float]:
    """Return the tokens per pair, and how much faster sharing prompts can be at most.

    A pair with a prompt of P tokens and answers of C and R tokens has 2P + C + R tokens, and
    P + C + R if both answers share the prompt. The bound is the ratio of these.
    """
    audit = dataset_audit(folder)
    pairs = audit["kept"]
    return {
        "pairs": pairs,
        "tokens": audit["tokens"] / pairs,
        "targets": audit["targets"] / pairs,
        "shared_tokens": audit["shared_tokens"] / pairs,
        "bound": audit["tokens"] / (audit["tokens"] - audit["shared_tokens"]),
    }


def main() -> None:
    with scratch() as folder:
        pairs = folder / "pairs.jsonl"
        model = folder / "base"
        texts = write_preference_pairs(pairs, PAIRS)
        write_llama(model, texts, LENGTH, width=256)

        trl = partial(
            run_peer, "dpo", model, pairs, batch=PAIRS_OF_STEP, length=LENGTH, steps=STEPS
        )
        speeds = take_turns(
            {
                "recipe": partial(recipe, folder / "run", pairs, model, loss_type="sigmoid"),
                "best TRL": partial(trl, flags=json.dumps(BEST_TRL)),
                "TRL": partial(trl, flags=json.dumps(TRL)),
            },
            rounds=3,
            warm_up_rounds=0,
        )
        dpo_memory = peak_memory(folder / "run")
        tokens_of_pairs = lengths(folder / "run")

        recipe(folder / "orpo", pairs, model, loss_type="orpo")
        orpo_memory = peak_memory(folder / "orpo")

    work = f"DPO, Llama, 4 layers x 256, length {LENGTH}, float32"
    table = Table("preference")
    table.add(
        work=work,
        against="TRL, without checkpointing",
        ours=speeds["recipe"].median,
        theirs=speeds["TRL"].median,
        unit="tokens/s",
        target=">= 2",
    )
    table.add(
        work=work,
        against="TRL, its best flags",
        ours=speeds["recipe"].median,
        theirs=speeds["best TRL"].median,
        unit="tokens/s",
        target=">= 1.5",
    )
    table.add(
        work=f"{work}: peak memory",
        against="orpo, which has no reference",
        ours=dpo_memory,
        theirs=orpo_memory,
        unit="GiB",
        target="<= 1.1",
    )
    table.write(lengths=tokens_of_pairs, best=BEST_TRL)


if __name__ == "__main__":
    main()
