"""Compare the quantities that two runs have logged, within tolerances for rounding errors.

Both ``llmtrain verify`` and ``llmtrain diff`` use this module. Tolerances, and the measure of a
difference, are defined only here.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

from llmtrain.files import Json
from llmtrain.record.history import History, read_lines

Series: TypeAlias = Mapping[int, Json]  # the values of one quantity by step


class Tolerance(NamedTuple):
    """The largest relative differences that rounding errors explain within a few steps.

    Attributes:
        loss: for losses.
        grad_norm: for gradient norms.
        weights: for weights: the L2 norm of their difference, relative to their own norm.
        exact: for everything that is not computed in floating point, such as counts.
    """

    loss: float
    grad_norm: float
    weights: float
    exact: float = 0.0


NO_TOLERANCE = Tolerance(loss=0.0, grad_norm=0.0, weights=0.0)

_HALF_PRECISION = Tolerance(loss=1e-2, grad_norm=5e-2, weights=1e-2)
_TOLERANCES = {
    "float64": Tolerance(loss=1e-12, grad_norm=1e-12, weights=1e-12),
    "float32": Tolerance(loss=1e-5, grad_norm=1e-4, weights=1e-5),
    "bf16": _HALF_PRECISION,
    "fp16": _HALF_PRECISION,
}


# Gradients in bfloat16 round in the sum over micro-batches and ranks. AdamW makes the first updates
# of all weights equally large, also those whose gradients are smaller than that rounding.
_BF16_WEIGHTS = Tolerance(loss=3e-2, grad_norm=5e-2, weights=5e-2)
# A code may be the next one, because the rounding of a gradient carries it over a border.
_EIGHT_BIT_MOMENTS = Tolerance(loss=1e-3, grad_norm=1e-2, weights=1e-3)


def tolerance_of(mixed_precision: str, settings: Mapping[str, Json] | None = None) -> Tolerance:
    """Return the tolerance for runs with this precision.

    Args:
        mixed_precision: Accelerate's name, such as ``no`` or ``bf16``, or ``float64``. An unknown
            name gets the tolerance for half precision.
        settings: the values of the run's flags, such as ``dtype``.
    """
    settings = settings or {}
    precision = "float32" if mixed_precision == "no" else mixed_precision
    tolerances = [_TOLERANCES.get(precision, _HALF_PRECISION)]
    if settings.get("dtype") == "bfloat16":
        tolerances.append(_BF16_WEIGHTS)
    if "8bit" in str(settings.get("optim")):  # part of the name of each optimizer that has them
        tolerances.append(_EIGHT_BIT_MOMENTS)
    return widest(tolerances)


def widest(tolerances: Iterable[Tolerance]) -> Tolerance:
    """Return the tolerance with the largest of all limits."""
    return Tolerance(*(max(limits) for limits in zip(*tolerances, strict=True)))


class Quantity(NamedTuple):
    """Something that runs log at each step, so that two runs can be compared by it.

    Attributes:
        name: for messages.
        key: the key of the log entries that have it.
        rounds_like: the field in :class:`Tolerance` that applies.
        is_initial: whether only its value before the first step counts.
        part: which part of a value with dashes counts; ``None`` for all of it.
        file: the JSON-lines file of the run that has it.
    """

    name: str
    key: str
    rounds_like: Literal["exact", "loss", "grad_norm", "weights"] = "exact"
    is_initial: bool = False
    part: int | None = None
    file: str = "metrics.jsonl"

    def limit(self, tolerance: Tolerance) -> float:
        """Return the largest relative difference that rounding errors explain."""
        limits = tolerance._asdict()
        return float(limits[self.rounds_like])

    def read(self, run: History) -> Series:
        """Return the values of a run by step.

        JSON can only hold finite numbers. Other numbers were logged as null, and are read as NaN.
        """
        entries = run.entries
        if self.file != "metrics.jsonl":
            entries = read_lines(run.folder / self.file)
        values: dict[int, Json] = {}
        for entry in entries:
            if self.key not in entry or (self.is_initial and entry["step"] > 0):
                continue
            value = entry[self.key]
            if value is None:
                value = math.nan
            elif self.part is not None:
                value = value.split("-")[self.part]
            values[entry["step"]] = value
        return values


# Ordered by cause and effect: within a step, each quantity depends on those before it. A batch has
# a hash of its tokens and one of its labels.
QUANTITIES = {
    "initial_weights": Quantity(
        name="norm of the initial weights",
        key="train/weight_norm",
        rounds_like="weights",
        is_initial=True,
    ),
    "rows": Quantity(name="rows", key="rows", file="rows.jsonl"),  # with --log_rows
    "input_tokens": Quantity(name="input tokens", key="batch", part=0),
    "labels": Quantity(name="labels", key="batch", part=1),
    "target_tokens": Quantity(name="number of target tokens", key="tokens"),
    "learning_rate": Quantity(name="learning rate", key="train/learning_rate"),
    "initial_loss": Quantity(
        name="eval loss before the first step",
        key="eval/loss",
        rounds_like="loss",
        is_initial=True,
    ),
    "loss": Quantity(name="loss", key="train/loss", rounds_like="loss"),
    "grad_norm": Quantity(name="gradient norm", key="train/grad_norm", rounds_like="grad_norm"),
    "weight_norm": Quantity(
        name="norm of the weights", key="train/weight_norm", rounds_like="weights"
    ),
    "eval_loss": Quantity(name="eval loss", key="eval/loss", rounds_like="loss"),
    "eval_bits_per_byte": Quantity(
        name="eval bits per byte", key="eval/bits_per_byte", rounds_like="loss"
    ),
}


class StepDifference(NamedTuple):
    """The values of one quantity in two runs, at a step that both have logged.

    Attributes:
        step: the step.
        first: the value in the first run.
        second: the value in the second run.
        relative: the relative difference.
    """

    step: int
    first: Json
    second: Json
    relative: float


def step_differences(quantity: Quantity, first: History, second: History) -> list[StepDifference]:
    """Compare one quantity at each step that both runs have logged, in order."""
    first_series = quantity.read(first)
    second_series = quantity.read(second)
    steps = sorted(first_series.keys() & second_series.keys())
    return [
        StepDifference(
            step=step,
            first=first_series[step],
            second=second_series[step],
            relative=relative_difference(first_series[step], second_series[step]),
        )
        for step in steps
    ]


def relative_difference(first: Json, second: Json) -> float:
    """Return the relative difference of two values.

    If the values are not both finite numbers, it is 0 if they are equal, and infinite otherwise.
    Two NaNs count as equal.
    """
    if first == second:
        return 0.0

    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return math.inf

    if math.isnan(first) and math.isnan(second):
        return 0.0
    if not math.isfinite(first - second):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))
