"""Fine-tuning, DPO and distillation beside TRL's trainers: three tables, sft, preference and gkd.

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

**gkd**: a small Llama learns from a larger one, in float32, with a vocabulary of 16,384. GKDTrainer
does so on the answers in the data with the forward KL, and pads. It is compared with
recipes/distill.py, which packs, with the teacher in memory (live) and on rows that it has scored
(offline), and with recipes/finetune.py (sft): tokens per second, prompts included, and the peak
memory of the process. Before that, both make ten steps on the same rows.

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.trl`.
"""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comparison import Table, take_turns
from benchmarks.inputs import write_conversations_of_functions, write_llama, write_preference_pairs
from benchmarks.runs import (
    FINETUNE_RECIPE,
    PREFERENCE_RECIPE,
    STEPS_ONLY,
    dataset_audit,
    flags,
    median_metric,
    metrics,
    new_run_flags,
    recipe_speed,
    run,
    run_for_json,
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


# --- gkd

DISTILL_RECIPE = "recipes/distill.py"
WIDTHS = {"teacher": 256, "student": 128}
HEAD_ROWS = 16_384  # of both models; the tokenizer has fewer tokens
PADDED_CHATS = 16  # of a step of TRL. The recipes pack about as many into CHATS_OF_STEP rows.
CURVE_CHATS = 8  # each step of the comparison of losses has all, so that their order is no matter
CURVE_STEPS = 10
GKD_STEPS = 12
GKD_FLAGS = {
    "learning_rate": 1e-3,
    "lr_scheduler_type": "constant",
    "warmup_steps": 0,
    "weight_decay": 0,
    "adam_beta2": 0.999,
    "logging_steps": 1,
}
# Runs a command, and prints the peak memory of its largest process in KiB.
PEAK_MEMORY = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def run_gkd(folder: Path, chats: str, batch: int, steps: int) -> dict[str, Any]:
    """Return the speed of GKDTrainer, its peak memory in GiB, and the loss of each step."""
    options = flags(
        teacher=folder / "teacher",
        batch=batch,
        length=CHAT_LENGTH,
        steps=steps,
        flags=json.dumps({**GKD_FLAGS, "bf16": False, "gradient_checkpointing": False}),
    )
    peer = [sys.executable, "-m", "benchmarks.peers", "gkd", folder / "student", folder / chats]
    lines = run([sys.executable, "-c", PEAK_MEMORY, *peer, *options]).splitlines()
    return {**json.loads(lines[-2]), "memory": int(lines[-1]) / 2**20}


def distill(folder: Path, recipe: str, **values: object) -> dict[str, Any]:
    """Return the same of a recipe."""
    run_folder = folder / "run"
    recipe_flags = flags(
        model_name_or_path=folder / "student",
        block_size=CHAT_LENGTH - 1,
        optim="adamw",
        **STEPS_ONLY,
        **GKD_FLAGS,
        **values,
    )
    command = [sys.executable, recipe, *recipe_flags, *new_run_flags(run_folder)]
    memory = run_for_json(
        [sys.executable, "-c", PEAK_MEMORY, *command], LLMTRAIN_CACHE=str(folder / "cache")
    )
    speed = median_metric(run_folder, "train/tokens_per_second")
    return {
        "speed": speed_with_prompts(run_folder, speed),
        "memory": memory / 2**20,
        "losses": [entry["train/loss"] for entry in metrics(run_folder) if "train/loss" in entry],
    }


def measure_gkd() -> None:
    with scratch() as folder:
        chats = folder / "chats.jsonl"
        texts = write_conversations_of_functions(chats)
        for role, width in WIDTHS.items():
            # Sharp distributions have a divergence that is worth comparing.
            write_llama(
                folder / role,
                texts,
                CHAT_LENGTH,
                width,
                vocab_size=HEAD_ROWS,
                initializer_range=0.2 if role == "teacher" else 0.02,
            )
        short_lines = [line for line in chats.open() if len(line) < 500]
        (folder / "few.jsonl").write_text("".join(short_lines[:CURVE_CHATS]))
        live = {"recipe": DISTILL_RECIPE, "teacher_model_name_or_path": folder / "teacher"}

        our_losses = distill(
            folder,
            dataset=folder / "few.jsonl",
            global_batch_size=CURVE_CHATS,
            no_packing=True,
            max_steps=CURVE_STEPS,
            **live,
        )["losses"]
        their_losses = run_gkd(folder, "few.jsonl", CURVE_CHATS, CURVE_STEPS)["losses"]

        scoring = flags(
            model_name_or_path=folder / "student",
            teacher_model_name_or_path=folder / "teacher",
            loss_top_k=64,
            dataset=chats,
            block_size=CHAT_LENGTH - 1,
            eval_fraction=0,
            to=folder / "scored",
        )
        run([sys.executable, "-m", "llmtrain", "tokenize", DISTILL_RECIPE, *scoring])
        recipe = partial(distill, folder, global_batch_size=CHATS_OF_STEP, max_steps=GKD_STEPS)
        turns = take_turns(
            {
                "sft": partial(recipe, FINETUNE_RECIPE, dataset=chats),
                "offline": partial(recipe, DISTILL_RECIPE, dataset=folder / "scored"),
                "live": partial(recipe, dataset=chats, **live),
                "TRL": partial(run_gkd, folder, "chats.jsonl", PADDED_CHATS, GKD_STEPS),
            },
            rounds=3,
            warm_up_rounds=0,
        )

    table = Table("gkd")
    for step, (ours, theirs) in enumerate(zip(our_losses, their_losses, strict=True), start=1):
        table.add(
            work=f"live: loss of step {step}", against="TRL", ours=ours, theirs=theirs, unit="nats"
        )
    for method in ("sft", "offline", "live"):
        for figure, unit in (("speed", "tokens/s"), ("memory", "GiB")):
            table.add(
                work=f"{method}: {figure}",
                against="TRL",
                ours=turns[method].median_of(figure),
                theirs=turns["TRL"].median_of(figure),
                unit=unit,
            )
    table.write(flags=GKD_FLAGS)


def main() -> None:
    measure_sft()
    measure_preference()
    measure_gkd()


if __name__ == "__main__":
    main()
