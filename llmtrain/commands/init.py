"""Copy a recipe, and an accelerate config that fits this machine, into a folder of your own to start from.

Nothing is overwritten; with --config, what is there already is kept, and the rest is copied beside it.
"""

import argparse
import json
import re
import shlex
from pathlib import Path

from llmtrain.errors import UserError, require
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
    config = _called(
        "config", arguments.config or {0: "cpu", 1: "single_gpu"}.get(gpus, "multi_gpu")
    )
    batch = (
        [config] if config.suffix == ".slurm" else []
    )  # which starts with the config of its name
    sources = [_called("recipe", arguments.recipe), config.with_suffix(".yaml"), *batch]
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
    launch = ["accelerate", "launch", "--config_file", str(config_file), str(recipe)]
    command = ["sbatch", str(targets[-1])] if batch else launch
    if arguments.json:
        places = {"recipe": str(recipe), "config": str(config_file)}
        print(json.dumps({**places, "start": command, "kept": [*map(str, kept)]}))
        return
    for name, target in zip(("recipe", "config", "batch"), targets, strict=False):
        print(f"{name:<9} {target}{' (was there, and is kept)' if target in kept else ''}")
    print(f"start     {shlex.join(command)}")


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


def _called(kind: str, name: str) -> Path:
    folder, ending = {"recipe": ("recipes", ".py"), "config": ("accelerate_configs", ".yaml")}[kind]
    there = {path.name.removesuffix(ending): path for path in shipped(folder).glob("[!_.]*.*")}
    require(
        name.removesuffix(ending) in there,
        f"--{kind} {name}: there are {', '.join(sorted(there))}.",
    )
    return there[name.removesuffix(ending)]
