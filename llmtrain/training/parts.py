"""All that a user brings to a run, besides the model: checked, named, and in the fingerprint."""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from llmtrain.console import note, pluralize
from llmtrain.errors import UserError, short_repr
from llmtrain.files import JsonObject
from llmtrain.interfaces.callback import Callback
from llmtrain.interfaces.objective import Objective
from llmtrain.interfaces.part import (
    FunctionMetric,
    Metric,
    MetricFunction,
    Part,
    accepts,
    json_entries,
    name_of,
    settings_of,
)
from llmtrain.observe.replicas import checksum
from llmtrain.parallel.shards import local_shard

# Names of parts are folders of a checkpoint.
_NAME = re.compile(r"\w[\w.+-]*")

# Keys of a group that are recorded elsewhere, or choose between implementations of one arithmetic.
# A newer torch may have more of the latter. The dtype of Muon follows from the mixed precision.
UNRECORDED_KEYS = {
    "params",
    "lr",
    "capturable",
    "decoupled_weight_decay",
    "differentiable",
    "dtype",
    "foreach",
    "fused",
}


@dataclass(frozen=True)
class Parts:
    """All that a user brings to a run, besides the model and its learning rates.

    Attributes:
        objective: the loss that is minimised.
        optimizer: the optimizer, before ``accelerator.prepare``.
        callbacks: the user's callbacks.
        metrics: the metrics of evaluations.
    """

    objective: Objective
    optimizer: torch.optim.Optimizer
    callbacks: tuple[Callback, ...] = ()
    metrics: tuple[Metric, ...] = ()

    @classmethod
    def of(
        cls,
        model: nn.Module,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        callbacks: Sequence[Callback] = (),
        metrics: Sequence[Metric | MetricFunction] = (),
    ) -> "Parts":
        """Check what a user brings.

        Raises:
            UserError: if a part has the wrong type or a name that another part has, or if the
                optimizer trains parameters of another model.
        """
        _check_optimizer(model, optimizer)
        for name, given in {"callbacks": callbacks, "metrics": metrics}.items():
            if not isinstance(given, Sequence):
                raise UserError(f"{name}: {short_repr(given)} is not a list; write {name}=[...].")
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks: {short_repr(callback)} is no llmtrain.Callback; make it a "
                    "subclass, and pass an instance."
                )
        parts = cls(
            objective=objective,
            optimizer=optimizer,
            callbacks=tuple(callbacks),
            metrics=tuple(_as_metric(metric) for metric in metrics),
        )
        parts.by_name()  # this checks the names
        return parts

    def by_name(self) -> dict[str, Part]:
        """Return all whose state a checkpoint holds, by name.

        Raises:
            UserError: if a name is used twice, or cannot be the name of a folder.
        """
        named: dict[str, Part] = {}
        for part in (self.objective, *self.callbacks, *self.metrics):
            name = name_of(part)
            if not _NAME.fullmatch(name):
                raise UserError(
                    f"'{name}' cannot be the name of a {type(part).__name__}: use letters, digits, "
                    "dots and dashes."
                )
            if name in named:
                raise UserError(
                    f"two parts of this run are called {name}; give one of them another `name`."
                )
            named[name] = part
        return named

    def fingerprint(self) -> JsonObject:
        """Return the parts that determine the steps of a run, for its fingerprint."""
        return {
            "objective": settings_of(self.objective),
            "callbacks": _settings_by_name(self.callbacks),
            "metrics": _settings_by_name(self.metrics),
        }

    def optimizer_fingerprint(self) -> JsonObject:
        """Return the class of the optimizer and the settings of its groups, except for the rates.

        Settings that are off are left out: a newer version of an optimizer may have more of them.
        So are those that are neither JSON nor tensors.
        """
        groups = []
        for group in self.optimizer.param_groups:
            values = {
                key: value
                for key, value in group.items()
                if key not in UNRECORDED_KEYS and value is not None and value is not False
            }
            groups.append({**group_settings(values), "parameters": len(group["params"])})
        return {"class": type(self.optimizer).__name__, "groups": groups}


def group_settings(values: Mapping[str, Any]) -> JsonObject:
    """Return those values of a parameter group that are JSON, and descriptions of its tensors."""
    tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
    return {**json_entries(values), **description(tensors)}


def description(value: object) -> Any:
    """Describe a value, with all digits of its tensors, to see whether it changes."""
    if isinstance(value, torch.Tensor):
        bits = int(checksum(local_shard(value.detach())))
        return f"{value.dtype} {[*value.shape]} {bits:x}"
    if isinstance(value, Mapping):
        return {key: description(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [description(item) for item in value]
    return repr(value)


def _settings_by_name(parts: Sequence[Part]) -> JsonObject:
    """Return the settings of parts by name, without those that change nothing."""
    settings = {name_of(part): settings_of(part) for part in parts}
    return {name: value for name, value in settings.items() if value is not None}


def _as_metric(metric: Metric | MetricFunction) -> Metric:
    """Return a metric, given a metric or a plain function."""
    if isinstance(metric, Metric):
        return metric
    if isinstance(metric, type) or not callable(metric):
        raise UserError(
            f"metrics: {short_repr(metric)} is neither a function of a model and a batch nor an "
            "instance of llmtrain.Metric."
        )
    if not accepts(metric, None, None):
        raise UserError(
            f"metrics: {short_repr(metric)} must take two arguments: the model and a batch."
        )
    return FunctionMetric(metric)


def _check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Check that an optimizer trains the parameters of a model, and note which it leaves out.

    Raises:
        UserError: if it is none, or has other parameters.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: {short_repr(optimizer)} is not a torch optimizer; make one of the "
            "model's parameters, and pass a schedule as schedule=."
        )

    class_name = type(optimizer).__name__
    names = {parameter: name for name, parameter in model.named_parameters()}
    in_groups: set[nn.Parameter] = set()
    for group in optimizer.param_groups:
        in_groups.update(group["params"])

    foreign = sum(parameter not in names for parameter in in_groups)
    if foreign:
        raise UserError(
            f"{foreign} of the {pluralize(len(in_groups), 'parameter')} of the optimizer "
            f"{class_name} are not those of the model; make the optimizer after llmtrain.place, "
            "with the parameters of its model."
        )

    left_out = [name for p, name in names.items() if p.requires_grad and p not in in_groups]
    if left_out:
        note(
            f"the optimizer {class_name} leaves {pluralize(len(left_out), 'parameter')} as they "
            f"are, such as {left_out[0]}"
        )
