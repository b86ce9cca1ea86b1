"""Short runs of a source tree, and the digits that they end in: `python -m tests.system.digits TREE FOLDER` writes
FOLDER/digits.json. A refactor leaves every digit as it was; test_digits.py compares a tree with the commit before."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.launching import (
    BIN,
    FINETUNE,
    GPT,
    PYTHON,
    SMALL_LLAMA,
    TINY,
    read_json,
    series,
    torchrun,
    wait,
    write_chats,
    write_text,
)
from tests.launching import begin as begin_here

KEYS = (
    "tokens",
    "batch",
    "train/loss",
    "train/grad_norm",
    "train/weight_norm",
    "train/learning_rate",
)
KEYS += ("eval/loss", "eval/bits_per_byte")
EVERY = ["--save_steps", "3", "--eval_steps", "3"]


def commands(folder: Path) -> dict[str, tuple[list[str], list[str], dict[str, str]]]:
    """Launcher, recipe with its flags, and environment of each run, in an order in which they can be started."""
    text, more, chats = folder / "text.txt", folder / "more.txt", folder / "chats.jsonl"
    gpt = [GPT, *TINY, "--dataset", str(text), *EVERY]
    llama = [FINETUNE, "--from_config", "llama", *SMALL_LLAMA, *EVERY]
    adapt = [
        FINETUNE,
        "--model_name_or_path",
        str(folder / "runs/full/model"),
        *SMALL_LLAMA[2:],
        *EVERY,
    ]
    chat = ["--dataset", str(chats)]
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    middle = str(folder / "runs/dropout/checkpoints/step-00000003")

    def sharded(config: str, processes: int = 2) -> list[str]:
        name = f"accelerate_configs/{config}.yaml"
        count = ["--num_processes", str(processes), "--mixed_precision", "no"]
        return [str(BIN / "accelerate"), "launch", "--config_file", name, *count]

    return {
        "adamw": (PYTHON, [*gpt, "--optim", "adamw"], {}),
        "muon": (PYTHON, gpt, {}),
        "muon bf16": (PYTHON, gpt, bf16),
        "dropout": (PYTHON, [*gpt, "--dropout", "0.1"], {}),
        "accumulation": (PYTHON, [*gpt, "--per_device_train_batch_size", "1"], {}),
        "two processes": (torchrun(2), gpt, {}),
        "bitwise": (torchrun(2), [*gpt, "--bitwise"], {}),
        "fsdp2": (sharded("fsdp2"), gpt, {}),
        "tensor parallel": (sharded("tensor_parallel"), gpt, {}),
        "pipeline": (torchrun(2), [*gpt, "--pipeline_stages", "2"], {}),
        "full": (PYTHON, [*llama, *chat], {}),
        "lora": (PYTHON, [*adapt, *chat, "--lora_r", "4", "--lora_dropout", "0.1"], {}),
        "fine-tuned on text": (PYTHON, [*llama, "--dataset", str(text)], {}),
        "mixture": (
            PYTHON,
            [*llama, "--dataset", str(text), str(more), "--mixture", "0.7", "0.3"],
            {},
        ),
        "fsdp2 llama": (sharded("fsdp2"), [*llama, *chat], {}),
        "resumed": (PYTHON, [*gpt, "--dropout", "0.1", "--resume_from_checkpoint", middle], {}),
    }


def digits_of(run: Path) -> dict[str, Any]:
    """Everything of a finished run that a refactor must not change."""
    record = read_json(run / "run.json")
    found: dict[str, Any] = {
        key: {str(step): value for step, value in series(run, key).items()} for key in KEYS
    }
    for path in sorted(run.glob("checkpoints/*/MANIFEST.json")):
        manifest = read_json(path)
        files = manifest.get("files", manifest)  # commits before format version 1 have no "files"
        found[path.parent.name] = {
            name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")
        }
    found["identity"], found["run.json"] = record["identity_sha256"], sorted(record)
    found["start"] = sorted(record["starts"][0])
    return found


def measure(tree: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Make every run with the sources of ``tree``; returns the digits of each by its name."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text.txt")
    write_text(folder / "more.txt", seed=1)
    write_chats(folder / "chats.jsonl")
    found = {}
    fixed = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "LLMTRAIN_CACHE": str(folder / "cache")}
    fixed |= {"PYTHONPATH": str(tree), "HF_HOME": str(folder / "hf")}
    for name, (launcher, recipe, env) in commands(folder).items():
        run = folder / "runs" / name
        words = [*launcher, *recipe, "--output_dir", str(run)]
        ended = wait(begin_here(words, {**fixed, **env}, tree))
        assert ended.status == 0, (
            f"{name}: status {ended.status}\n{ended.out[-2000:]}\n{ended.err[-2000:]}"
        )
        found[name] = digits_of(run)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Which digits of which runs differ."""
    names = [*dict.fromkeys([*one, *other])]
    pairs = {name: (one.get(name, {}), other.get(name, {})) for name in names}
    return [
        f"{name}: {key}"
        for name, (a, b) in pairs.items()
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    where = Path(sys.argv[2])
    result = measure(Path(sys.argv[1]).resolve(), where.resolve())
    (where / "digits.json").write_text(json.dumps(result, indent=1))
    print(f"{len(result)} runs")
