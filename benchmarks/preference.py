"""DPO on builtin:python-preferences by recipes/preference.py and by TRL's DPOTrainer: real tokens a second.

A pair counts its prompt twice, as the trainer computes it, and no padding. Model, precision, length and the tokens of a
micro-batch are the same.

python -m benchmarks.preference        (needs: pip install 'llmtrain[bench]')
"""

import json
from functools import partial
from pathlib import Path

from benchmarks.comparison import Row, in_turn, report
from benchmarks.inputs import write_base, write_pairs
from benchmarks.runs import (
    PREFERENCE_RECIPE,
    UPDATES_ALONE,
    flags,
    metrics,
    newest,
    peer,
    recipe,
    scratch,
    with_ignored,
)

LENGTH, ROWS, PAIRS, UPDATES, COUNT = 1024, 2, 8, 30, 400
COMMON = {"bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-6}
BEST = {**COMMON, "precompute_ref_log_probs": True}


def ours(folder: Path, pairs: Path, base: Path, loss: str = "sigmoid") -> float:
    words = flags(
        model_name_or_path=base, dataset=pairs, block_size=LENGTH - 1, global_batch_size=ROWS
    )
    words += flags(
        per_device_train_batch_size=ROWS, max_steps=UPDATES, logging_steps=5, loss_type=loss
    )
    return with_ignored(folder, recipe(PREFERENCE_RECIPE, folder, *words, *flags(**UPDATES_ALONE)))


def lengths(folder: Path) -> dict[str, float]:
    """Return what the rows hold, and what sharing prompts could save at most: (2P + C + R) / (P + C + R)."""
    audit = json.loads(newest(folder, "run.json").read_text())["audit"]
    per_pair = {
        name: audit[name] / audit["kept"] for name in ("tokens", "targets", "shared_tokens")
    }
    return {
        "pairs": audit["kept"],
        **per_pair,
        "bound": audit["tokens"] / (audit["tokens"] - audit["shared_tokens"]),
    }


def peak(folder: Path) -> float:
    """Return the most memory that the newest run has held, in GiB."""
    return max(max(line["memory"]["host"]) for line in metrics(folder) if "memory" in line)


def main() -> None:
    with scratch() as folder:
        pairs, base = folder / "pairs.jsonl", folder / "base"
        write_base(base, write_pairs(pairs, COUNT), LENGTH, width=256)
        arguments = [base, pairs, "--batch", PAIRS, "--length", LENGTH, "--steps", UPDATES]
        contenders = {
            "ours": partial(ours, folder / "run", pairs, base),
            "best": partial(peer, "dpo", *arguments, "--flags", json.dumps(BEST)),
            "defaults": partial(peer, "dpo", *arguments, "--flags", json.dumps(COMMON)),
        }
        found = in_turn(contenders, rounds=3, uncounted=0)
        held, of = peak(folder / "run"), lengths(folder / "run")
        ours(folder / "none", pairs, base, loss="orpo")
        without = peak(folder / "none")
    work, speed = f"DPO, Llama, 4 layers x 256, length {LENGTH}, float32", found["ours"].value
    report(
        "preference",
        [
            Row(
                work,
                "TRL, without checkpointing",
                speed,
                found["defaults"].value,
                "tokens/s",
                ">= 2",
            ),
            Row(work, "TRL, its best flags", speed, found["best"].value, "tokens/s", ">= 1.5"),
            Row(
                f"{work}: peak memory",
                "orpo, which has no reference",
                held,
                without,
                "GiB",
                "<= 1.1",
            ),
        ],
        lengths=of,
        best=BEST,
    )


if __name__ == "__main__":
    main()
