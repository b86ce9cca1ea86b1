"""Curves and bars for the report page, as plain data that the page passes to plotly.

Runs that differ only in their seed are drawn as one curve: their mean, with a band from the lowest
to the highest.
"""

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from llmtrain.lab.run_groups import RunGroup, group_runs, seed_of
from llmtrain.phase_names import OWN_PHASES, PHASES, describe_phase
from llmtrain.record.history import History
from llmtrain.types import JsonObject

AXES = {"step": "steps", "tokens": "target tokens", "hours": "hours of training"}

_MAX_POINTS = 2000  # per curve, so that a page still opens after weeks of training
_MAX_PROCESSES = 32  # in the bar chart, over all runs

# Takes a log entry, and returns the value to plot.
_EntryValue: TypeAlias = Callable[[JsonObject], float | None]


class Curve(NamedTuple):
    """One line of a chart.

    Attributes:
        name: in the legend.
        color: the number of the colour.
        has_markers: show each point, for values that are measured only now and then.
        x: the x values for each of :data:`AXES`.
        y: the y values.
        low: the lower edge of the band around the line; empty if it has none.
        high: the upper edge of the band; likewise.
    """

    name: str
    color: int
    has_markers: bool
    x: dict[str, list[float | None]]
    y: list[float]
    low: list[float]
    high: list[float]


class Chart(NamedTuple):
    """One chart with curves from one or several runs."""

    title: str
    unit: str
    curves: list[Curve]
    is_logarithmic: bool = False
    is_wide: bool = False


class Bars(NamedTuple):
    """The seconds that each process spends in each phase of a step.

    Attributes:
        processes: a name for each process.
        phases: maps the displayed name of each phase to its seconds, one number per process.
    """

    processes: list[str]
    phases: dict[str, list[float]]


def charts(runs: Sequence[History]) -> list[Chart]:
    """Return the charts for which at least one run has logged values."""
    groups = drawn_groups(runs)
    accuracy = _train_and_eval_curves(groups, "rewards/accuracies")
    answers = [
        *_train_and_eval_curves(groups, "logps/chosen", prefix="chosen, "),
        *_train_and_eval_curves(groups, "logps/rejected", prefix="rejected, "),
    ]
    # Preference training logs rewards, and its loss is not in nats per token.
    has_rewards = bool(_train_and_eval_curves(groups, "rewards/margins"))
    loss_unit = "" if has_rewards else "nats per token"

    all_charts = [
        Chart(
            title="Loss",
            unit=loss_unit,
            curves=_train_and_eval_curves(groups, "loss"),
            is_wide=True,
        ),
        Chart(
            title="Pairs whose chosen answer has the higher reward",
            unit="share",
            curves=accuracy,
        ),
        Chart(
            title="Margin between the rewards of two answers",
            unit="",
            curves=_train_and_eval_curves(groups, "rewards/margins"),
        ),
        Chart(
            title="Log-probability of an answer",
            unit="nats",
            curves=answers,
        ),
        Chart(
            title="KL divergence from the reference model",
            unit="nats per answer",
            curves=_train_and_eval_curves(groups, "kl"),
        ),
        Chart(
            title="Eval bits per byte",
            unit="bits",
            curves=_curves(groups, "eval/bits_per_byte", has_markers=True),
        ),
        Chart(
            title="Gradient norm before clipping",
            unit="",
            curves=_curves(groups, "train/grad_norm"),
            is_logarithmic=True,
        ),
        Chart(
            title="Learning rate",
            unit="",
            curves=_curves(groups, "train/learning_rate"),
        ),
        Chart(
            title="Throughput of all processes",
            unit="tokens/s",
            curves=_curves(groups, "train/tokens_per_second"),
        ),
        Chart(
            title="Model FLOPs utilisation",
            unit="MFU",
            curves=_curves(groups, "train/mfu"),
        ),
        Chart(
            title="Memory of the process that holds the most",
            unit="GiB",
            curves=_curves(groups, peak_memory),
        ),
    ]
    return [chart for chart in all_charts if chart.curves]


def run_names(runs: Sequence[History]) -> list[str]:
    """Return a short name for each run: its folder's name, or the path if two names are equal."""
    names = [run.folder.absolute().name for run in runs]
    if len(set(names)) < len(names):
        return [str(run.folder) for run in runs]
    return names


class DrawnGroup(NamedTuple):
    """Runs that are drawn as one curve.

    Attributes:
        name: in the legend. It is empty if all runs on the page differ only in their seed.
        runs: the runs.
    """

    name: str
    runs: list[History]


def drawn_groups(runs: Sequence[History]) -> list[DrawnGroup]:
    """Return the curves of a chart: one for each run, or for all runs that differ by their seed."""
    groups = seed_groups(runs)
    grouped = {i for group in groups for i in group.indices}
    drawn = {group.indices[0]: group for group in groups}

    names = run_names(runs)
    result = []
    for i, run in enumerate(runs):
        if i in drawn:
            group = drawn[i]
            members = [runs[j] for j in group.indices]
            result.append(DrawnGroup(name=group.name, runs=members))
        elif i not in grouped:
            result.append(DrawnGroup(name=names[i], runs=[run]))
    return result


def seed_groups(runs: Sequence[History]) -> list[RunGroup]:
    """Return the groups of runs that differ only in their seed, each with two seeds or more."""
    groups = []
    for group in group_runs(runs):
        seeds = {seed_of(runs[i]) for i in group.indices}
        if len(seeds - {None}) > 1:
            groups.append(group)
    return groups


def colors_of(runs: Sequence[History]) -> list[int]:
    """Return the number of each run's colour, which is that of its curve."""
    colors = {}
    for color, group in enumerate(drawn_groups(runs)):
        for run in group.runs:
            colors[run.folder] = color
    return [colors[run.folder] for run in runs]


def peak_memory(entry: JsonObject) -> float | None:
    """Return how many GiB the process with the most memory held, if the log entry has it."""
    memory = entry.get("memory")
    if not isinstance(memory, dict):
        return None
    return max(itertools.chain.from_iterable(memory.values()), default=None)


def phase_bars(runs: Sequence[History]) -> Bars | None:
    """Return the median seconds per phase and process, or ``None`` if no run has logged any.

    If the number of processes has changed during a run, only log entries with the latest number
    count. If there are too many processes for one chart, it shows only the slowest processes of
    each run: those with the most seconds in phases in which they do not wait for other processes.
    """
    names: list[str] = []
    medians: list[dict[str, float]] = []
    for run_name, run in zip(run_names(runs), runs, strict=True):
        medians_by_rank = _median_phases(run)
        limit = max(1, _MAX_PROCESSES // len(runs))
        for rank in _slowest_ranks(medians_by_rank, limit):
            # If the page shows one run, its name would only repeat.
            names.append(f"{run_name}, rank {rank}" if len(runs) > 1 else f"rank {rank}")
            medians.append(medians_by_rank[rank])
    if not medians:
        return None

    phases = {}
    for phase in PHASES:
        phases[describe_phase(phase)] = [seconds[phase] for seconds in medians]
    return Bars(processes=names, phases=phases)


def _median_phases(run: History) -> list[dict[str, float]]:
    """Return the median seconds of each phase by rank, from entries with the latest rank count."""
    entries = [entry["phases"] for entry in run.entries if isinstance(entry.get("phases"), dict)]
    if not entries:
        return []

    # Each phase has a list of seconds, with a number for each rank. Any phase shows their number.
    seconds_of_any_phase: list[float] = next(iter(entries[-1].values()), [])
    ranks = len(seconds_of_any_phase)
    entries = [phases for phases in entries if _has_ranks(phases, ranks)]
    if not entries:
        return []

    medians = []
    for rank in range(ranks):
        medians.append({phase: _median_seconds(entries, phase, rank) for phase in PHASES})
    return medians


def _has_ranks(phases: JsonObject, ranks: int) -> bool:
    """Return whether every phase of a log entry has the seconds of so many ranks."""
    rank_counts = {len(phases[phase]) for phase in PHASES}
    return rank_counts == {ranks}


def _median_seconds(entries: Sequence[JsonObject], phase: str, rank: int) -> float:
    median: float = statistics.median(phases[phase][rank] for phases in entries)
    return median


def _slowest_ranks(medians: Sequence[dict[str, float]], limit: int) -> list[int]:
    """Return the ranks with the most seconds in phases in which they do not wait, in order."""

    def own_seconds(rank: int) -> float:
        return sum(medians[rank][phase] for phase in OWN_PHASES)

    slowest_first = sorted(range(len(medians)), key=own_seconds, reverse=True)
    return sorted(slowest_first[:limit])


class _Point(NamedTuple):
    """A value, or the mean of a group's values, and its position on each of :data:`AXES`."""

    value: float
    low: float
    high: float
    step: int
    tokens: float | None
    hours: float | None


def _train_and_eval_curves(
    groups: Sequence[DrawnGroup], name: str, prefix: str = ""
) -> list[Curve]:
    """Return the curves for a metric that is logged in training and in evaluations."""
    return [
        *_curves(groups, f"train/{name}", label=f"{prefix}train"),
        *_curves(groups, f"eval/{name}", label=f"{prefix}eval", has_markers=True),
    ]


def _curves(
    groups: Sequence[DrawnGroup],
    value: str | _EntryValue,
    label: str = "",
    has_markers: bool = False,
) -> list[Curve]:
    """Return one curve for each group that has logged a value.

    Args:
        groups: all runs on the page, as they are drawn.
        value: a key of the log entries, or a function that computes the value from an entry.
        label: distinguishes these curves from others in the same chart.
        has_markers: show each point.
    """
    curves = []
    for color, group in enumerate(groups):
        points = _mean_points([_points(run, value) for run in group.runs])
        if not points:
            continue

        has_band = len(group.runs) > 1
        # The legend names the group and the label. If the page shows one group, the label is
        # enough. If there is no label, the name of the group stands alone.
        parts = [group.name, label] if len(groups) > 1 else [label]
        name = ", ".join(part for part in parts if part) or group.name
        if has_band:
            name = f"{name}: mean of {len(group.runs)} seeds, min to max".removeprefix(": ")
        shown = [points[i] for i in _shown_indices(points)]
        curve = Curve(
            name=name,
            color=color,
            has_markers=has_markers,
            x={
                "step": [point.step for point in shown],
                "tokens": [point.tokens for point in shown],
                "hours": [point.hours for point in shown],
            },
            y=[point.value for point in shown],
            low=[point.low for point in shown] if has_band else [],
            high=[point.high for point in shown] if has_band else [],
        )
        curves.append(curve)
    return curves


def _points(run: History, value: str | _EntryValue) -> list[_Point]:
    """Return the finite values that a run has logged, in order."""
    points = []
    for entry, hours in zip(run.entries, run.training_hours(), strict=True):
        logged = value(entry) if callable(value) else entry.get(value)
        if logged is not None and math.isfinite(logged):
            point = _Point(
                value=logged,
                low=logged,
                high=logged,
                step=entry["step"],
                tokens=entry.get("tokens"),
                hours=hours,
            )
            points.append(point)
    return points


def _mean_points(points_by_run: Sequence[list[_Point]]) -> list[_Point]:
    """Return the means of several runs, at the steps at which all of them have a value."""
    if len(points_by_run) == 1:
        return points_by_run[0]

    by_step_and_run = [{point.step: point for point in points} for points in points_by_run]
    means = []
    for step in by_step_and_run[0]:
        points = [by_step[step] for by_step in by_step_and_run if step in by_step]
        if len(points) < len(by_step_and_run):
            continue
        values = [point.value for point in points]
        mean = _Point(
            value=statistics.fmean(values),
            low=min(values),
            high=max(values),
            step=step,
            tokens=_mean_of_known([point.tokens for point in points]),
            hours=_mean_of_known([point.hours for point in points]),
        )
        means.append(mean)
    return means


def _mean_of_known(values: Sequence[float | None]) -> float | None:
    """Return the mean of some numbers, or ``None`` if one of them is unknown."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if len(known) == len(values) else None


def _shown_indices(points: Sequence[_Point]) -> list[int]:
    """Choose the points of a curve such that no spike is lost, in the band neither."""
    indices = {
        *downsample([point.low for point in points]),
        *downsample([point.high for point in points]),
    }
    return sorted(indices)


def downsample(values: Sequence[float], limit: int = _MAX_POINTS) -> Iterable[int]:
    """Choose at most ``limit`` values for a curve, such that no spike is lost.

    If there are more values, the lowest and the highest of each stretch are chosen.

    Returns:
        The indices of the values, in ascending order.
    """
    if len(values) <= limit:
        return range(len(values))

    stretch_length = math.ceil(2 * len(values) / limit)
    indices: list[int] = []
    for start in range(0, len(values), stretch_length):
        stretch = range(start, min(start + stretch_length, len(values)))
        extremes = {
            min(stretch, key=values.__getitem__),
            max(stretch, key=values.__getitem__),
        }
        indices += sorted(extremes)
    return indices
