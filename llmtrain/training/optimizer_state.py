"""The state of an optimizer: everything that it changes, into a checkpoint and back."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.interfaces.model_bundle import Weights
from llmtrain.json_types import Json, JsonObject
from llmtrain.parallel.shards import distribute, filled_like, sharded_dim
from llmtrain.record.state_tree import FlatState, flatten, tensor_names, unflatten
from llmtrain.training.changed_values import apply_changes, changes_since, remember


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
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        # The state of weights in bfloat16 has other tensors.
        self._dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
        self._first_groups = [remember(_values_of(group)) for group in optimizer.param_groups]
        self._first_entries = remember(_further_entries(optimizer))

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

        collector = _Collector(self._owner)
        first_parameters = self._first_parameters()

        names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        states = {}
        other_states = {}
        for key, value in self.optimizer.state.items():
            if key in names:
                states[names[key]] = collector.add(value, path=names[key], parameter=key)
            else:
                other_states[key] = value

        groups = []
        for index, group in enumerate(self.optimizer.param_groups):
            changes = changes_since(self._first_groups[index], _values_of(group))
            groups.append(
                collector.add(
                    changes, path=f"param_groups[{index}]", parameter=first_parameters[index]
                )
            )

        entries = changes_since(self._first_entries, _further_entries(self.optimizer))
        structure = {
            "optimizer": self.name,
            "dtypes": self._dtypes,
            "state": dict(sorted(states.items())),
            "other_state": collector.add(other_states, path="state", parameter=first_parameters[0]),
            "param_groups": groups,
            "further_entries": collector.add(
                entries, path="state_dict", parameter=first_parameters[0]
            ),
            "tensors": collector.notes,
        }
        return FlatState(structure, collector.tensors)

    def restore(self, structure: JsonObject, tensors: Weights) -> None:
        """Put back the state that :meth:`flatten` returned.

        Args:
            structure: its structure.
            tensors: its names and full tensors, one at a time.
        """
        is_same = structure["optimizer"] == self.name and structure["dtypes"] == self._dtypes
        if not is_same:
            say(
                "changed",
                f"the checkpoint has the state of the optimizer {structure['optimizer']} for "
                f"weights in {' and '.join(structure['dtypes'])}; {self.name} for weights in "
                f"{' and '.join(self._dtypes)} starts without a state",
            )
            return

        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        trees: dict[nn.Parameter, Json] = {}
        for name, parameter in self._parameters.items():
            if name in structure["state"] and id(parameter) in trained:
                trees[parameter] = structure["state"][name]

        # Each tensor is sharded before the next one is read.
        parameters = self._parameters_of_tensors(structure, trees)
        notes = self._notes_of_this_run(structure, trees)
        own: dict[str, torch.Tensor] = {}
        for name, full in tensors:
            if name in parameters:  # else this run does not train its parameter
                own[name] = _placed(full, parameters[name], notes.get(name, {}))

        # Before the groups and the state, because it makes new groups.
        entries = unflatten(structure["further_entries"], own)
        if entries:
            self._load_entries(entries)

        groups = zip(self.optimizer.param_groups, structure["param_groups"], strict=False)
        for group, tree in groups:
            apply_changes(group, unflatten(tree, own))

        self.optimizer.state.clear()
        for parameter, tree in trees.items():
            self.optimizer.state[parameter] = unflatten(tree, own)
        self.optimizer.state.update(unflatten(structure["other_state"], own))

    def _first_parameters(self) -> list[torch.Tensor]:
        """Return a parameter of each group, whose device is that of the group's tensors."""
        any_parameter = next(iter(self._parameters.values()))
        groups = self.optimizer.param_groups
        return [group["params"][0] if group["params"] else any_parameter for group in groups]

    def _parameters_of_tensors(
        self, structure: JsonObject, trees: dict[nn.Parameter, Json]
    ) -> dict[str, torch.Tensor]:
        """Return the parameter of each tensor to be restored, by the name of the tensor."""
        first_parameters = self._first_parameters()
        owned = [
            *trees.items(),
            *zip(first_parameters, structure["param_groups"], strict=False),
            (first_parameters[0], structure["other_state"]),
            (first_parameters[0], structure["further_entries"]),
        ]
        parameters = {}
        for parameter, tree in owned:
            parameters.update(dict.fromkeys(tensor_names(tree), parameter))
        return parameters

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
        apply_changes(entries, changes)
        self.optimizer.load_state_dict(
            {**entries, "state": {}, "param_groups": current["param_groups"]}
        )
        # It has made new groups with copies of the values. The groups stay, because a class may
        # share them with other optimizers. They get the values back, such as a rate in a tensor.
        for group, values in zip(self.optimizer.param_groups, values_of_groups, strict=True):
            group.update(values)


class _Collector:
    """Flattens the values of a state, and collects their tensors.

    Attributes:
        tensors: the tensors by name.
        notes: how tensors differ in form from their parameters, by name; see :func:`_placed`.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self.tensors: dict[str, torch.Tensor] = {}
        self.notes: dict[str, Json] = {}

    def add(self, value: object, *, path: str, parameter: torch.Tensor) -> Json:
        """Return a value as JSON, and collect the tensors in it.

        Args:
            value: the value.
            path: its path, which begins the names of its tensors.
            parameter: the parameter that it belongs to.

        Raises:
            UserError: if there is something that a checkpoint cannot hold.
        """
        tree, tensors = flatten(value, path, self._owner, taken=self.tensors)
        self.tensors.update(tensors)
        for name, tensor in tensors.items():
            note = self._note(name, tensor, parameter)
            if note:
                self.notes[name] = note
        return tree

    def _note(self, name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> JsonObject:
        """Return how a tensor differs in form from its parameter."""
        note: JsonObject = {}
        if tensor.device.type == "cpu" and parameter.device.type != "cpu":
            note["device"] = "cpu"
        if not isinstance(tensor, DTensor):
            if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
                note["is_plain"] = True
            # Products of matrices in another memory order round differently.
            is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
            if is_dense and not tensor.is_contiguous():
                note["strides"] = list(tensor.stride())
            return note

        if not isinstance(parameter, DTensor) or tensor.device_mesh != parameter.device_mesh:
            raise UserError(
                f"{self._owner} shards {name} over other ranks than its weights, which a "
                "checkpoint cannot hold; use another optimizer."
            )
        if tensor.shape != parameter.shape or tensor.placements != parameter.placements:
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
