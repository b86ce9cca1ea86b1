"""Copy a recipe, and an accelerate config that fits this machine, into a folder of your own to start from. Nothing is
overwritten."""

import argparse
import json
import re
import shlex
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.launching import gpus, shipped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="where they go; made where it does not exist")
    parser.add_argument("--recipe", default="gpt", metavar="NAME", help="gpt (the default) or finetune")
    parser.add_argument("--config", metavar="NAME", help="such as multi_gpu or cpu_ddp (default: by the GPUs here)")
    parser.add_argument("--json", action="store_true", help="print what was written for a program")


def run(arguments: argparse.Namespace) -> None:
    config = arguments.config or {0: "cpu", 1: "single_gpu"}.get(gpus(), "multi_gpu")
    sources = [_called("recipe", arguments.recipe), _called("config", config)]
    folder = Path(arguments.folder)
    targets = [folder / source.name for source in sources]
    if taken := [target for target in targets if target.exists()]:
        raise UserError(f"{taken[0]} exists already; name another folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            text = source.read_text()
            if arguments.config is None and gpus() > 1:
                text = re.sub(r"(?m)^num_processes: .*$", f"num_processes: {gpus()}", text)
            target.write_text(text)
    except OSError as error:
        raise UserError(f"{error.filename or folder} could not be written: {error.strerror}.") from None
    recipe, config_file = targets
    command = ["accelerate", "launch", "--config_file", str(config_file), str(recipe)]
    if arguments.json:
        print(json.dumps({"recipe": str(recipe), "config": str(config_file), "start": command}))
        return
    print(f"recipe    {recipe}\nconfig    {config_file}")
    print(f"start     {shlex.join(command)}")


def _called(kind: str, name: str) -> Path:
    folder, ending = {"recipe": ("recipes", ".py"), "config": ("accelerate_configs", ".yaml")}[kind]
    there = sorted(path.stem for path in shipped(folder).glob(f"*{ending}") if path.stem != "__init__")
    if name.removesuffix(ending) not in there:
        raise UserError(f"--{kind} {name}: there are {', '.join(there)}.")
    return shipped(folder) / f"{name.removesuffix(ending)}{ending}"
