"""Fine-tuning on builtin:python-functions by recipes/finetune.py and by TRL's SFTTrainer: real tokens a second.

Padding is not counted; model, precision and length are the same.

python -m benchmarks.sft        (needs: pip install 'llmtrain[bench]')
"""

import json
from functools import partial
from pathlib import Path

from benchmarks.comparison import Row, in_turn, report
from benchmarks.inputs import write_base, write_chats
from benchmarks.runs import (
    FINETUNE_RECIPE,
    UPDATES_ALONE,
    flags,
    peer,
    recipe,
    scratch,
    with_ignored,
)

LENGTH, BATCH, UPDATES = 512, 4, 30
COMMON = {"bf16": False, "gradient_checkpointing": False, "assistant_only_loss": True}
PACKED = {**COMMON, "packing": True, "optim": "adamw_torch_fused"}


def ours(folder: Path, chats: Path, base: Path) -> float:
    words = flags(
        model_name_or_path=base, dataset=chats, block_size=LENGTH - 1, global_batch_size=BATCH
    )
    words += flags(
        per_device_train_batch_size=BATCH, max_steps=UPDATES, logging_steps=5, **UPDATES_ALONE
    )
    return with_ignored(folder, recipe(FINETUNE_RECIPE, folder, *words))


def main() -> None:
    with scratch() as folder:
        chats, base = folder / "chats.jsonl", folder / "base"
        write_base(base, write_chats(chats), LENGTH)
        arguments = [base, chats, "--batch", BATCH, "--length", LENGTH, "--steps", UPDATES]
        contenders = {
            "ours": partial(ours, folder / "run", chats, base),
            "packed": partial(peer, "sft", *arguments, "--flags", json.dumps(PACKED)),
            "out of the box": partial(peer, "sft", *arguments),
        }
        found = in_turn(contenders, rounds=3, uncounted=0)
    work, speed = f"SFT, Llama, 4 layers x 128, length {LENGTH}, float32", found["ours"].value
    report(
        "sft",
        [
            Row(work, "TRL, packed", speed, found["packed"].value, "tokens/s", ">= 1.5"),
            Row(
                work,
                "TRL, out of the box",
                speed,
                found["out of the box"].value,
                "tokens/s",
                ">= 3",
            ),
        ],
        packed=PACKED,
    )


if __name__ == "__main__":
    main()
