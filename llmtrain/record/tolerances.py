"""Compare the quantities that two runs have logged, within tolerances for rounding errors.

Both ``llmtrain verify`` and ``llmtrain diff`` use this module. Tolerances, and the measure of a
difference, are defined only here.
"""

import math
from collections.abc import Callable, Iterable, Mapping
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
        read: returns a run's values by step.
        rounds_like: the field in :class:`Tolerance` that applies.
    """

    name: str
    read: Callable[[History], Series]
    rounds_like: Literal["exact", "loss", "grad_norm", "weights"] = "exact"

    def limit(self, tolerance: Tolerance) -> float:
        """Return the largest relative difference that rounding errors explain."""
        limits = tolerance._asdict()
        return float(limits[self.rounds_like])


def _logged(key: str) -> Callable[[History], Series]:
    """Return a function that reads one key from a run's log entries.

    JSON can only hold finite numbers. Other numbers were logged as null, and are read as NaN.
    """

    def read(run: History) -> Series:
        values: dict[int, Json] = {}
        for entry in run.entries:
            if key in entry:
                values[entry["step"]] = math.nan if entry[key] is None else entry[key]
        return values

    return read


def _logged_at_start(key: str) -> Callable[[History], Series]:
    """Return a function that reads one key from the log entries before the first step."""
    read_all = _logged(key)

    def read(run: History) -> Series:
        return {step: value for step, value in read_all(run).items() if step == 0}

    return read


def _fingerprint(part: int) -> Callable[[History], Series]:
    """Return a function that reads one part of each batch's fingerprint.

    Args:
        part: 0 for the hash of the tokens, 1 for the hash of the labels.
    """

    def read(run: History) -> Series:
        return {
            entry["step"]: entry["batch"].split("-")[part]
            for entry in run.entries
            if isinstance(entry.get("batch"), str)
        }

    return read


def _rows(run: History) -> Series:
    """Return the rows in each step's global batch, if the run has logged them (``--log_rows``)."""
    return {entry["step"]: entry.get("rows") for entry in read_lines(run.folder / "rows.jsonl")}


# Ordered by cause and effect: within a step, each quantity depends on those before it.
QUANTITIES = {
    "initial_weights": Quantity(
        name="norm of the initial weights",
        read=_logged_at_start("train/weight_norm"),
        rounds_like="weights",
    ),
    "rows": Quantity(name="rows", read=_rows),
    "input_tokens": Quantity(name="input tokens", read=_fingerprint(0)),
    "labels": Quantity(name="labels", read=_fingerprint(1)),
    "target_tokens": Quantity(name="number of target tokens", read=_logged("tokens")),
    "learning_rate": Quantity(name="learning rate", read=_logged("train/learning_rate")),
    "initial_loss": Quantity(
        name="eval loss before the first step",
        read=_logged_at_start("eval/loss"),
        rounds_like="loss",
    ),
    "loss": Quantity(name="loss", read=_logged("train/loss"), rounds_like="loss"),
    "grad_norm": Quantity(
        name="gradient norm", read=_logged("train/grad_norm"), rounds_like="grad_norm"
    ),
    "weight_norm": Quantity(
        name="norm of the weights", read=_logged("train/weight_norm"), rounds_like="weights"
    ),
    "eval_loss": Quantity(name="eval loss", read=_logged("eval/loss"), rounds_like="loss"),
    "eval_bits_per_byte": Quantity(
        name="eval bits per byte", read=_logged("eval/bits_per_byte"), rounds_like="loss"
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
