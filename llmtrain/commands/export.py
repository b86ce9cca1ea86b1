"""Write the model of a run to its own folder, or merge a LoRA adapter into its base model."""

import argparse
import shutil
from pathlib import Path

from llmtrain.files import json_text
from llmtrain.json_types import JsonObject

EXAMPLES = (
    "llmtrain export runs/gpt --to model",
    "llmtrain export runs/finetune --merge --to merged",
    "llmtrain export runs/finetune --ollama --to model",
)

# Logits may differ by this share of the largest logit, in float32.
_TOLERANCE = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN", help="folder of a run, a checkpoint or a model")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="add a LoRA adapter to the weights of its base model, in float32",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="load the result with transformers, and compare its logits with the original's",
    )
    parser.add_argument(
        "--ollama",
        action="store_true",
        help="write a Modelfile beside the model, for `ollama create`",
    )
    parser.add_argument(
        "--to",
        metavar="FOLDER",
        help="folder to write to (default: RUN/merged with --merge, otherwise RUN/export)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.errors import UserError
    from llmtrain.files import new_folder
    from llmtrain.model_folders import is_adapter, model_folder
    from llmtrain.models.adapters import write_merged
    from llmtrain.models.export import how_to_load
    from llmtrain.models.generation import largest_logit_difference
    from llmtrain.models.ollama import write_modelfile

    model = Path(arguments.model)
    if not model.is_dir():
        raise UserError(f"{model} is not a folder; name the folder of a run or of a model.")
    source = Path(model_folder(arguments.model))
    kind = "merged" if arguments.merge else "export"
    target = Path(arguments.to) if arguments.to else _default_target(model, source, kind)
    if target.exists():
        raise UserError(f"{target} already exists: use it, or name another folder with --to.")
    kept_whole = _checkpoint_of(source) or source
    if target.resolve().is_relative_to(kept_whole.resolve()):
        raise UserError(
            f"--to {target} is inside {kept_whole}, which must stay as it is; name another folder."
        )
    if arguments.merge and not is_adapter(source):
        raise UserError(
            f"--merge: {source} is not an adapter, so there is nothing to merge; leave --merge out."
        )

    result: JsonObject = {"model": str(target)}
    notes: list[str] = []
    outcome = ""
    with new_folder(target) as working:
        if arguments.merge:
            write_merged(source, working)
        else:
            shutil.copytree(source, working, dirs_exist_ok=True)
        if arguments.ollama:
            notes = write_modelfile(working)
            result["notes"] = notes

        if arguments.check:
            difference, largest = largest_logit_difference(str(source), str(working))
            is_same = difference <= _TOLERANCE * largest  # False for NaN
            if not is_same:
                raise UserError(
                    f"{source}: the logits of its export differ by {difference:.2g} (the largest "
                    f"is {largest:.2g}), so it was removed; leave --check out to keep it."
                )
            result |= {"logits_differ_by": difference, "largest_logit": largest}
            outcome = f"; its logits differ by {difference:.2g} (the largest is {largest:.2g})"
    if arguments.json:
        print(json_text(result))
    else:
        print(f"{target} holds the model ({how_to_load(target)}){outcome}")
        for note in notes:
            print(f"note: {note}")


def _checkpoint_of(source: Path) -> Path | None:
    """Return the checkpoint that a model folder belongs to, if there is one."""
    from llmtrain.model_folders import is_of_checkpoint

    return source.absolute().parent if is_of_checkpoint(source) else None


def _default_target(model: Path, source: Path, kind: str) -> Path:
    """Return the folder to write to.

    It is in the folder of a run, but never in a checkpoint or in a model: a checkpoint with another
    file fails its verification, and a model folder would be copied with it.

    Args:
        model: the folder that the user has named.
        source: the model folder that it refers to.
        kind: ``export`` or ``merged``.
    """
    folder = model.absolute()
    checkpoint = _checkpoint_of(source)
    if checkpoint is not None and folder in (checkpoint, checkpoint / "model"):
        is_in_run = checkpoint.parent.name == "checkpoints"
        parent = checkpoint.parent.parent if is_in_run else checkpoint.parent
        return parent / f"{kind}-{checkpoint.name}"
    if folder == source.absolute():
        return folder.with_name(f"{folder.name}-{kind}")
    return model / kind
