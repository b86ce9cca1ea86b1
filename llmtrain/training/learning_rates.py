"""The learning rate of each parameter group, as a function of the step.

A group's rate is its peak times a schedule, so groups keep their proportions.
"""

import math
from numbers import Real
from typing import Any

import torch

from llmtrain.errors import UserError, short_repr
from llmtrain.files import JsonObject, digest
from llmtrain.interfaces.part import Schedule, ScheduleFunction, accepts, name_of
from llmtrain.training.settings import OptimConfig

# Decimals of a share, and digits of a peak, that make another run. The mathematical libraries of
# two machines differ only in the last of 16 digits.
_DIGITS = 8


def rate_at(step: int, config: OptimConfig, *, peak: float, floor: float = 0.0) -> float:
    """Return a group's learning rate in the next step after ``step`` completed steps.

    Args:
        step: completed steps.
        config: has the schedule of ``--lr_scheduler_type``, and the steps of the run and the
            warmup.
        peak: the rate after the warmup.
        floor: the rate after the last step, for all schedules but ``constant``.
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps

    remaining = max(config.max_steps - step, 0)  # including the next step
    steps_after_warmup = max(config.max_steps - config.warmup_steps, 1)
    height = peak - floor
    match config.lr_scheduler_type:
        case "constant":
            return peak
        case "linear":
            return floor + height * remaining / steps_after_warmup
        case "cosine" | "cosine_with_min_lr":
            return floor + height * 0.5 * (1 - math.cos(math.pi * remaining / steps_after_warmup))
        case "warmup_stable_decay":
            decay_steps = max(min(config.decay_share * config.max_steps, steps_after_warmup), 1)
            return floor + height * min(1.0, remaining / decay_steps)


class LearningRates:
    """Sets the learning rates of an optimizer's parameter groups before each step.

    The peak of a group is the rate that the user gave to it. This object reads it when it is made,
    so make it before a checkpoint is restored. If the user set ``--learning_rate``, all peaks are
    multiplied so that the largest is that rate.

    Args:
        optimizer: the optimizer, of which nothing but the rates is changed.
        config: the flags of the optimizer.
        schedule: replaces the warmup and ``--lr_scheduler_type``. It is called here for every step
            of the run.

    Raises:
        UserError: if a group has no learning rate, if ``--min_lr`` is above the largest peak, or if
            the schedule returns anything but finite numbers of at least 0.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        config: OptimConfig,
        schedule: Schedule | ScheduleFunction | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._config = config

        self.names: list[str] = []
        self.peaks: list[float] = []
        for index, group in enumerate(optimizer.param_groups):
            name = str(group.get("name", index))
            self.names.append(str(index) if name in self.names else name)
            self.peaks.append(_rate_of(group, name))
        if config.is_set("learning_rate"):
            largest = max(self.peaks)
            shares = [peak / largest if largest > 0 else 1.0 for peak in self.peaks]
            self.peaks = [config.learning_rate * share for share in shares]

        self._schedule = schedule
        self._shares = None if schedule is None else _shares(schedule, config.max_steps)
        largest = max(self.peaks)
        if schedule is None and config.min_lr > largest:
            raise UserError(
                f"--min_lr {config.min_lr:g} is above the peak learning rate, {largest:g}; lower "
                "it."
            )
        # --min_lr is the end of the largest peak; the others keep their proportions.
        shares = [peak / largest if largest > 0 else 0.0 for peak in self.peaks]
        self._floors = [config.min_lr * share for share in shares]
        self._current = self.after(0)

    def after(self, step: int) -> list[float]:
        """Return each group's rate in the next step after ``step`` completed steps."""
        if self._shares is not None:
            return [peak * self._shares[step] for peak in self.peaks]
        return [
            rate_at(step, self._config, peak=peak, floor=floor)
            for peak, floor in zip(self.peaks, self._floors, strict=True)
        ]

    def set(self, step: int) -> None:
        """Give each group its rate for the next step after ``step`` completed steps.

        A rate that is a tensor is filled in place, because compiled and captured optimizers read
        that very tensor.
        """
        self._current = self.after(step)
        self._fill(self._current)

    def _fill(self, rates: list[float]) -> None:
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def restore_peaks(self) -> None:
        """Give each group its peak again, for another run with the same optimizer."""
        self._fill(self.peaks)

    def logged(self) -> dict[str, float]:
        """Return the rates that were set last, by the names of a log entry.

        ``train/learning_rate`` is the first group's. Groups with another peak follow, by their key
        ``name``, or by their index if they have none or the name of an earlier group.
        """
        rates = {"train/learning_rate": self._current[0]}
        for name, peak, rate in zip(self.names, self.peaks, self._current, strict=True):
            if peak != self.peaks[0]:
                rates[f"train/learning_rate/{name}"] = rate
        return rates

    @property
    def fingerprint(self) -> JsonObject:
        """The peaks and the user's schedule, for the fingerprint of a run.

        Peaks are left out if all of them are ``--learning_rate``, which the fingerprint has anyway.
        A schedule is known by its name and its values, however it computes them.
        """
        peaks = None
        if set(self.peaks) != {self._config.learning_rate}:
            peaks = [float(f"{peak:.{_DIGITS}g}") for peak in self.peaks]
        schedule = None
        if self._schedule is not None and self._shares is not None:
            values = digest({"shares": [round(share, _DIGITS) for share in self._shares]})
            schedule = f"{_name(self._schedule)} {values[:16]}"
        return {"group_learning_rates": peaks, "schedule": schedule}


def _rate_of(group: dict[str, Any], name: str) -> float:
    """Return the learning rate that the user gave to a parameter group."""
    rate: Any = group.get("lr")
    if isinstance(rate, torch.Tensor):
        rate = rate.item()
    if not _is_valid(rate):
        raise UserError(
            f"parameter group {name} of the optimizer has the learning rate {rate}; give it a "
            "finite number of at least 0."
        )
    return float(rate)


def _is_valid(value: object) -> bool:
    """Return whether a value is a finite number of at least 0."""
    return isinstance(value, Real) and 0 <= float(value) < math.inf  # False for NaN


def _name(schedule: Schedule | ScheduleFunction) -> str:
    """Return the name of a user's schedule, for messages and the fingerprint."""
    if isinstance(schedule, Schedule):
        return name_of(schedule)
    return getattr(schedule, "__name__", type(schedule).__name__)


def _shares(schedule: Schedule | ScheduleFunction, max_steps: int) -> list[float]:
    """Return what a user's schedule returns for each step of the run.

    Raises:
        UserError: if it is no schedule, or returns anything but finite numbers of at least 0.
    """
    function: Any = schedule.share if isinstance(schedule, Schedule) else schedule
    is_function = callable(function) and not isinstance(function, type)
    if not is_function or not accepts(function, 0, max_steps):
        raise UserError(
            f"schedule: {short_repr(schedule)} is neither an instance of llmtrain.Schedule nor a "
            "function of two arguments: the number of completed steps, and the number of steps of "
            "the run."
        )

    shares: list[float] = []
    for step in range(max_steps):
        share = function(step, max_steps)
        if not _is_valid(share):
            raise UserError(
                f"the schedule {_name(schedule)} returned {share!r} for step {step} of "
                f"{max_steps}; return a finite number of at least 0."
            )
        shares.append(float(share))
    return shares
