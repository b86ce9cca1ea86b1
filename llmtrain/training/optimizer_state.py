"""The state of an optimizer: everything that it changes, into a checkpoint and back."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import digest
from llmtrain.interfaces.model_bundle import Weights
from llmtrain.json_types import Json, JsonObject
from llmtrain.observe.replicas import checksum
from llmtrain.parallel.shards import distribute, filled_like, local_shard, sharded_dim
from llmtrain.parallel.team import Team
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
        self._first_groups = [_copied(_values_of(group)) for group in optimizer.param_groups]
        self._first_entries = _copied(_further_entries(optimizer))

    def flatten(self) -> FlatState:
        """Return the state as it is now. Its tensors are the optimizer's own.

        Raises:
            UserError: if there is something that a checkpoint cannot hold.
        """
        tensors: dict[str, torch.Tensor] = {}
        notes: dict[str, Json] = {}  # of tensors that are not in the form of their parameter

        def add(value: object, path: str, like: torch.Tensor) -> Json:
            tree, added = flatten(value, path, self._owner)
            for name, tensor in added.items():
                note = self._note(name, tensor, like)
                if note:
                    notes[name] = note
            assert not tensors.keys() & added.keys()
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
        own: dict[str, torch.Tensor] = {}
        for name, full in tensors:
            if name in likes:  # else this run does not train its parameter
                own[name] = _placed(full, likes[name], structure["tensors"].get(name, {}))

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

    def check(self) -> None:
        """Check that a checkpoint can hold the state as it is now. All ranks call this.

        Raises:
            UserError: on all ranks, if there is a value of another type, or if ranks keep different
                values: those of rank 0 are saved.
        """
        states = Team.everyone().on_all(lambda: _checksums(self.flatten()))
        for rank, state in enumerate(states):
            different = [
                name for name in {**states[0], **state} if states[0].get(name) != state.get(name)
            ]
            if different:
                raise UserError(
                    f"{self._owner} keeps other values on rank {rank} than on rank 0 in "
                    f"{different[0]}, but a checkpoint holds those of rank 0; use an optimizer "
                    "whose state is the same on all ranks, or is sharded like the weights."
                )

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

    def _load_entries(self, changes: dict[str, Any]) -> None:
        """Load further entries of the optimizer's ``state_dict``, which may be kept anywhere."""
        groups = list(self.optimizer.param_groups)
        current = self.optimizer.state_dict()
        entries = _copied(_further_entries(self.optimizer))
        _update(entries, changes)
        self.optimizer.load_state_dict(
            {**entries, "state": {}, "param_groups": current["param_groups"]}
        )
        # It has made new groups, with a copy of each value.
        self.optimizer.param_groups[:] = groups

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
        note: if present, ``device`` is ``cpu``; ``sharded_dim`` is the dimension that was sharded,
            or ``None`` if each rank had the full tensor; ``is_plain`` is whether it was no DTensor;
            ``strides`` are those of a tensor that was not contiguous.
    """
    full = full.to("cpu" if "device" in note else like.device)
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


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a parameter group, except for the learning rate, which the loop sets."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def _further_entries(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a class adds to the ``state_dict`` of an optimizer."""
    entries = optimizer.state_dict()
    return {key: entries[key] for key in entries if key not in ("state", "param_groups")}


def _copied(value: Any) -> Any:
    """Return a copy of the dictionaries, lists and tensors in a value."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value


def _changes(values: dict[Any, Any], before: dict[Any, Any]) -> dict[Any, Any]:
    """Return the entries that are new or have changed; of dictionaries among them, likewise."""
    changes = {}
    for key, value in values.items():
        if key not in before:
            changes[key] = value
        elif type(value) is dict and type(before[key]) is dict:
            inner = _changes(value, before[key])
            if inner:
                changes[key] = inner
        elif not _is_same(value, before[key]):
            changes[key] = value
    return changes


def _update(values: dict[Any, Any], changes: dict[Any, Any]) -> None:
    """Change the entries that :func:`_changes` returned, in place."""
    for key, change in changes.items():
        if type(change) is dict and type(values.get(key)) is dict:
            _update(values[key], change)
        else:
            values[key] = change


def _is_same(first: Any, second: Any) -> bool:
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and torch.equal(local_shard(first), local_shard(second))
    if type(first) in (list, tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_is_same(*pair) for pair in pairs)
    return bool(first == second)


def _checksums(state: FlatState) -> dict[str, object]:
    """Return what must be the same on all ranks, by the names of the tensors."""
    sums: dict[str, object] = {}
    for name, tensor in state.tensors.items():
        header = (str(tensor.dtype), tuple(tensor.shape))
        is_sharded = isinstance(tensor, DTensor)
        sums[name] = header if is_sharded else (header, int(checksum(tensor)))
    sums["its numbers, strings or lists"] = digest(state.structure)
    return sums
