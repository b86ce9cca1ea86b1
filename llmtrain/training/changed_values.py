"""Which values of nested dictionaries have changed since the beginning.

The values are those of an optimizer's parameter groups. An optimizer may change them in place, so
they are remembered as copies.
"""

from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from llmtrain.errors import UserError
from llmtrain.json_types import Json
from llmtrain.record.state_tree import flatten


class RememberedValue(NamedTuple):
    """A value as it was at the beginning, whatever happens to the object since.

    Attributes:
        description: all but the values of its tensors, as a string.
        tensors: copies of its tensors.
    """

    description: str
    tensors: dict[str, torch.Tensor]

    def is_same(self, value: object) -> bool:
        """Return whether a value has not changed since."""
        tree, tensors = _flatten_or_describe(value)
        return repr(tree) == self.description and all(
            _is_same_tensor(self.tensors[name], tensor) for name, tensor in tensors.items()
        )


def remember(value: object) -> Any:
    """Remember a value; of a dictionary, each entry."""
    if type(value) is dict:
        return {key: remember(item) for key, item in value.items()}
    tree, tensors = _flatten_or_describe(value)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return RememberedValue(repr(tree), copies)


def _flatten_or_describe(value: object) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return a value as JSON and its tensors. If a checkpoint cannot hold it, describe it.

    Settings may be of any type, such as functions.
    """
    try:
        return flatten(value, path="", owner="")
    except UserError:
        return {"described": repr(value)}, {}


def _is_same_tensor(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are the same. Sharded ones never are.

    All ranks must agree on what has changed, and one of them may have a shard that has not.
    """
    if isinstance(first, DTensor) or isinstance(second, DTensor):
        return False
    has_same_form = (first.dtype, first.device) == (second.dtype, second.device)
    return has_same_form and torch.equal(first, second)


def changes_since(before: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that are new or have changed; of dictionaries among them, likewise.

    Args:
        before: what :func:`remember` returned at the beginning.
        values: the values as they are now.
    """
    changes = {}
    for key, value in values.items():
        if key not in before:
            changes[key] = value
        elif type(value) is dict and type(before[key]) is dict:
            inner = changes_since(before[key], value)
            if inner:
                changes[key] = inner
        elif not isinstance(before[key], RememberedValue) or not before[key].is_same(value):
            changes[key] = value
    return changes


def apply_changes(values: dict[Any, Any], changes: dict[Any, Any]) -> None:
    """Change the entries that :func:`changes_since` returned, in place."""
    for key, change in changes.items():
        if type(change) is dict and type(values.get(key)) is dict:
            apply_changes(values[key], change)
        else:
            values[key] = change
