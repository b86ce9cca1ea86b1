"""A state as JSON and named tensors, and back with the same types. No pickle is involved.

A state is a tree of dictionaries, lists, tuples and sets. Its leaves are tensors, numbers, strings,
booleans and ``None``. JSON has some of these types itself. The others are objects with a single
key:

=========================  ====================================================
``{"tensor": NAME}``       the tensor of this name
``{"float": "nan"}``       a number that is not finite
``{"dict": [[KEY, VALUE]]}``  a dictionary; its keys may be numbers or tuples, too
``{"tuple": [VALUE]}``     a tuple; ``set``, ``Size`` and ``OrderedDict`` likewise
=========================  ====================================================
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.errors import UserError
from llmtrain.json_types import Json, JsonObject
from llmtrain.parallel.shards import sharded_dim
from llmtrain.record.tensor_files import STORABLE_DTYPES

_SEQUENCES = {"tuple": tuple, "set": set, "Size": torch.Size}
_DICTIONARIES = {"dict": dict, "OrderedDict": OrderedDict}
_TENSOR_TYPES = (torch.Tensor, nn.Parameter, DTensor)
_DEEPEST = 100  # levels of a tree; one that contains itself has more


class FlatState(NamedTuple):
    """A state that a checkpoint holds in a folder.

    Attributes:
        structure: what is no tensor. :func:`flatten` makes the trees in it.
        tensors: the tensors by name. They may be sharded.
    """

    structure: JsonObject
    tensors: dict[str, torch.Tensor]


def flatten(
    value: object, path: str, owner: str, taken: Collection[str] = ()
) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return a value as JSON, and the tensors in it by name. Nothing is copied.

    A tensor's name is its path, such as ``wte.weight.exp_avg`` or ``wte.weight.GG[0]``.

    Args:
        value: the value.
        path: the path of the value.
        owner: what keeps the value, for the message of an error.
        taken: names that tensors of other values have. A tensor with such a path gets a number.

    Raises:
        UserError: if there is something that a checkpoint cannot hold. It names path and type.
    """
    walk = _Walk(owner, taken)
    tree = walk.flatten(value, path)
    return tree, walk.tensors


class _Walk:
    """Makes JSON of a value, and collects the tensors in it."""

    def __init__(self, owner: str, taken: Collection[str]) -> None:
        self.owner = owner
        self.taken = taken
        self.tensors: dict[str, torch.Tensor] = {}

    def flatten(self, value: Any, path: str) -> Json:
        """Return a value below a path as JSON."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            plain: Json = value
            return plain
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind in _TENSOR_TYPES:
            return self._add_tensor(value, path)

        if path.count(".") + path.count("[") > _DEEPEST:
            self._refuse("a state that contains itself", path[:100])
        if kind is list:
            return self._flatten_items(value, path)
        for name, sequence in _SEQUENCES.items():
            if kind is sequence:
                items = sorted(value, key=repr) if kind is set else value
                return {name: self._flatten_items(items, path)}
        for name, dictionary in _DICTIONARIES.items():
            if kind is dictionary:
                return {name: self._flatten_pairs(value, path)}
        self._refuse(f"a {kind.__name__}", path)

    def _add_tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if tensor.layout != torch.strided:
            self._refuse(f"a tensor of {tensor.layout}", path)
        if tensor.dtype not in STORABLE_DTYPES:
            self._refuse(f"a tensor of {tensor.dtype}", path)
        if isinstance(tensor, DTensor):
            try:
                sharded_dim(tensor)
            except ValueError:
                self._refuse(f"a DTensor with {tensor.placements}", path)

        # Two paths are the same if a key contains a dot.
        name = path
        number = 2
        while name in self.tensors or name in self.taken:
            name = f"{path}-{number}"
            number += 1
        self.tensors[name] = tensor.detach()
        return {"tensor": name}

    def _flatten_items(self, items: Iterable[Any], path: str) -> list[Json]:
        return [self.flatten(item, f"{path}[{index}]") for index, item in enumerate(items)]

    def _flatten_pairs(self, dictionary: Mapping[Any, Any], path: str) -> list[Json]:
        pairs: list[Json] = []
        for key, item in dictionary.items():
            if isinstance(key, str):
                item_path = f"{path}.{key}" if path else key
            else:
                item_path = f"{path}[{key!r}]"
            flat_key, tensors = flatten(key, item_path, self.owner)
            if tensors:
                self._refuse("a tensor as a key", path)
            pairs.append([flat_key, self.flatten(item, item_path)])
        return pairs

    def _refuse(self, description: str, path: str) -> NoReturn:
        place = f" in {path}" if path else ""
        raise UserError(
            f"{self.owner} keeps {description}{place}, which a checkpoint cannot hold; use "
            "tensors, numbers, strings, None, and lists, tuples, sets and dictionaries of them."
        )


def unflatten(tree: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that :func:`flatten` was given, with these tensors."""
    if isinstance(tree, list):
        return [unflatten(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree

    [(kind, content)] = tree.items()
    if kind == "tensor":
        return tensors[str(content)]
    if kind == "float":
        return float(str(content))
    items = unflatten(content, tensors)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](items)
    return _DICTIONARIES[kind](items)


def tensor_names(tree: Json) -> Iterator[str]:
    """Yield the names of the tensors in a value that :func:`flatten` returned."""
    if isinstance(tree, list):
        for item in tree:
            yield from tensor_names(item)
    elif isinstance(tree, dict):
        [(kind, content)] = tree.items()
        if kind == "tensor":
            yield str(content)
        else:
            yield from tensor_names(content)
