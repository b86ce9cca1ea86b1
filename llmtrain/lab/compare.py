"""Compare settings by the eval losses of runs with several seeds each."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from llmtrain.lab.identity import have_same_eval_loss
from llmtrain.lab.run_groups import code_of, group_runs, seed_of
from llmtrain.lab.significance import MeanDifference, Sample, paired_test, unpaired_test
from llmtrain.record.history import History

_EVAL_LOSS = "eval/loss"


class Measurement(NamedTuple):
    """A finished run as one measurement of its settings.

    Attributes:
        run: the run.
        seed: its seed.
        final_loss: its last eval loss.
        best_loss: its lowest eval loss.
    """

    run: History
    seed: int
    final_loss: float
    best_loss: float


class MeasuredGroup(NamedTuple):
    """The measurements of one setting, one for each seed.

    Attributes:
        letter: its short name: A for the first group.
        name: the settings that set it apart; empty if there is only one group.
        measurements: its runs.
        final: their final eval losses.
        best: their best eval losses.
        seconds_to_target: seconds of training until their eval loss was as low as the worst final
            eval loss of all runs; ``None`` if the times were not recorded.
    """

    letter: str
    name: str
    measurements: list[Measurement]
    final: Sample
    best: Sample
    seconds_to_target: Sample | None


class GroupDifference(NamedTuple):
    """How a group differs from the first one.

    Attributes:
        first: the first group.
        second: the other group. Differences are its losses minus those of the first.
        paired_seeds: the seeds that both groups have, if a paired test was made; otherwise empty.
        final: the difference of the final eval losses; ``None`` if a group has too few seeds.
        best: the difference of the best eval losses; likewise.
    """

    first: MeasuredGroup
    second: MeasuredGroup
    paired_seeds: list[int]
    final: MeanDifference | None
    best: MeanDifference | None

    @property
    def has_other_best(self) -> bool:
        """Whether the best eval loss of some run is not its final one."""
        measurements = [*self.first.measurements, *self.second.measurements]
        return any(item.best_loss != item.final_loss for item in measurements)


class Remark(NamedTuple):
    """A line about runs that are left out, or that need attention.

    Attributes:
        label: the word in front of the line.
        text: the line.
    """

    label: str
    text: str


class GroupComparison(NamedTuple):
    """The result of comparing settings.

    Attributes:
        groups: the settings that have a finished run, in the order of their first runs.
        differences: each group but the first, compared with the first.
        best_against_next: the group with the lowest mean final eval loss, compared with the group
            that has the next one; ``None`` if there is only one group.
        target_loss: the worst final eval loss of all runs, which all of them reached; ``None`` if
            there is no run.
        remarks: lines about single runs.
    """

    groups: list[MeasuredGroup]
    differences: list[GroupDifference]
    best_against_next: GroupDifference | None
    target_loss: float | None
    remarks: list[Remark]


def compare_groups(runs: Sequence[History]) -> GroupComparison:
    """Group runs by their settings, and compare the eval losses of each group with the first."""
    remarks: list[Remark] = []
    usable = []
    for run in runs:
        fault = _fault(run)
        if fault is None:
            usable.append(run)
        else:
            remarks.append(Remark("left out", f"{run.folder} {fault}"))

    names = []
    measurements = []
    for name, indices in group_runs(usable):
        measured = [_measurement(usable[i]) for i in indices]
        names.append(name)
        measurements.append(_one_for_each_seed(measured, remarks))

    every_measurement = [item for group in measurements for item in group]
    remarks += _code_remarks(every_measurement)
    target = max((item.final_loss for item in every_measurement), default=None)
    groups = []
    for i, (name, measured) in enumerate(zip(names, measurements, strict=True)):
        group = MeasuredGroup(
            letter=_letter(i),
            name=name,
            measurements=measured,
            final=Sample.of([item.final_loss for item in measured]),
            best=Sample.of([item.best_loss for item in measured]),
            seconds_to_target=_seconds_to(target, measured),
        )
        groups.append(group)
    best_against_next = None
    if len(groups) > 1:
        best, following = rank(groups)[:2]
        best_against_next = _difference(following, best)
    return GroupComparison(
        groups=groups,
        differences=[_difference(groups[0], group) for group in groups[1:]],
        best_against_next=best_against_next,
        target_loss=target,
        remarks=remarks,
    )


def rank(groups: Sequence[MeasuredGroup]) -> list[MeasuredGroup]:
    """Return groups by their mean final eval loss, the best one first."""
    return sorted(groups, key=lambda group: group.final.mean)


def _fault(run: History) -> str | None:
    """Return why a run cannot be compared, or ``None`` if it can."""
    if run.state == "running":
        return f"is still running, at step {run.step}"
    if run.state != "finished":
        return f"is not finished: {run.state} at step {run.step}; start its command again"
    if seed_of(run) is None:
        return "has no seed in run.json"

    losses = [entry[_EVAL_LOSS] for entry in run.entries if _EVAL_LOSS in entry]
    if not losses:
        return "has no eval loss; set --eval_steps above 0, and keep eval rows"
    # JSON has no word for NaN and infinity, which are logged as null.
    if not isinstance(losses[-1], int | float) or not math.isfinite(losses[-1]):
        return "ended with an eval loss that is not a number: it has diverged"
    return None


def _measurement(run: History) -> Measurement:
    losses = [loss for loss in run.series(_EVAL_LOSS).values() if math.isfinite(loss)]
    seed = seed_of(run)
    assert seed is not None, "a run without a seed is left out"
    return Measurement(
        run=run,
        seed=seed,
        final_loss=losses[-1],
        best_loss=min(losses),
    )


def _one_for_each_seed(
    measurements: Iterable[Measurement], remarks: list[Remark]
) -> list[Measurement]:
    """Return the first measurement of each seed, and add remarks about the others.

    Args:
        measurements: the measurements of one group.
        remarks: gets a remark for each measurement that is not counted.
    """
    by_seed: dict[int, Measurement] = {}
    for item in measurements:
        first = by_seed.setdefault(item.seed, item)
        if first is item:
            continue

        names = f"{first.run.folder} and {item.run.folder}"
        if have_same_eval_loss(first.run, item.run):
            text = f"{names} are the same run, of seed {item.seed}: it counts as one"
            remarks.append(Remark("same run", text))
        else:
            text = (
                f"{names} have the same settings and seed {item.seed}, but eval losses "
                f"{first.final_loss:.6g} and {item.final_loss:.6g}; only the first counts. To see "
                f"why: llmtrain diff {first.run.folder} {item.run.folder}"
            )
            remarks.append(Remark("differs", text))
    return sorted(by_seed.values(), key=lambda item: item.seed)


def _code_remarks(measurements: Iterable[Measurement]) -> list[Remark]:
    """Return a remark if runs were started with different code, which may be a cause, too."""
    first_by_code: dict[str, Measurement] = {}
    for item in measurements:
        first_by_code.setdefault(code_of(item.run), item)
    if len(first_by_code) < 2:
        return []

    folders = [str(item.run.folder) for item in first_by_code.values()]
    text = f"the runs were started with different code: {' and '.join(folders[:2])}"
    return [Remark("code", text)]


def _letter(index: int) -> str:
    """Return the short name of a group: A to Z, then A1 to Z1, and so on."""
    rounds, place = divmod(index, 26)
    letter = chr(ord("A") + place)
    return f"{letter}{rounds}" if rounds else letter


def _seconds_to(target: float | None, measurements: Sequence[Measurement]) -> Sample | None:
    """Return the seconds of training until each run had evaluated to this loss or a lower one."""
    seconds = []
    for item in measurements:
        hours = _hours_to(target, item.run)
        if hours is not None:
            seconds.append(3600 * hours)
    return Sample.of(seconds) if len(seconds) == len(measurements) else None


def _hours_to(target: float | None, run: History) -> float | None:
    for entry, hours in zip(run.entries, run.training_hours(), strict=True):
        loss = entry.get(_EVAL_LOSS)
        if target is not None and isinstance(loss, int | float) and loss <= target:
            return hours
    return None


def _difference(first: MeasuredGroup, second: MeasuredGroup) -> GroupDifference:
    """Compare two groups: by pairs of runs if all seeds of the smaller group have a partner."""
    first_by_seed = {item.seed: item for item in first.measurements}
    second_by_seed = {item.seed: item for item in second.measurements}
    common_seeds = [seed for seed in first_by_seed if seed in second_by_seed]
    smaller_size = min(len(first_by_seed), len(second_by_seed))

    if smaller_size < 2:
        return GroupDifference(first=first, second=second, paired_seeds=[], final=None, best=None)

    if len(common_seeds) == smaller_size:
        pairs = [(first_by_seed[seed], second_by_seed[seed]) for seed in common_seeds]
        return GroupDifference(
            first=first,
            second=second,
            paired_seeds=common_seeds,
            final=paired_test([b.final_loss - a.final_loss for a, b in pairs]),
            best=paired_test([b.best_loss - a.best_loss for a, b in pairs]),
        )

    a_final = [item.final_loss for item in first.measurements]
    b_final = [item.final_loss for item in second.measurements]
    a_best = [item.best_loss for item in first.measurements]
    b_best = [item.best_loss for item in second.measurements]
    return GroupDifference(
        first=first,
        second=second,
        paired_seeds=[],
        final=unpaired_test(a_final, b_final),
        best=unpaired_test(a_best, b_best),
    )
