"""The states of what the user brings, such as callbacks, into a checkpoint and back."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.part import Part
from llmtrain.parallel.ranks import Ranks
from llmtrain.parallel.shards import filled_like
from llmtrain.record import checkpoint
from llmtrain.record.state_tree import FlatState, flatten, unflatten
from llmtrain.record.tensor_files import read_tensors_on_main


def restore_parts(parts: Mapping[str, Part], path: Path, ranks: Ranks) -> None:
    """Give each part the state that it has in a checkpoint."""
    stored_names = ranks.on_main(lambda: checkpoint.part_names(path))
    for name in stored_names:
        if name not in parts:
            say("changed", f"the state of {name} in {path} is not used: this run has no such part")

    for name, part in parts.items():
        if name in stored_names:
            _restore_part(name, part, path / "parts" / name, ranks)
        elif part.state_dict() != {}:
            say("changed", f"{name} starts without a state: {path} has none of it")


def _restore_part(name: str, part: Part, folder: Path, ranks: Ranks) -> None:
    """Give a part the state in a folder.

    A tensor that the part has as a DTensor is sharded like that; others lie on the CPU.
    """
    structure = ranks.on_main(lambda: checkpoint.read_structure(folder))
    current = flat_part(name, part.state_dict()).tensors
    tensors = {}
    for tensor_name, full in read_tensors_on_main(folder, ranks):
        like = current.get(tensor_name)
        if isinstance(like, DTensor) and like.shape == full.shape:
            tensors[tensor_name] = filled_like(like, full)
        else:
            tensors[tensor_name] = full.cpu()

    state = unflatten(structure["state"], tensors)
    ranks.on_all(lambda: _load(name, part, state, folder))


def _load(name: str, part: Part, state: dict[str, Any], folder: Path) -> None:
    """Let a part load its state, which may fail: it is the user's own code."""
    try:
        part.load_state_dict(state)
    except Exception as error:
        raise UserError(
            f"{name} cannot load its state from {folder} ({type(error).__name__}: "
            f"{first_line(error).rstrip('.')}); use the code that saved it, or start a new run "
            "with --resume_from_checkpoint never."
        ) from error


def flat_part(name: str, state: object) -> FlatState:
    """Return the state of a part as a checkpoint holds it.

    Raises:
        UserError: if there is something that a checkpoint cannot hold.
    """
    tree, tensors = flatten(state, path="", owner=name)
    return FlatState({"state": tree}, tensors)
