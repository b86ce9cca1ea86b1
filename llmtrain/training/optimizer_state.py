"""The state of an optimizer, into a checkpoint and back."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from llmtrain.console import say
from llmtrain.errors import UserError, short_repr
from llmtrain.files import Json, JsonObject
from llmtrain.interfaces.model import Weights
from llmtrain.parallel.shards import distribute, filled_like, sharded_dim
from llmtrain.record.state_tree import FlatState, flatten, unflatten
from llmtrain.training.parts import UNRECORDED_KEYS, description, group_settings


class OptimizerState:
    """The state of an optimizer, to save it and to put it back.

    A checkpoint has the state of each parameter, and the values of the parameter groups: an
    optimizer may count its steps there. Some of these values are settings. If this start has
    another setting than the start that has saved the checkpoint, the new setting stays. Make this
    object before a checkpoint is restored, when all groups have their settings.

    ``Optimizer.load_state_dict`` is not used: it casts tensors to the dtype of the parameter, and
    turns strings into generators. So does ``set_optimizer_state_dict``.

    Args:
        model: the model, whose parameters may be sharded.
        optimizer: the optimizer, which Accelerate has not wrapped.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.name = type(optimizer).__name__
        self._parameters = dict(model.named_parameters())
        self._settings = [group_settings(_values_of(group)) for group in optimizer.param_groups]
        self._first_values = [description(_values_of(group)) for group in optimizer.param_groups]
        # The state of weights in bfloat16 has other tensors.
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        self._dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained})
        self._first_entries = _further_entries(optimizer)

    def flatten(self) -> FlatState:
        """Return the state as it is now. Its tensors are the optimizer's own.

        Raises:
            UserError: if there is something that a checkpoint cannot hold.
        """
        owner = f"the optimizer {self.name}"
        for key, entry in _further_entries(self.optimizer).items():
            if entry != self._first_entries.get(key):
                raise UserError(
                    f"{owner} changes {key} of its state_dict, and a checkpoint holds only state "
                    "and param_groups, so a run could not be resumed; use another optimizer."
                )
        names: dict[torch.Tensor, str] = {p: name for name, p in self._parameters.items()}
        tensors: dict[str, torch.Tensor] = {}
        forms: dict[str, Json] = {}

        def add(value: object, path: str, parameter_name: str) -> Json:
            """Return a value as JSON, and note the form of the tensors in it."""
            own_tensors: dict[str, torch.Tensor] = {}
            tree = flatten(value, path, owner, own_tensors)
            for name, tensor in own_tensors.items():
                form = _form_of(name, tensor, self._parameters[parameter_name])
                forms[name] = {"parameter": parameter_name, **form}
            tensors.update(own_tensors)
            return tree

        for unknown in self.optimizer.state.keys() - names.keys():
            raise UserError(
                f"{owner} keeps a state of {short_repr(unknown)}, which is no parameter of the "
                "model, so a checkpoint cannot hold it; keep it in a parameter group."
            )
        states = {}
        for name, parameter in self._parameters.items():
            if parameter in self.optimizer.state:
                states[name] = add(self.optimizer.state[parameter], name, name)

        groups = []
        first_name = next(iter(self._parameters))  # its device is that of the tensors of groups
        for index, group in enumerate(self.optimizer.param_groups):
            values = {}
            for key, value in _values_of(group).items():
                try:
                    values[key] = add(value, f"param_groups[{index}].{key}", first_name)
                except UserError:
                    # It is a setting, such as a function, if it does not change.
                    if description(value) != self._first_values[index].get(key):
                        raise
            groups.append(values)

        structure = {
            "optimizer": self.name,
            "dtypes": self._dtypes,
            "state": states,
            "param_groups": groups,
            "settings": self._settings,
            "tensors": forms,
        }
        return FlatState(structure, tensors)

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

        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        restored: dict[str, torch.Tensor] = {}
        for name, full in tensors:  # each is sharded before the next one is read
            form = structure["tensors"][name]
            parameter = self._parameters[form["parameter"]]
            if name == f"{form['parameter']}.step":
                form = _form_of_step(form, parameter, group_of.get(parameter, {}))
            restored[name] = _placed(full, parameter, form)

        groups = zip(
            self.optimizer.param_groups,
            structure["param_groups"],
            structure["settings"],
            self._settings,
            strict=False,
        )
        for group, values, settings_before, settings in groups:
            for key, value in unflatten(values, restored).items():
                if settings_before.get(key) == settings.get(key):
                    group[key] = value

        self.optimizer.state.clear()
        for parameter_name, state in structure["state"].items():
            parameter = self._parameters[parameter_name]
            if parameter in group_of:  # else this run does not train it
                self.optimizer.state[parameter] = unflatten(state, restored)


def _form_of(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> JsonObject:
    """Return how a tensor of the state differs in form from a full tensor; see :func:`_placed`."""
    form: JsonObject = {}
    if tensor.device.type == "cpu" and parameter.device.type != "cpu":
        form["device"] = "cpu"
    if isinstance(tensor, DTensor):
        if not isinstance(parameter, DTensor) or tensor.device_mesh != parameter.device_mesh:
            raise UserError(
                f"the optimizer shards {name} over other ranks than its weights, which a "
                "checkpoint cannot hold; use another optimizer."
            )
        form["sharded_dim"] = sharded_dim(tensor)
        return form
    if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
        form["is_plain"] = True
    # Products of matrices in another memory order round differently.
    is_dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    if is_dense and not tensor.is_contiguous():
        form["strides"] = list(tensor.stride())
    return form


def _form_of_step(form: JsonObject, parameter: torch.Tensor, group: dict[str, Any]) -> JsonObject:
    """Return the form that a count of steps has in this run.

    torch's fused and capturable implementations need it on the device of the parameter, and the
    others have it on the CPU. A run may resume with another implementation.
    """
    if "fused" not in group and "capturable" not in group:
        return form
    is_on_device = group.get("fused") or group.get("capturable")
    return {**form, "device": str(parameter.device) if is_on_device else "cpu"}


def _placed(full: torch.Tensor, like: torch.Tensor, form: JsonObject) -> torch.Tensor:
    """Return a tensor of the state in the form that it had when it was saved.

    Args:
        full: the full tensor.
        like: its parameter.
        form: if present, ``device`` is where it belongs, instead of the device of the parameter;
            ``sharded_dim`` is the dimension that was sharded, or ``None`` if each rank had the full
            tensor; ``is_plain`` is whether it was no DTensor, unlike its parameter; ``strides`` are
            those of a tensor that was not contiguous.
    """
    full = full.to(form.get("device", like.device))
    if "strides" in form:
        empty = torch.empty_strided(
            full.shape, form["strides"], dtype=full.dtype, device=full.device
        )
        full = empty.copy_(full)
    if isinstance(like, DTensor) and "is_plain" not in form:
        if "sharded_dim" in form:
            return distribute(full, like, form["sharded_dim"])
        if full.shape == like.shape:  # it was saved on one process
            return filled_like(like, full)
    return full


def _values_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a group without the learning rate and what may change freely."""
    return {key: value for key, value in group.items() if key not in UNRECORDED_KEYS}


def _further_entries(optimizer: torch.optim.Optimizer) -> Any:
    """Return descriptions of what a class adds to the ``state_dict`` of an optimizer."""
    entries = optimizer.state_dict()
    return description({key: entries[key] for key in entries.keys() - {"state", "param_groups"}})
