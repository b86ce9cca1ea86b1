"""Fine-tuning and DPO beside TRL's trainers, in tokens per second: two tables, sft and preference.

**sft**: recipes/finetune.py trains a small Llama in float32 on the functions and docstrings of
builtin:python-functions, as SFTTrainer does, with the same maximum length and rows per step. Prompts
count as tokens and padding does not. The recipe packs conversations into rows. It is compared with

- TRL with packing and the fastest optimizer on a CPU;
- TRL as it comes, which pads.

**preference**: recipes/preference.py trains a small Llama in float32 on pairs of
builtin:python-preferences, as DPOTrainer does, with the same maximum length and as many tokens in a
micro-batch. A pair counts its prompt twice, because DPOTrainer computes it twice.

| measured | compared with |
|---|---|
| the speed of the recipe | DPOTrainer without gradient checkpointing |
| the same | DPOTrainer that also precomputes the reference log-probabilities |
| the peak memory of the recipe | the recipe with --loss_type orpo, which has no reference model |

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.trl`.
"""

import json
from functools import partial
from pathlib import Path

from benchmarks.comparison import Table, take_turns
from benchmarks.inputs import write_conversations_of_functions, write_llama, write_preference_pairs
from benchmarks.runs import (
    FINETUNE_RECIPE,
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

# --- sft

CHAT_LENGTH = 512  # tokens of a row
CHATS_OF_STEP = 4
STEPS = 30

PACKED_TRL = {
    "bf16": False,
    "gradient_checkpointing": False,
    "assistant_only_loss": True,
    "packing": True,
    "optim": "adamw_torch_fused",
}


def finetune(folder: Path, conversations: Path, model: Path) -> float:
    """Return the speed of the recipe, prompts included."""
    recipe_flags = flags(
        model_name_or_path=model,
        dataset=conversations,
        block_size=CHAT_LENGTH - 1,
        global_batch_size=CHATS_OF_STEP,
        per_device_train_batch_size=CHATS_OF_STEP,
        max_steps=STEPS,
        logging_steps=5,
        **STEPS_ONLY,
    )
    speed = recipe_speed(FINETUNE_RECIPE, folder, *recipe_flags)
    return speed_with_prompts(folder, speed)


def measure_sft() -> None:
    with scratch() as folder:
        conversations = folder / "chats.jsonl"
        model = folder / "base"
        texts = write_conversations_of_functions(conversations)
        write_llama(model, texts, CHAT_LENGTH)

        trl = partial(
            run_peer,
            "sft",
            model,
            conversations,
            batch=CHATS_OF_STEP,
            length=CHAT_LENGTH,
            steps=STEPS,
        )
        speeds = take_turns(
            {
                "recipe": partial(finetune, folder / "run", conversations, model),
                "TRL, packed": partial(trl, flags=json.dumps(PACKED_TRL)),
                "TRL, out of the box": trl,
            },
            rounds=3,
            warm_up_rounds=0,
        )

    table = Table("sft")
    for against, target in (("TRL, packed", ">= 1.5"), ("TRL, out of the box", ">= 3")):
        table.add(
            work=f"SFT, Llama, 4 layers x 128, length {CHAT_LENGTH}, float32",
            against=against,
            ours=speeds["recipe"].median,
            theirs=speeds[against].median,
            unit="tokens/s",
            target=target,
        )
    table.write(packed=PACKED_TRL)


# --- preference

PAIRS = 400  # of the data
PAIR_LENGTH = 1024  # tokens of a row
ROWS_OF_STEP = 2  # of the recipe, which packs pairs into rows
PAIRS_OF_STEP = 8  # of TRL, which pads pairs

TRL = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-6}
BEST_TRL = {**TRL, "precompute_ref_log_probs": True}


def prefer(folder: Path, pairs: Path, model: Path, loss_type: str) -> float:
    """Return the speed of the recipe, prompts included."""
    recipe_flags = flags(
        model_name_or_path=model,
        dataset=pairs,
        block_size=PAIR_LENGTH - 1,
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


def measure_preference() -> None:
    with scratch() as folder:
        pairs = folder / "pairs.jsonl"
        model = folder / "base"
        texts = write_preference_pairs(pairs, PAIRS)
        write_llama(model, texts, PAIR_LENGTH, width=256)

        trl = partial(
            run_peer, "dpo", model, pairs, batch=PAIRS_OF_STEP, length=PAIR_LENGTH, steps=STEPS
        )
        speeds = take_turns(
            {
                "recipe": partial(prefer, folder / "run", pairs, model, loss_type="sigmoid"),
                "best TRL": partial(trl, flags=json.dumps(BEST_TRL)),
                "TRL": partial(trl, flags=json.dumps(TRL)),
            },
            rounds=3,
            warm_up_rounds=0,
        )
        dpo_memory = peak_memory(folder / "run")
        tokens_of_pairs = lengths(folder / "run")

        prefer(folder / "orpo", pairs, model, loss_type="orpo")
        orpo_memory = peak_memory(folder / "orpo")

    work = f"DPO, Llama, 4 layers x 256, length {PAIR_LENGTH}, float32"
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


def main() -> None:
    measure_sft()
    measure_preference()


if __name__ == "__main__":
    main()
