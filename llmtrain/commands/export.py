"""Write the model of a run to its own folder, or merge a LoRA adapter."""

import argparse
from pathlib import Path

from llmtrain.console import printable
from llmtrain.files import json_text, local_path
from llmtrain.json_types import JsonObject

EXAMPLES = (
    "llmtrain export runs/gpt --to model",
    "llmtrain export runs/finetune --merge --to merged",
    "llmtrain export runs/gpt --dtype bfloat16",
)

# The dtypes that --dtype names. This module imports torch only when it runs.
_DTYPES = ("float32", "bfloat16", "float16")

# Logits may differ by this share of the largest logit if the weights were not rounded.
_TOLERANCE = 1e-4
# If they were, logits may differ by this many times the largest relative error of a rounded weight.
# The errors of a model's matrices have random signs, so those of hundreds of matrices add up to
# about the square root of their number. Models with 2 to 64 blocks and random weights were at most
# at 2.2.
_ROUNDED_TOLERANCE = 16


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
        "--check",
        action="store_true",
        help="load the result with transformers, and compare its logits with the original's",
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
        note_on_base,
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

    result: JsonObject = {"model": str(target)}
    outcome = ""
    with new_folder(target) as working:
        if arguments.merge:
            write_merged(source, working, arguments.dtype or "auto")
        else:
            write_copy(source, working, arguments.dtype)
        if arguments.check:
            difference, largest = _logit_difference(arguments, source, working)
            result |= {"logits_differ_by": difference, "largest_logit": largest}
            outcome = f"; its logits differ by {difference:.2g} (the largest is {largest:.2g})"
    base_note = note_on_base(target)
    if base_note:
        result["notes"] = [base_note]
    if arguments.json:
        print(json_text(result))
        return
    print(f"{target} holds the model ({how_to_load(target)}){outcome}")
    if base_note:
        print(f"note: {printable(base_note)}")


def _logit_difference(
    arguments: argparse.Namespace, source: Path, folder: Path
) -> tuple[float, float]:
    """Return by how much the logits of an export differ from the original's, and the largest logit.

    Raises:
        UserError: if they differ by more than rounding explains.
    """
    import torch

    from llmtrain.errors import UserError
    from llmtrain.models.dtypes import stored_dtypes
    from llmtrain.models.generation import example_logits

    expected = example_logits(str(source))
    difference = float((expected - example_logits(str(folder))).abs().max())
    largest = float(expected.abs().max())
    tolerance = _TOLERANCE
    if arguments.merge or arguments.dtype:
        rounding_error = torch.finfo(stored_dtypes(folder).main).eps / 2
        tolerance = max(_TOLERANCE, _ROUNDED_TOLERANCE * rounding_error)
    is_same = difference <= tolerance * largest  # False for NaN
    if not is_same:
        raise UserError(
            f"{source}: the logits of its export differ by {difference:.2g} (the largest is "
            f"{largest:.2g}), so it was removed; leave --check out to keep it."
        )
    return difference, largest
