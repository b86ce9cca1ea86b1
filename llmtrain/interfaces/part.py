"""What a user brings to a run: an objective, a schedule, a callback or a metric.

The package keeps the same promises for such a part as for its own code. The part's fingerprint is
in that of the run, so a changed part makes a new run. Its state is in every checkpoint, so a
resumed run goes on with it. Of a schedule, the fingerprint has the values, and it has no state.
"""

from __future__ import annotations  # so that annotations do not import torch

import dataclasses
import functools
import hashlib
import inspect
import math
from collections import deque
from collections.abc import Callable, Mapping
from decimal import Decimal
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

from llmtrain.json_types import JsonObject

# Attributes of these types are values of a class, and others are methods, properties and the like.
_PLAIN_TYPES = (bool, int, float, str, list, tuple, dict, set)


class Part:
    """Something that a user brings to a run.

    By default it has no state, and its fingerprint is its class with all public fields.

    Attributes:
        name: its name in messages and checkpoints; if empty, the name of its class. Two parts of a
            run must not have the same name.
    """

    name: str = ""

    @property
    def fingerprint(self) -> JsonObject | None:
        """All that the part's effect on the run depends on, as JSON.

        The fingerprint of a run has its value when the run is opened. ``None`` says that the part
        changes nothing that the run computes, as with a callback that only prints. A run with
        another such part is the same run.
        """
        return {"class": type(self).__name__, **public_fields(self)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as if it had never stopped.

        A checkpoint can hold tensors, numbers, strings, ``None``, and lists, tuples, sets and
        dictionaries of them. All ranks must return the same, except for the shards of DTensors.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` has returned.

        A tensor is sharded if the tensor that :meth:`state_dict` has returned just before is.
        Other tensors are on the CPU.
        """


def name_of(part: Part) -> str:
    """Return the name of a part in messages and checkpoints."""
    return part.name or type(part).__name__


def accepts(function: Callable[..., Any], *arguments: object) -> bool:
    """Return whether a function of the user can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


def public_fields(part: object) -> JsonObject:
    """Return the public fields of an object as JSON.

    These are its attributes without a leading underscore, and those of its class, except for the
    defaults of this package's own classes.
    """
    fields: dict[str, Any] = {}
    for owner in reversed(type(part).__mro__):
        if owner is object or is_own(owner):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, _PLAIN_TYPES):  # not a method or a property
                fields[name] = value
    fields.update(vars(part))
    return {name: as_json(fields[name]) for name in sorted(fields) if not name.startswith("_")}


def is_own(owner: type) -> bool:
    """Return whether this package defines a class."""
    return owner.__module__.partition(".")[0] == "llmtrain"


def as_json(value: object, inside: tuple[int, ...] = ()) -> Any:
    """Describe a value of a fingerprint as JSON.

    The description is the same in every process. Tensors and arrays are described by a hash of
    their values, dataclasses by their fields, functions by their names, and objects of other
    classes by the name of their class.

    Args:
        value: the value.
        inside: the ids of the objects that contain it, as some contain themselves.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if id(value) in inside:
        return type(value).__name__
    return _object_as_json(value, (*inside, id(value)))


def _object_as_json(value: object, inside: tuple[int, ...]) -> Any:
    """Describe a value that is neither a number nor a string."""
    if isinstance(value, Mapping):
        return {str(as_json(key, inside)): as_json(entry, inside) for key, entry in value.items()}
    if isinstance(value, list | tuple | deque):
        return [as_json(entry, inside) for entry in value]
    if isinstance(value, set | frozenset):
        return sorted((as_json(entry, inside) for entry in value), key=repr)
    if isinstance(value, functools.partial):
        return as_json([value.func, value.args, value.keywords], inside)
    if isinstance(value, type | FunctionType | BuiltinFunctionType | MethodType):
        return value.__qualname__
    return _instance_as_json(value, inside)


def _instance_as_json(value: object, inside: tuple[int, ...]) -> Any:
    """Describe an instance of a class that is no container."""
    if isinstance(value, Part):
        return as_json(value.fingerprint, inside)
    if isinstance(value, Enum | Path | Decimal | range):
        return str(value)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    if isinstance(value, SimpleNamespace):
        return as_json(vars(value), inside)
    array = _array_as_json(value)
    if array is not None:
        return array

    fields: JsonObject = {}
    if dataclasses.is_dataclass(value):
        # Not all attributes: a section of settings also has the origins of its flags.
        names = [field.name for field in dataclasses.fields(value)]
        fields = {name: as_json(getattr(value, name), inside) for name in names if name[0] != "_"}
    return {"class": type(value).__name__, **fields}


def _array_as_json(value: object) -> Any:
    """Describe a tensor, an array, or a type of tensors; return ``None`` for anything else.

    Of a DTensor, this is the rank's own shard.
    """
    # Not at the top, because recipes import this module to print --help.
    import numpy as np
    import torch
    from torch.distributed.tensor import DTensor

    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if isinstance(value, DTensor):
        value = value.to_local()
    if isinstance(value, torch.Tensor) and not value.is_meta:
        form = [str(value.dtype), list(value.shape)]
        numbers = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    elif isinstance(value, np.ndarray):
        form = [str(value.dtype), list(value.shape)]
        numbers = value
    else:
        return None
    return {"form": form, "sha256": hashlib.sha256(numbers.tobytes()).hexdigest()}
