"""Write the model of a run to its own folder, or merge a LoRA adapter."""

import argparse
import sys
from pathlib import Path

from llmtrain.console import say
from llmtrain.files import json_text, local_path

EXAMPLES = (
    "llmtrain export runs/gpt --to model",
    "llmtrain export runs/finetune --merge --to merged",
    "llmtrain export runs/gpt --dtype bfloat16",
)

# The dtypes that --dtype names. This module imports torch only when it runs.
_DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="folder of a run, a checkpoint or a model")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add a LoRA adapter to the weights of its base model, in float32, and write them in "
        "the base's dtype",
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        help="dtype of the weights that are written (default: as they are, and with --merge that "
        "of the adapter's base)",
    )
    parser.add_argument(
        "--to",
        type=local_path,
        metavar="FOLDER",
        help="folder to write (default: RUN/merged with --merge, otherwise RUN/export)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.errors import UserError
    from llmtrain.files import new_folder
    from llmtrain.model_folders import (
        folder_beside,
        is_adapter,
        is_of_checkpoint,
        model_folder,
    )
    from llmtrain.models.adapters import write_merged
    from llmtrain.models.export import how_to_load, write_copy

    if not Path(arguments.model).is_dir():
        raise UserError(
            f"{arguments.model} is not a folder; name the folder of a run or of a model."
        )
    source = Path(model_folder(arguments.model))
    target = folder_beside(source, "merged" if arguments.merge else "export")
    if arguments.to:
        target = Path(arguments.to)
    if target.exists():
        raise UserError(f"{target} already exists: use it, or name another folder with --to.")
    kept_whole = source.absolute().parent if is_of_checkpoint(source) else source
    if target.resolve().is_relative_to(kept_whole.resolve()):
        raise UserError(
            f"--to {target} is inside {kept_whole}, which must stay as it is; name another folder."
        )
    if arguments.merge and not is_adapter(source):
        raise UserError(
            f"--merge: {source} is not an adapter, so there is nothing to merge; leave --merge out."
        )

    with new_folder(target) as working:
        if arguments.merge:
            say("merge", f"the adapter and its base, to {target}", sys.stderr)
            write_merged(source, working, arguments.dtype or "auto")
        else:
            write_copy(source, working, arguments.dtype)
    if arguments.json:
        print(json_text({"model": str(target)}))
        return
    print(f"{target} holds the model ({how_to_load(target)})")
