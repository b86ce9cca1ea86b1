"""Fine-tuning on conversations: tokens per second of recipes/finetune.py and of TRL's SFTTrainer.

Both train a small Llama in float32 on the functions and docstrings of builtin:python-functions,
with the same maximum length and rows per step. Prompts count as tokens and padding does not.
The recipe packs conversations into rows. It is compared with

- TRL with packing and the fastest optimizer on a CPU;
- TRL as it comes, which pads.

Repeat it with `pip install 'llmtrain[bench]'` and `python -m benchmarks.sft`.
"""

import json
from functools import partial
from pathlib import Path

from benchmarks.comparison import Table, take_turns
from benchmarks.inputs import write_conversations_of_functions, write_llama
from benchmarks.runs import (
    FINETUNE_RECIPE,
    STEPS_ONLY,
    flags,
    recipe_speed,
    run_peer,
    scratch,
    speed_with_prompts,
)

LENGTH = 512  # tokens of a row
BATCH = 4
STEPS = 30

PACKED_TRL = {
    "bf16": False,
    "gradient_checkpointing": False,
    "assistant_only_loss": True,
    "packing": True,
    "optim": "adamw_torch_fused",
}


def recipe(folder: Path, conversations: Path, model: Path) -> float:
    """Return the speed of the recipe, prompts included."""
    recipe_flags = flags(
        model_name_or_path=model,
        dataset=conversations,
        block_size=LENGTH - 1,
        global_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        logging_steps=5,
        **STEPS_ONLY,
    )
    speed = recipe_speed(FINETUNE_RECIPE, folder, *recipe_flags)
    return speed_with_prompts(folder, speed)


def main() -> None:
    with scratch() as folder:
        conversations = folder / "chats.jsonl"
        model = folder / "base"
        texts = write_conversations_of_functions(conversations)
        write_llama(model, texts, LENGTH)

        trl = partial(
            run_peer, "sft", model, conversations, batch=BATCH, length=LENGTH, steps=STEPS
        )
        speeds = take_turns(
            {
                "recipe": partial(recipe, folder / "run", conversations, model),
                "TRL, packed": partial(trl, flags=json.dumps(PACKED_TRL)),
                "TRL, out of the box": trl,
            },
            rounds=3,
            warm_up_rounds=0,
        )

    table = Table("sft")
    for against, target in (("TRL, packed", ">= 1.5"), ("TRL, out of the box", ">= 3")):
        table.add(
            work=f"SFT, Llama, 4 layers x 128, length {LENGTH}, float32",
            against=against,
            ours=speeds["recipe"].median,
            theirs=speeds[against].median,
            unit="tokens/s",
            target=target,
        )
    table.write(packed=PACKED_TRL)


if __name__ == "__main__":
    main()
