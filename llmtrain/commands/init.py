"""Copy a recipe, and an accelerate config that fits this machine, into a folder of your own to start from.

Nothing is overwritten; with --config, what is there already is kept, and the rest is copied beside it.
"""

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Literal

from llmtrain.errors import UserError
from llmtrain.shipped import shipped

_ONE_A_GPU = ("multi_gpu.yaml", "fsdp2.yaml")  # whose processes are as many as this machine's GPUs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where they go; made where it does not exist")
    parser.add_argument(
        "--recipe", default="gpt", metavar="NAME", help="gpt (the default), finetune or preference"
    )
    parser.add_argument(
        "--config",
        metavar="NAME",
        help="such as fsdp2, multi_node.slurm (default: by the GPUs here)",
    )


def run(arguments: argparse.Namespace) -> None:
    import torch

    gpus = torch.accelerator.device_count()
    config = _shipped_file("config", arguments.config or _fitting_config(gpus))
    sources = [_shipped_file("recipe", arguments.recipe), config.with_suffix(".yaml")]
    is_batch_job = config.suffix == ".slurm"
    if is_batch_job:
        sources.append(config)  # it starts with the YAML file of the same name

    folder = Path(arguments.folder)
    targets = [folder / source.name for source in sources]
    kept = [target for target in targets if target.exists()]
    if kept and not arguments.config:
        raise UserError(
            f"{kept[0]} exists already; name another folder, or with --config what to copy beside it."
        )

    recipe, config_file = targets[:2]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            if target not in kept:
                target.write_text(_fitted(source, gpus, recipe, config_file))
    except OSError as error:
        raise UserError(
            f"{error.filename or folder} could not be written: {error.strerror}."
        ) from None

    command = ["accelerate", "launch", "--config_file", str(config_file), str(recipe)]
    if is_batch_job:
        command = ["sbatch", str(targets[-1])]
    if arguments.json:
        content = {
            "recipe": str(recipe),
            "config": str(config_file),
            "start": command,
            "kept": [str(target) for target in kept],
        }
        print(json.dumps(content))
        return
    for name, target in zip(("recipe", "config", "batch"), targets, strict=False):
        remark = " (was there, and is kept)" if target in kept else ""
        print(f"{name:<9} {target}{remark}")
    print(f"start     {shlex.join(command)}")


def _fitting_config(gpus: int) -> str:
    """Return the name of the config for a machine with so many GPUs."""
    if gpus == 0:
        return "cpu"
    return "single_gpu" if gpus == 1 else "multi_gpu"


def _fitted(source: Path, gpus: int, recipe: Path, config_file: Path) -> str:
    """Return a file's text, with this machine's GPUs, and with the places of what is copied beside it."""
    text = source.read_text()
    if source.name in _ONE_A_GPU and gpus > 1:
        text = re.sub(r"(?m)^num_processes: .*$", f"num_processes: {gpus}", text)
    if source.suffix == ".slurm":
        places = {"RECIPE": shlex.quote(str(recipe)), "CONFIG": shlex.quote(str(config_file))}
        text = re.sub(
            r"(?m)^(RECIPE|CONFIG)=.*$", lambda line: f"{line[1]}={places[line[1]]}", text
        )
    return text


def _shipped_file(kind: Literal["recipe", "config"], name: str) -> Path:
    """Return a file of this package by its name, with or without its ending."""
    folder, ending = ("recipes", ".py") if kind == "recipe" else ("accelerate_configs", ".yaml")
    paths = {path.name.removesuffix(ending): path for path in shipped(folder).glob("[!_.]*.*")}
    stem = name.removesuffix(ending)
    if stem not in paths:
        raise UserError(f"--{kind} {name}: there are {', '.join(sorted(paths))}.")
    return paths[stem]
