"""Copy a recipe, and an accelerate config that fits this machine, into a folder.

Start your own recipe from these copies. --recipe may also name a ready file of settings, which is
then copied with its recipe. Nothing is overwritten. With --config, files that already
exist are kept, and the others are added.
"""

import argparse
import re
import shlex
from pathlib import Path
from typing import Literal

from llmtrain.console import labelled
from llmtrain.errors import UserError
from llmtrain.files import json_text, local_path, shipped_folder

EXAMPLES = (
    "llmtrain init mine",
    "llmtrain init mine --recipe finetune --config fsdp2",
    "llmtrain init mine --recipe qwen3-0.6b-lora",
)

# The line of a ready file that runs it.
_COMMAND = re.compile(r"(?m)^#   accelerate launch --config_file .*?(\S+)\.yaml .*?(\w+)\.py .*$")
# Configs that start one process for each GPU of this machine.
_PER_GPU_CONFIGS = ("multi_gpu.yaml", "fsdp2.yaml")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=local_path,
        metavar="DIR",
        help="folder to copy to; it is created if it does not exist",
    )
    parser.add_argument(
        "--recipe",
        default="gpt",
        metavar="NAME",
        help="gpt, finetune or preference, or a ready file of settings, such as qwen3-0.6b-lora "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="accelerate config, such as fsdp2 or multi_node.slurm "
        "(default: chosen by the GPUs of this machine)",
    )


def run(arguments: argparse.Namespace) -> None:
    import torch

    gpus = torch.accelerator.device_count()
    settings = _ready_file(arguments.recipe)
    named_recipe = arguments.recipe
    fitting_config = _fitting_config(gpus)
    if settings is not None:
        named_config, named_recipe = _named_in(settings)
        if gpus > 1:
            fitting_config = named_config
    config = _shipped_file("config", arguments.config or fitting_config)
    sources = [_shipped_file("recipe", named_recipe), config.with_suffix(".yaml")]
    labels = ["recipe", "config"]
    if settings is not None:
        sources.append(settings)
        labels.append("settings")
    is_batch_job = config.suffix == ".slurm"
    if is_batch_job:
        sources.append(config)  # the batch script uses the YAML file of the same name
        labels.append("batch")

    folder = Path(arguments.folder)
    targets = [folder / source.name for source in sources]
    existing = [target for target in targets if target.exists()]
    if existing and not arguments.config:
        raise UserError(
            f"{existing[0]} already exists; name another folder, or add a config to this one with "
            "--config NAME."
        )

    recipe, config_file = targets[:2]
    recipe_flags = [] if settings is None else ["--config", str(targets[2])]
    command = ["accelerate", "launch", "--config_file", str(config_file), str(recipe)]
    command += recipe_flags
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            if target not in existing:
                text = _fitted(source, gpus, recipe=recipe, config_file=config_file)
                if source == settings:
                    text = re.sub(_COMMAND, lambda _: f"#   {shlex.join(command)}", text)
                target.write_text(text)
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} could not be written: {error.strerror}."
        ) from None

    if is_batch_job:
        command = ["sbatch", str(targets[-1]), *recipe_flags]
    if arguments.json:
        content = {
            "recipe": str(recipe),
            "config": str(config_file),
            "start": command,
            "kept": [str(target) for target in existing],
        }
        print(json_text(content))
        return
    for label, target in zip(labels, targets, strict=True):
        remark = " (already existed, and was kept)" if target in existing else ""
        print(labelled(label, f"{target}{remark}"))
    print(labelled("start", shlex.join(command)))


def _ready_file(name: str) -> Path | None:
    """Return the path of a ready file of settings, or ``None`` if there is none of this name."""
    path = shipped_folder("recipes") / "configs" / f"{name.removesuffix('.yaml')}.yaml"
    return path if path.is_file() else None


def _named_in(settings: Path) -> tuple[str, str]:
    """Return the names of the accelerate config and the recipe in the command of a ready file."""
    command = _COMMAND.search(settings.read_text())
    assert command is not None, "every ready file has its command"
    return Path(command[1]).name, command[2]


def _fitting_config(gpus: int) -> str:
    """Return the name of the config for a machine with this number of GPUs."""
    if gpus == 0:
        return "cpu"
    return "single_gpu" if gpus == 1 else "multi_gpu"


def _fitted(source: Path, gpus: int, recipe: Path, config_file: Path) -> str:
    """Return the text of a file, changed for this machine and for the paths of the copies."""
    text = source.read_text()
    if source.name in _PER_GPU_CONFIGS and gpus > 1:
        text = re.sub(r"(?m)^num_processes: .*$", f"num_processes: {gpus}", text)
    if source.suffix == ".slurm":
        paths = {"RECIPE": shlex.quote(str(recipe)), "CONFIG": shlex.quote(str(config_file))}
        text = re.sub(
            r"(?m)^(RECIPE|CONFIG)=.*$",
            lambda match: f"{match[1]}={paths[match[1]]}",
            text,
        )
    return text


def _shipped_file(kind: Literal["recipe", "config"], name: str) -> Path:
    """Return the path of a shipped recipe or config by its name, with or without its suffix."""
    if kind == "recipe":
        folder = "recipes"
        suffix = ".py"
    else:
        folder = "accelerate_configs"
        suffix = ".yaml"
    paths = {
        path.name.removesuffix(suffix): path for path in shipped_folder(folder).glob("[!_.]*.*")
    }
    stem = name.removesuffix(suffix)
    if stem not in paths:
        raise UserError(f"--{kind} {name} does not exist; use one of {', '.join(sorted(paths))}.")
    return paths[stem]
