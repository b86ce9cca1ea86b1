"""A Llama on text through recipes/finetune.py and through transformers' Trainer: tokens a second, and the seconds from
the command to the first update.

python -m benchmarks.trainer
"""

import json
import sys
import time
from functools import partial
from pathlib import Path

import datasets
from transformers import LlamaConfig

from benchmarks.comparison import Row, in_turn, report
from benchmarks.runs import BIN, FINETUNE_RECIPE, peer, recipe, run, scratch
from llmtrain import DataConfig, prepare

BLOCK, BATCH, UPDATES = 256, 8, 40
BEST = {"optim": "adamw_torch_fused", "torch_compile": True}  # of what helps on a CPU in float32
FLAGS = ["--block_size", str(BLOCK), "--global_batch_size", str(BATCH), "--per_device_train_batch_size", str(BATCH)]


def write_model(folder: Path, cache: Path) -> None:
    """The shape of the model, its tokenizer, and the same rows for the Trainer."""
    data = DataConfig(dataset=["builtin:python-docs"], tokenizer="bpe:4096", eval_fraction=0.0)
    prepared = prepare(data, BLOCK)
    prepared.tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=BLOCK,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=False,
    ).save_pretrained(folder)
    rows = prepared.train.with_format("numpy")[:]["input_ids"]
    whole = rows[(rows >= 0).all(axis=1)][:, :BLOCK]
    datasets.Dataset.from_dict({"input_ids": whole.tolist()}).save_to_disk(str(cache / "rows"))


def first_step(folder: Path, model: Path) -> float:
    """Of the recipe, with its data in the cache."""
    launch = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/cpu.yaml", FINETUNE_RECIPE]
    place = ["--report_to", "none", "--output_dir", str(folder / "first"), "--resume_from_checkpoint", "never"]
    flags = [*_data(model), *FLAGS, "--max_steps", "1", "--logging_steps", "1"]
    began = time.time()
    run([*launch, *flags, *place], LLMTRAIN_CACHE=str(folder / "cache"))
    newest = max(folder.glob("first*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
    return newest.stat().st_mtime - began


def _data(model: Path) -> list[str]:
    text = ["--dataset", "builtin:python-docs", "--eval_fraction", "0"]
    return ["--from_config", str(model), "--tokenizer", str(model), *text]


def trainers_first_step(folder: Path, model: Path) -> float:
    launch = [str(BIN / "accelerate"), "launch", "--config_file", "accelerate_configs/cpu.yaml", "-m"]
    arguments = ["trainer", model, folder / "rows", "--batch", BATCH, "--steps", 1, "--first_step"]
    began = time.time()
    return float(run([*launch, "benchmarks.peers", *map(str, arguments)]).splitlines()[-1]) - began


def main() -> None:
    with scratch() as folder:
        model = folder / "model"
        write_model(model, folder)
        flags = [*_data(model), *FLAGS, "--max_steps", str(UPDATES), "--save_steps", "100000"]
        trainer = ["trainer", model, folder / "rows", "--batch", BATCH, "--steps", UPDATES]
        speed = in_turn(
            {
                "ours": partial(recipe, FINETUNE_RECIPE, folder / "run", *flags),
                "defaults": partial(peer, *trainer),
                "best": partial(peer, *trainer, "--flags", json.dumps(BEST)),
            },
            rounds=3,
            uncounted=0,
        )
        launched = in_turn(
            {"ours": partial(first_step, folder, model), "theirs": partial(trainers_first_step, folder, model)},
            rounds=5,
        )
    work, start = "Llama, 4 layers x 256, block 256, float32", "launch to first update, data cached"
    ours = speed["ours"].value
    report(
        "trainer",
        [
            Row(work, "Trainer at its defaults", ours, speed["defaults"].value, "tokens/s", ">= 1.3"),
            Row(work, f"Trainer, {', '.join(BEST)}", ours, speed["best"].value, "tokens/s", ">= 1.05"),
            Row(start, "Trainer", launched["ours"].value, launched["theirs"].value, "seconds", "<= 0.85"),
        ],
        best=BEST,
    )


if __name__ == "__main__":
    sys.exit(main())
