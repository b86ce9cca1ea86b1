"""Measure the digits of short training runs, to compare two versions of the source.

`python -m tests.system.digits TREE FOLDER` makes every run with the source in TREE, and writes
FOLDER/digits.json. A refactoring changes no digit. `test_digits.py` compares this tree with an
earlier commit. If random weights have changed between the two, both begin with the weights of the
earlier commit (`make digits WEIGHTS=base`).
"""

import hashlib
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open

from tests.launching import (
    FINETUNE,
    GPT,
    PREFERENCE,
    PYTHON,
    ROOT,
    SMALL_LLAMA,
    TINY,
    accelerate,
    metrics,
    read_json,
    start_process,
    torchrun,
    wait,
    write_chats,
    write_pairs,
    write_text,
)

FAULTY = str(ROOT / "tests" / "system" / "faulty_gpt.py")
OFTEN = shlex.split("--save_steps 3 --eval_steps 3")

Digits: TypeAlias = dict[str, dict[str, Any]]  # name of a run -> metric or checkpoint -> values

# The metrics that are compared, by today's names.
METRICS = (
    "tokens",
    "batch",
    "train/loss",
    "train/grad_norm",
    "train/weight_norm",
    "train/learning_rate",
    "eval/loss",
    "eval/bits_per_byte",
    "train/rewards/margins",
)

# Earlier name -> today's name, for metrics, files in a checkpoint and tensors. A rename does not
# change digits.
RENAMED: dict[str, str] = {}


class Command(NamedTuple):
    """How a run is started, and with which status it ends.

    Attributes:
        launcher: the beginning of the command.
        recipe: the recipe and its flags.
        environment: further variables of the environment.
        exit_status: the status with which the run ends.
    """

    launcher: list[str]
    recipe: list[str]
    environment: dict[str, str] | None = None
    exit_status: int = 0


def commands(folder: Path, begun: Path | None = None) -> dict[str, Command]:
    """Return the command of each run by its name; a run may load what an earlier one saved.

    Args:
        folder: of the data and of the runs.
        begun: a folder of the same runs, to begin with their weights instead of random ones. Runs
            of a GPT or an adapter resume from their checkpoint of step 3, and the others fine-tune
            the finished model.
    """
    result = {
        **gpt_commands(folder),
        **finetune_commands(folder, begun or folder),
        **preference_commands(folder),
        **nan_commands(folder),
    }
    if begun is not None:
        result = {
            name: begin_with(command, begun / "runs" / name) for name, command in result.items()
        }
    return {**result, **resumed_commands(folder, begun or folder)}


def begin_with(command: Command, run: Path) -> Command:
    """Return the command of a run that begins with the weights of another run."""
    recipe = list(command.recipe)
    if "--from_config" not in recipe:
        return command._replace(recipe=[*recipe, *resume_flags(run)])

    del recipe[1:3]  # --from_config TYPE
    while "--config_overrides" in recipe:
        position = recipe.index("--config_overrides")
        del recipe[position : position + 2]
    # Without it, the learning rate of models that were trained before would change little.
    model = ["--model_name_or_path", str(run / "model"), "--learning_rate", "1e-3"]
    return command._replace(recipe=[recipe[0], *model, *recipe[1:]])


def resume_flags(run: Path) -> list[str]:
    return ["--resume_from_checkpoint", str(run / "checkpoints" / "step-00000003")]


def gpt_flags(folder: Path) -> list[str]:
    return [GPT, *TINY, "--dataset", str(folder / "text.txt"), *OFTEN]


def gpt_with_dropout(folder: Path) -> list[str]:
    return [*gpt_flags(folder), "--dropout", "0.1"]


def gpt_on_three_processes(folder: Path) -> list[str]:
    return [*gpt_with_dropout(folder), "--global_batch_size", "12"]


def gpt_commands(folder: Path) -> dict[str, Command]:
    gpt = gpt_flags(folder)
    with_dropout = gpt_with_dropout(folder)
    bf16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    return {
        "adamw": Command(PYTHON, [*gpt, "--optim", "adamw"]),
        "muon": Command(PYTHON, gpt),
        "muon bf16": Command(PYTHON, gpt, environment=bf16),
        "gpt2": Command(PYTHON, [*with_dropout, "--architecture", "gpt2"]),
        "dropout": Command(PYTHON, with_dropout),
        "accumulation": Command(PYTHON, [*gpt, "--per_device_train_batch_size", "1"]),
        "two processes": Command(torchrun(2), gpt),
        "three processes": Command(torchrun(3), gpt_on_three_processes(folder)),
        "bitwise": Command(torchrun(2), [*gpt, "--bitwise"]),
        "fsdp2": Command(sharded("fsdp2"), gpt),
    }


def finetune_commands(folder: Path, begun: Path) -> dict[str, Command]:
    text = str(folder / "text.txt")
    more_text = str(folder / "more.txt")
    chats = ["--dataset", str(folder / "chats.jsonl")]

    llama = [FINETUNE, "--from_config", "llama", *SMALL_LLAMA, *OFTEN]
    trained_llama = str(begun / "runs" / "full" / "model")
    # SMALL_LLAMA without the sizes of the model, which come from the loaded model.
    lora = [FINETUNE, "--model_name_or_path", trained_llama, *SMALL_LLAMA[2:], *OFTEN, *chats]
    lora += shlex.split("--lora_r 4 --lora_dropout 0.1")

    experts = [FINETUNE, "--from_config", "mixtral", *SMALL_LLAMA, *OFTEN]
    hybrid = [FINETUNE, "--from_config", "lfm2", *SMALL_LLAMA, *OFTEN, "--no_packing"]
    hybrid += [
        "--config_overrides",
        "hidden_size=32,num_hidden_layers=2,intermediate_size=64,num_attention_heads=4,"
        "layer_types=[conv,full_attention]",
    ]
    return {
        "full": Command(PYTHON, [*llama, *chats]),
        "lora": Command(PYTHON, lora),
        "fine-tuned on text": Command(PYTHON, [*llama, "--dataset", text]),
        "mixture of data sets": Command(
            PYTHON, [*llama, "--dataset", text, more_text, "--mixture", "0.7", "0.3"]
        ),
        "fsdp2 llama": Command(sharded("fsdp2"), [*llama, *chats]),
        "experts": Command(torchrun(2), [*experts, *chats]),
        "hybrid": Command(PYTHON, [*hybrid, *chats]),
    }


def preference_commands(folder: Path) -> dict[str, Command]:
    preference = [PREFERENCE, "--from_config", "llama", *SMALL_LLAMA, *OFTEN]
    preference += ["--dataset", str(folder / "pairs.jsonl")]
    preference += shlex.split("--chat_template chatml --block_size 64 --learning_rate 1e-2")
    return {
        "dpo": Command(torchrun(2), [*preference, "--loss_type", "sigmoid"]),
        "kto": Command(torchrun(2), [*preference, "--loss_type", "kto"]),
        "reward": Command(PYTHON, [*preference, "--loss_type", "reward", "--optim", "adamw"]),
    }


def nan_commands(folder: Path) -> dict[str, Command]:
    """Return the commands of runs in which the loss of three steps is not finite."""
    nan = [FAULTY, *TINY, "--dataset", str(folder / "text.txt"), *OFTEN]
    # The checkpoint of step 3 stays, for runs that begin with its weights.
    nan += ["--max_steps", "9", "--save_total_limit", "3"]
    result = {}
    for optimizer in ("adamw", "muon"):
        for allowed in (0, 1, 5):
            flags = ["--optim", optimizer, "--skip_nonfinite", str(allowed)]
            # A run that may skip five steps skips the three. The others stop with status 2.
            result[f"NaN in three steps, {optimizer}, {allowed} allowed"] = Command(
                PYTHON, [*nan, *flags], {"FAULT": "NaN"}, exit_status=0 if allowed == 5 else 2
            )
    return result


def resumed_commands(folder: Path, begun: Path) -> dict[str, Command]:
    """Return the commands of runs that resume from the checkpoints of earlier runs."""
    dropout = resume_flags(begun / "runs" / "dropout")
    three_processes = resume_flags(begun / "runs" / "three processes")
    return {
        "resumed": Command(PYTHON, [*gpt_with_dropout(folder), *dropout]),
        "three processes, resumed": Command(
            torchrun(3), [*gpt_on_three_processes(folder), *three_processes]
        ),
    }


def sharded(config: str) -> list[str]:
    """Return the launcher of a two-process run that shards its model in float32.

    Of an earlier commit, the config may set another precision.
    """
    return accelerate(config, "--num_processes", "2", "--mixed_precision", "no")


def measure(tree: Path, folder: Path, begun: Path | None = None) -> Digits:
    """Make every run with the source in ``tree`` and return the digits of each.

    Args:
        tree: a tree of the source.
        folder: gets the runs.
        begun: see :func:`commands`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "text.txt")
    write_text(folder / "more.txt", seed=1)
    write_chats(folder / "chats.jsonl")
    write_pairs(folder / "pairs.jsonl")

    environment = {
        "OMP_NUM_THREADS": "1",  # the threads of an earlier commit, which has no --threads
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf"),
        "LLMTRAIN_CACHE": str(folder / "cache"),
        "PYTHONPATH": str(tree),
    }

    has_threads_flag = "threads:" in (tree / "llmtrain/parallel/config.py").read_text()
    digits = {}
    for name, command in commands(folder, begun).items():
        run = folder / "runs" / name
        recipe = command.recipe
        if not has_threads_flag and "--threads" in recipe:
            position = recipe.index("--threads")
            recipe = [*recipe[:position], *recipe[position + 2 :]]
        process = start_process(
            [*command.launcher, *recipe, "--output_dir", str(run)],
            env={**environment, **(command.environment or {})},
            tree=tree,
        )
        ended = wait(process)
        output = f"{ended.out[-2000:]}\n{ended.err[-2000:]}"
        assert ended.status == command.exit_status, f"{name}: status {ended.status}\n{output}"
        digits[name] = digits_of(run)
        has_failed = command.exit_status != 0
        assert has_failed or any((run / "checkpoints").glob("step-*")), f"{run} has no checkpoint"
    return digits


def digits_of(run: Path) -> dict[str, Any]:
    """Return everything in the folder of a finished run that a refactoring must not change."""
    digits: dict[str, Any] = {name: {} for name in METRICS}
    for line in metrics(run):
        for key, value in line.items():
            name = RENAMED.get(key, key)
            if name in METRICS:
                digits[name][str(line["step"])] = value

    status = read_json(run / "status.json")
    digits["end"] = {name: status.get(name) for name in ("state", "reason")}

    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    for checkpoint in checkpoints:
        state = read_json(checkpoint / "state.json")
        digits[f"{checkpoint.name}/counts"] = {name: state[name] for name in ("tokens", "skipped")}
        for path in sorted(checkpoint.rglob("*.safetensors")):
            file = str(path.relative_to(checkpoint))
            digits[f"{checkpoint.name}/{RENAMED.get(file, file)}"] = tensors_digest(path)
    return digits


def tensors_digest(path: Path) -> str:
    """Return the sha256 of all tensors in a file: their names, types, shapes and bytes, by name."""
    digest = hashlib.sha256()
    with safe_open(path, framework="pt") as file:
        stored_names = list(file.keys())
        names = {RENAMED.get(name, name): name for name in stored_names}
        for name, stored_name in sorted(names.items()):
            tensor = file.get_tensor(stored_name)
            data = tensor.contiguous().flatten().view(torch.uint8)
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def differences(before: Digits, after: Digits) -> list[str]:
    """Return the metrics and checkpoints that differ, as ``run: metric``."""
    different = []
    for run in dict.fromkeys([*before, *after]):
        first = before.get(run, {})
        second = after.get(run, {})
        for key in dict.fromkeys([*first, *second]):
            if first.get(key) != second.get(key):
                different.append(f"{run}: {key}")
    return different


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    target = Path(sys.argv[2]).resolve()
    measured = measure(Path(sys.argv[1]).resolve(), target)
    (target / "digits.json").write_text(json.dumps(measured, indent=1))
    print(f"{len(measured)} runs")
