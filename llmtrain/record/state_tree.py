"""A state as JSON and named tensors, and back. No pickle is involved.

All values come back with their types, but ordered dictionaries as dictionaries, and parameters as
tensors.

Numbers, strings, booleans, ``None``, lists, and dictionaries with strings as keys are JSON. Other
values are objects with a single key:

=========================  ====================================================
``{"$tensor": NAME}``      the tensor of this name
``{"$float": "nan"}``      a number that is not finite
``{"$tuple": [VALUE]}``    a tuple; ``$set`` likewise
``{"$dict": [[KEY, VALUE]]}``  a dictionary that has integers as keys
=========================  ====================================================
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.errors import UserError
from llmtrain.files import Json, JsonObject
from llmtrain.record.tensor_files import STORABLE_DTYPES

_TENSOR_TYPES = (torch.Tensor, nn.Parameter, DTensor)


class FlatState(NamedTuple):
    """A state that a checkpoint holds in a folder.

    Attributes:
        structure: what is no tensor. :func:`flatten` makes the trees in it.
        tensors: the tensors by name. They may be sharded.
    """

    structure: JsonObject
    tensors: dict[str, torch.Tensor]


def flatten(value: Any, path: str, owner: str, tensors: dict[str, torch.Tensor]) -> Json:
    """Return a value as JSON, and add the tensors in it to ``tensors``. Nothing is copied.

    A tensor's name is its path, such as ``wte.weight.exp_avg`` or ``wte.weight.GG[0]``.

    Args:
        value: the value.
        path: the path of the value.
        owner: what keeps the value, for the message of an error.
        tensors: gets the tensors by name.

    Raises:
        UserError: if there is something that a checkpoint cannot hold. It names path and type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, str):
        plain: Json = value
        return plain
    if kind is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    is_dense = kind in _TENSOR_TYPES and value.layout == torch.strided
    if is_dense and value.dtype in STORABLE_DTYPES:
        if path in tensors:  # if a key contains a dot
            raise UserError(f"{owner} keeps two tensors by the name {path}; rename a key.")
        tensors[path] = value.detach()
        return {"$tensor": path}

    contains_itself = len(path) > 1000
    if kind in (list, tuple, set) and not contains_itself:
        items = sorted(value, key=repr) if kind is set else value
        content = [
            flatten(item, f"{path}[{index}]", owner, tensors) for index, item in enumerate(items)
        ]
        return content if kind is list else {f"${kind.__name__}": content}

    has_keys = kind in (dict, OrderedDict) and all(type(key) in (str, int) for key in value)
    if has_keys and not contains_itself:
        flat = {}
        for key, item in value.items():
            parent = f"{path}." if path else ""
            item_path = f"{parent}{key}" if isinstance(key, str) else f"{path}[{key}]"
            flat[key] = flatten(item, item_path, owner, tensors)
        is_json = all(isinstance(key, str) and not key.startswith("$") for key in flat)
        return flat if is_json else {"$dict": [[key, item] for key, item in flat.items()]}

    form = f" of {value.dtype} ({value.layout})" if isinstance(value, torch.Tensor) else ""
    raise UserError(
        f"{owner} keeps a {kind.__name__}{form} in {path[:100] or 'its state'}, which a checkpoint "
        "cannot hold; use tensors, numbers, strings, None, lists, tuples, sets, and dictionaries "
        "with strings or integers as keys."
    )


def unflatten(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that :func:`flatten` was given, with these tensors."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree

    kind = next(iter(tree), "")
    if not kind.startswith("$"):
        return {key: unflatten(item, tensors) for key, item in tree.items()}
    content: Any = tree[kind]
    if kind == "$tensor":
        return tensors[content]
    if kind == "$float":
        return float(content)
    make = {"$tuple": tuple, "$set": set, "$dict": dict}[kind]
    return make(unflatten(content, tensors))
