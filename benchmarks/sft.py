"""Fine-tuning on builtin:python-functions through recipes/finetune.py and through TRL's SFTTrainer: real tokens a
second, padding not counted; the same model, precision and length.

python -m benchmarks.sft        (needs: pip install 'llmtrain[bench]')
"""

import json
import sys
from functools import partial
from pathlib import Path

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import FINETUNE_RECIPE, newest, peer, recipe, scratch
from benchmarks.trl_sft import write_base
from llmtrain.data import builtin

LENGTH, BATCH, UPDATES = 512, 4, 30
COMMON = {"bf16": False, "gradient_checkpointing": False, "assistant_only_loss": True}
PACKED = {**COMMON, "packing": True, "optim": "adamw_torch_fused"}


def write_chats(file: Path) -> list[str]:
    """Every function with its docstring that fits; returns the texts."""
    texts = []
    with file.open("w") as lines:
        for code, said in builtin.function_pairs():
            if len(code) + len(said) < 1200:
                messages = [{"role": "user", "content": code}, {"role": "assistant", "content": said}]
                lines.write(json.dumps({"messages": messages}) + "\n")
                texts += [code, said]
    return texts


def ours(folder: Path, chats: Path, base: Path) -> float:
    """The recipe counts the tokens that are trained; the audit says how many there are."""
    flags = ["--model_name_or_path", str(base), "--dataset", str(chats), "--block_size", str(LENGTH - 1)]
    flags += ["--global_batch_size", str(BATCH), "--per_device_train_batch_size", str(BATCH), "--eval_fraction", "0"]
    flags += ["--max_steps", str(UPDATES), "--logging_steps", "5", "--save_steps", "100000"]
    trained = recipe(FINETUNE_RECIPE, folder, *flags)
    audit = json.loads(newest(folder, "run.json").read_text())["audit"]
    return trained * audit["tokens"] / audit["trained"]


def main() -> None:
    with scratch() as folder:
        chats, base = folder / "chats.jsonl", folder / "base"
        write_base(base, write_chats(chats))
        arguments = [base, chats, "--batch", BATCH, "--length", LENGTH, "--steps", UPDATES]
        found = in_turn(
            {
                "ours": partial(ours, folder / "run", chats, base),
                "packed": partial(peer, "sft", *arguments, "--flags", json.dumps(PACKED)),
                "out of the box": partial(peer, "sft", *arguments),
            },
            rounds=3,
            uncounted=0,
        )
    work, speed = f"SFT, Llama, 4 layers x 128, length {LENGTH}, float32", found["ours"].value
    report(
        "sft",
        [
            Row(work, "TRL, packed", speed, found["packed"].value, "tokens/s", ">= 1.5"),
            Row(work, "TRL, out of the box", speed, found["out of the box"].value, "tokens/s", ">= 3"),
        ],
        packed=PACKED,
    )


if __name__ == "__main__":
    sys.exit(main())
