"""What a user brings to a run: an objective, a schedule, a callback or a metric.

The package keeps the same promises for such a part as for its own code. The part's settings are in
the fingerprint of the run, so a changed part makes a new run. Its state is in every checkpoint, so
a resumed run goes on with it. A schedule is stateless; its values are part of the fingerprint.
"""

from __future__ import annotations  # so that annotations do not import torch

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeAlias

from llmtrain.errors import UserError
from llmtrain.files import JsonObject, json_text
from llmtrain.interfaces.batches import Batch

if TYPE_CHECKING:
    import torch


# Sums over a micro-batch by name: a sum, or a sum and its denominator.
MetricSums: TypeAlias = Mapping[str, "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"]
# A metric as a plain function: see `Metric.compute`.
MetricFunction: TypeAlias = Callable[[Any, Batch], MetricSums]
# A schedule as a plain function: see `Schedule.share`.
ScheduleFunction: TypeAlias = Callable[[int, int], float]


class Part:
    """Something that a user brings to a run. By default it has no state.

    Attributes:
        name: its name in messages and checkpoints; if empty, the name of its class. Two parts of a
            run must not have the same name.
        settings: all that the part's effect on the run depends on, as a dictionary of JSON. The
            fingerprint of a run has them as they are when the run is opened. By default these are
            the public fields that are JSON, or dataclasses of it. ``None`` says that the part
            changes nothing that the run computes, as with a callback that only prints: a run with
            another such part is the same run.
    """

    name: str = ""
    settings: Any = "public fields"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on as if it had never stopped.

        A checkpoint can hold tensors, numbers, strings, ``None``, and lists, tuples, sets and
        dictionaries of them, with strings or integers as keys. All ranks must return the same,
        except for the shards of DTensors: a checkpoint has the numbers of rank 0.
        """
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned.

        A tensor is sharded if the tensor that :meth:`state_dict` has returned just before is.
        Other tensors are on the CPU.
        """


def name_of(part: Part) -> str:
    """Return the name of a part in messages and checkpoints."""
    return part.name or type(part).__name__


def settings_of(part: Part) -> JsonObject | None:
    """Return the class and the settings of a part, for the fingerprint of a run.

    Public fields are its attributes without a leading underscore, and those of its class, except
    for the defaults of this package's own classes.

    Raises:
        UserError: if settings that the part gives itself are no dictionary of JSON.
    """
    if part.settings is None:
        return None
    settings = part.settings
    if settings is Part.settings:
        fields: dict[str, Any] = {}
        for owner in reversed(type(part).__mro__):
            if not is_own(owner):
                fields.update(vars(owner))
        fields.update(vars(part))
        public = {name: value for name, value in fields.items() if not name.startswith("_")}
        return {"class": type(part).__name__, **json_entries(public)}

    entries = json_entries(settings)
    if len(entries) < len(settings):
        raise UserError(
            f"the settings of {name_of(part)} are no dictionary of JSON: use numbers, strings, "
            "lists and dictionaries, or None if the part changes nothing."
        )
    return {"class": type(part).__name__, **entries}


def is_own(owner: type) -> bool:
    """Return whether this package defines a class."""
    return owner.__module__.partition(".")[0] == "llmtrain"


def json_entries(values: Mapping[str, Any]) -> JsonObject:
    """Return the values that are JSON or dataclasses of it, by name. Others are left out."""

    def as_json(value: Any) -> Any:
        if isinstance(value, Integral):  # of numpy
            return int(value)
        if isinstance(value, Real):
            return float(value)
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}

    entries: JsonObject = {}
    for name in sorted(values, key=str):
        with contextlib.suppress(TypeError, ValueError):
            entries[name] = json.loads(json_text(values[name], default=as_json))
    return entries


def accepts(function: Callable[..., Any], *arguments: object) -> bool:
    """Return whether a function of the user can be called with these arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a function of C without a signature
        return True
    return True


class Metric(Part):
    """A metric that every evaluation computes, of all eval rows."""

    def compute(self, model: Any, batch: Batch) -> MetricSums:
        """Return sums over an eval micro-batch by name.

        This runs inside ``model.forward``, without gradients. A sum with a denominator becomes
        their ratio, after both were added up over all micro-batches and ranks. So the result does
        not depend on the parallel layout.

        Args:
            model: the unwrapped model, in eval mode, with the methods of :class:`llmtrain.Model`.
            batch: a micro-batch by column, among them ``input_ids`` and ``labels`` [B, T].
        """
        raise NotImplementedError


class FunctionMetric(Metric):
    """A metric that the user has written as a plain function."""

    def __init__(self, function: MetricFunction) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def compute(self, model: Any, batch: Batch) -> MetricSums:
        return self.function(model, batch)


class Schedule(Part):
    """The learning rate over a run. It has no state: it depends on the step alone."""

    def share(self, step: int, max_steps: int) -> float:
        """Return the learning rate of a step as a share of the peak rate, at least 0.

        Args:
            step: steps made before this one, from 0 to ``max_steps - 1``.
            max_steps: steps of the run.
        """
        raise NotImplementedError
