"""Compare two runs, one logged quantity at a time, and say how far rounding may move each of them.

``llmtrain verify`` and ``llmtrain diff`` both stand on this module: the table of tolerances and the definition of a
difference are here and nowhere else.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from llmtrain.record.history import History, read_lines
from llmtrain.types import Json

if TYPE_CHECKING:
    import torch

Series: TypeAlias = Mapping[int, Json]  # the values of one quantity by step


class Tolerance(NamedTuple):
    """How far rounding may move a quantity within a few steps, relative to its value."""

    loss: float
    grad_norm: float
    weights: float  # the L2 norm of the difference, relative to the L2 norm of the weights
    exact: float = 0.0  # for quantities that are counted, not computed


NO_TOLERANCE = Tolerance(loss=0.0, grad_norm=0.0, weights=0.0)

_HALF_PRECISION = Tolerance(loss=1e-2, grad_norm=5e-2, weights=1e-2)
_TOLERANCES = {
    "float64": Tolerance(loss=1e-12, grad_norm=1e-12, weights=1e-12),
    "float32": Tolerance(loss=1e-5, grad_norm=1e-4, weights=1e-5),
    "bf16": _HALF_PRECISION,
    "fp16": _HALF_PRECISION,
}


def tolerance_of(mixed_precision: str) -> Tolerance:
    """Return the tolerance for a run.

    Args:
        mixed_precision: Accelerate's name, such as ``no`` or ``bf16``, or ``float64``.
    """
    precision = "float32" if mixed_precision == "no" else mixed_precision
    return _TOLERANCES.get(precision, _HALF_PRECISION)


class Quantity(NamedTuple):
    """Something that a run logs at each step and that another run can be compared in."""

    name: str
    read: Callable[[History], Series]
    rounds_like: Literal["exact", "loss", "grad_norm", "weights"] = "exact"

    def limit(self, tolerance: Tolerance) -> float:
        """Return the largest relative difference that rounding explains; 0 if it explains none."""
        limits = tolerance._asdict()
        return float(limits[self.rounds_like])


def _logged(key: str) -> Callable[[History], Series]:
    """Return a reader of one key of ``metrics.jsonl``.

    JSON has no numbers that are not finite. They were written as null, and are read as NaN.
    """

    def read(run: History) -> Series:
        return {
            entry["step"]: math.nan if entry[key] is None else entry[key]
            for entry in run.readings
            if key in entry
        }

    return read


def _logged_at_start(key: str) -> Callable[[History], Series]:
    """Return a reader of one key of ``metrics.jsonl`` before the first step."""
    read_all = _logged(key)

    def read(run: History) -> Series:
        return {step: value for step, value in read_all(run).items() if step == 0}

    return read


def _fingerprint(part: int) -> Callable[[History], Series]:
    """Return a reader of a batch's fingerprint: part 0 is for its tokens, part 1 for its labels."""

    def read(run: History) -> Series:
        return {
            entry["step"]: entry["batch"].split("-")[part]
            for entry in run.readings
            if isinstance(entry.get("batch"), str)
        }

    return read


def _rows(run: History) -> Series:
    return {entry["step"]: entry.get("rows") for entry in read_lines(run.folder / "rows.jsonl")}


# In the order in which they follow from each other within a step.
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
    """The values of one quantity in two runs, at a step that both have logged."""

    step: int
    first: Json
    second: Json
    relative: float


def differences(quantity: Quantity, first: History, second: History) -> list[StepDifference]:
    """Return how far two runs are apart at each step that both have logged, in order."""
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


class Deviation(NamedTuple):
    """The largest relative difference of one quantity, and the first step at which there is any."""

    largest: float  # infinite if one run lacks a step that the other has
    first_step: int | None  # None if there is no difference


def deviation(quantity: Quantity, first: History, second: History) -> Deviation:
    """Compare two runs that must have logged the same steps."""
    in_one_run = quantity.read(first).keys() ^ quantity.read(second).keys()
    different = [
        difference for difference in differences(quantity, first, second) if difference.relative > 0
    ]
    largest = max((difference.relative for difference in different), default=0.0)
    steps = [*in_one_run, *(difference.step for difference in different)]
    return Deviation(
        largest=math.inf if in_one_run else largest,
        first_step=min(steps, default=None),
    )


def relative_difference(first: Json, second: Json) -> float:
    """Return the relative difference of two numbers; infinite for other values that differ."""
    if first == second:
        return 0.0

    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return math.inf

    if math.isnan(first) and math.isnan(second):
        return 0.0
    if not math.isfinite(first - second):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))


def weight_difference(
    first: Mapping[str, "torch.Tensor"], second: Mapping[str, "torch.Tensor"]
) -> float:
    """Return the L2 norm of the difference of two models' weights, relative to the first model's.

    It is infinite if the two do not have the same tensors.
    """
    if first.keys() != second.keys():
        return math.inf

    moved = sum(float((second[name] - weight).square().sum()) for name, weight in first.items())
    total = sum(float(weight.square().sum()) for weight in first.values())
    return float((moved / total) ** 0.5)
