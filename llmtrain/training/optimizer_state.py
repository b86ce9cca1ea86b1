"""The state of an optimizer: everything that it changes, into a checkpoint and back."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import Weights
from llmtrain.interfaces.part import as_json
from llmtrain.json_types import Json, JsonObject
from llmtrain.parallel.shards import distribute, filled_like, sharded_dim
from llmtrain.record.state_tree import FlatState, flatten, tensor_names, unflatten


class OptimizerState:
    """The state of an optimizer, to save it and to put it back.

    An optimizer changes its ``state``, and some also values of their parameter groups, such as a
    count of steps, or further entries of their ``state_dict``. Make this object before a checkpoint
    is restored: whatever differs from its first value when a checkpoint is saved is state, and the
    rest are settings, which a resumed run takes from its own start.

    ``Optimizer.load_state_dict`` is not used for the state: it casts tensors to the dtype of the
    parameter, and turns strings into generators.

    Args:
        model: the model, whose parameters may be sharded.
        optimizer: the optimizer, which Accelerate has not wrapped.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self._owner = f"the optimizer {self.name}"
        self._parameters = dict(model.named_parameters())
        self._first_groups = [_remember(_values_of(group)) for group in optimizer.param_groups]
        self._first_entries = _remember(_further_entries(optimizer))

    def flatten(self) -> FlatState:
        """Return the state as it is now. Its tensors are the optimizer's own.

        Raises:
            UserError: if there is something that a checkpoint cannot hold.
        """
        if len(self.optimizer.param_groups) != len(self._first_groups):
            raise UserError(
                f"{self._owner} has {len(self.optimizer.param_groups)} parameter groups, and had "
                f"{len(self._first_groups)} when the run began; make all groups before "
                "llmtrain.open_run."
            )

        tensors: dict[str, torch.Tensor] = {}
        notes: dict[str, Json] = {}  # of tensors that are not in the form of their parameter

        def add(value: object, path: str, like: torch.Tensor) -> Json:
            tree, added = flatten(value, path, self._owner, taken=tensors)
            for name, tensor in added.items():
                note = self._note(name, tensor, like)
                if note:
                    notes[name] = note
            tensors.update(added)
            return tree

        names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        of_parameters = {}
        others = {}
        for key, value in self.optimizer.state.items():
            if key in names:
                of_parameters[names[key]] = add(value, names[key], key)
            else:
                others[key] = value

        groups = []
        first_parameters = [self._first_parameter(group) for group in self.optimizer.param_groups]
        for index, group in enumerate(self.optimizer.param_groups):
            changes = _changes(_values_of(group), self._first_groups[index])
            groups.append(add(changes, f"param_groups[{index}]", first_parameters[index]))

        entries = _changes(_further_entries(self.optimizer), self._first_entries)
        structure = {
            "optimizer": self.name,
            "state": dict(sorted(of_parameters.items())),
            "other_state": add(others, "state", first_parameters[0]),
            "param_groups": groups,
            "further_entries": add(entries, "state_dict", first_parameters[0]),
            "tensors": notes,
        }
        return FlatState(structure, tensors)

    def restore(self, structure: JsonObject, tensors: Weights) -> None:
        """Put back the state that :meth:`flatten` returned.

        Args:
            structure: its structure.
            tensors: its names and full tensors, one at a time.
        """
        if structure["optimizer"] != self.name:
            say(
                "changed",
                f"the checkpoint has the state of the optimizer {structure['optimizer']}; "
                f"{self.name} starts without a state",
            )
            return

        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trees: dict[nn.Parameter, Json] = {}
        for name, parameter in self._parameters.items():
            if name in structure["state"] and id(parameter) in trained:
                trees[parameter] = structure["state"][name]

        # Read the tensors, and shard each of them before the next one is read.
        likes = self._parameters_of_tensors(structure, trees)
        notes = self._notes_of_this_run(structure, trees)
        own: dict[str, torch.Tensor] = {}
        for name, full in tensors:
            if name in likes:  # else this run does not train its parameter
                own[name] = _placed(full, likes[name], notes.get(name, {}))

        entries = unflatten(structure["further_entries"], own)
        if entries:
            self._load_entries(entries)
        for group, tree in zip(
            self.optimizer.param_groups, structure["param_groups"], strict=False
        ):
            _update(group, unflatten(tree, own))
        self.optimizer.state.clear()
        for parameter, tree in trees.items():
            self.optimizer.state[parameter] = unflatten(tree, own)
        self.optimizer.state.update(unflatten(structure["other_state"], own))

    def _first_parameter(self, group: dict[str, Any]) -> torch.Tensor:
        """Return the parameter whose device is that of the group's tensors."""
        parameters = group["params"] or list(self._parameters.values())
        parameter: torch.Tensor = parameters[0]
        return parameter

    def _parameters_of_tensors(
        self, structure: JsonObject, trees: dict[nn.Parameter, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the parameter of each tensor to be restored, by the name of the tensor."""
        first_parameters = [self._first_parameter(group) for group in self.optimizer.param_groups]
        owned = [
            *trees.items(),
            *zip(first_parameters, structure["param_groups"], strict=False),
            (first_parameters[0], structure["other_state"]),
            (first_parameters[0], structure["further_entries"]),
        ]
        likes = {}
        for parameter, tree in owned:
            likes.update(dict.fromkeys(tensor_names(tree), parameter))
        return likes

    def _notes_of_this_run(
        self, structure: JsonObject, trees: dict[nn.Parameter, Json]
    ) -> dict[str, JsonObject]:
        """Return the notes of a checkpoint, with the devices on which this run keeps steps.

        torch's fused and capturable implementations need the number of steps on the device of the
        parameter, and the others have it on the CPU. A run may resume with another implementation.
        """
        notes: dict[str, JsonObject] = dict(structure["tensors"])
        for group in self.optimizer.param_groups:
            if "fused" not in group and "capturable" not in group:
                continue
            is_on_device = group.get("fused") or group.get("capturable")
            for parameter in group["params"]:
                device = str(parameter.device) if is_on_device else "cpu"
                for name in _names_of_steps(trees.get(parameter)):
                    notes[name] = {**notes.get(name, {}), "device": device}
        return notes

    def _load_entries(self, changes: dict[str, Any]) -> None:
        """Load further entries of the optimizer's ``state_dict``, which may be kept anywhere."""
        values_of_groups = [dict(group) for group in self.optimizer.param_groups]
        current = self.optimizer.state_dict()
        entries = _further_entries(self.optimizer)
        _update(entries, changes)
        self.optimizer.load_state_dict(
            {**entries, "state": {}, "param_groups": current["param_groups"]}
        )
        # It has made new groups with copies of the values. The groups stay, because a class may
        # share them with other optimizers. They get the values back, such as a rate in a tensor.
        for group, values in zip(self.optimizer.param_groups, values_of_groups, strict=True):
            group.update(values)

    def _note(self, name: str, tensor: torch.Tensor, like: torch.Tensor) -> JsonObject:
        """Return how a tensor differs in form from its parameter; see :func:`_placed`."""
        note: JsonObject = {}
        if tensor.device.type == "cpu" and like.device.type != "cpu":
            note["device"] = "cpu"
        if not isinstance(tensor, DTensor):
            if isinstance(like, DTensor) and tensor.shape == like.shape:
                note["is_plain"] = True
            # Products of matrices in another memory order round differently.
            is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
            if is_dense and not tensor.is_contiguous():
                note["strides"] = list(tensor.stride())
            return note

        if not isinstance(like, DTensor) or tensor.device_mesh != like.device_mesh:
            raise UserError(
                f"{self._owner} shards {name} over other ranks than its weights, which a "
                "checkpoint cannot hold; use another optimizer."
            )
        if tensor.shape != like.shape or tensor.placements != like.placements:
            note["sharded_dim"] = sharded_dim(tensor)
        return note


def _placed(full: torch.Tensor, like: torch.Tensor, note: JsonObject) -> torch.Tensor:
    """Return a tensor of the state in the form that it had when it was saved.

    Without a note, it is on the device of its parameter, and sharded if it has its shape.

    Args:
        full: the full tensor.
        like: its parameter.
        note: if present, ``device`` is where it belongs; ``sharded_dim`` is the dimension that was
            sharded, or ``None`` if each rank had the full tensor; ``is_plain`` is whether it was no
            DTensor; ``strides`` are those of a tensor that was not contiguous.
    """
    full = full.to(note.get("device", like.device))
    if "strides" in note:
        target = torch.empty_strided(
            full.shape, note["strides"], dtype=full.dtype, device=full.device
        )
        full = target.copy_(full)
    if not isinstance(like, DTensor) or "is_plain" in note:
        return full
    if "sharded_dim" in note:
        return distribute(full, like, note["sharded_dim"])
    return filled_like(like, full) if full.shape == like.shape else full


def _names_of_steps(tree: Any) -> Iterator[str]:
    """Yield the name of the tensor ``step`` in the state of a parameter, if it has one."""
    pairs = tree.get("dict", []) if isinstance(tree, dict) else []
    for key, item in pairs:
        if key == "step" and isinstance(item, dict):
            yield from tensor_names(item)


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group, except for the learning rate, which the loop sets."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _further_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a class adds to the ``state_dict`` of an optimizer."""
    entries = optimizer.state_dict()
    return {key: entries[key] for key in entries if key not in ("state", "param_groups")}


class _Remembered(NamedTuple):
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


def _remember(value: object) -> Any:
    """Remember a value; of a dictionary, each entry."""
    if type(value) is dict:
        return {key: _remember(item) for key, item in value.items()}
    tree, tensors = _flatten_or_describe(value)
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    return _Remembered(repr(tree), copies)


def _flatten_or_describe(value: object) -> tuple[Json, dict[str, torch.Tensor]]:
    """Return a value as JSON and its tensors. If a checkpoint cannot hold it, describe it.

    Settings may be of any type, such as functions.
    """
    try:
        return flatten(value, path="", owner="")
    except UserError:
        return {"described": as_json(value)}, {}


def _is_same_tensor(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are the same. Sharded ones never are.

    All ranks must agree on what has changed, and one of them may have a shard that has not.
    """
    if isinstance(first, DTensor) or isinstance(second, DTensor):
        return False
    has_same_form = (first.dtype, first.device) == (second.dtype, second.device)
    return has_same_form and torch.equal(first, second)


def _changes(values: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that are new or have changed; of dictionaries among them, likewise.

    Args:
        values: the values as they are now.
        before: what :func:`_remember` returned at the beginning.
    """
    changes = {}
    for key, value in values.items():
        if key not in before:
            changes[key] = value
        elif type(value) is dict and type(before[key]) is dict:
            inner = _changes(value, before[key])
            if inner:
                changes[key] = inner
        elif not isinstance(before[key], _Remembered) or not before[key].is_same(value):
            changes[key] = value
    return changes


def _update(values: dict[Any, Any], changes: dict[Any, Any]) -> None:
    """Change the entries that :func:`_changes` returned, in place."""
    for key, change in changes.items():
        if type(change) is dict and type(values.get(key)) is dict:
            _update(values[key], change)
        else:
            values[key] = change
