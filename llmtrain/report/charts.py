"""The curves and bars of runs, as plain data, which the page hands to plotly."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from llmtrain.observe.phases import OWN, PHASES, described
from llmtrain.record.history import History
from llmtrain.types import Facts

AXES = {"step": "updates", "tokens": "trained tokens", "hours": "hours of training"}
_POINTS = 2000  # of a curve; a page for a run of weeks must open
_PROCESSES = 32  # whose phases are drawn


class Curve(NamedTuple):
    """One line of a chart."""

    name: str
    run: int  # whose colour it has
    marked: bool  # points that were measured now and then, on a line; else the line alone
    x: dict[str, list[float | None]]  # of each of the axes
    y: list[float]


class Chart(NamedTuple):
    """Curves of several runs in one picture."""

    title: str
    unit: str
    curves: list[Curve]
    logarithmic: bool = False
    wide: bool = False


class Bars(NamedTuple):
    """Seconds of an update in each phase, by process."""

    processes: list[str]
    phases: dict[str, list[float]]  # by the name that a person calls it


Value: TypeAlias = Callable[[Facts], float | None]  # of a reading


def charts(runs: Sequence[History]) -> list[Chart]:
    """Return the charts for which some run has readings."""

    def both(name: str, told: str = "") -> list[Curve]:
        training, held_out = _curves(runs, f"train/{name}", f"{told}training"), f"{told}held out"
        return [*training, *_curves(runs, f"eval/{name}", held_out, marked=True)]

    answers = [
        curve for which in ("chosen", "rejected") for curve in both(f"logps/{which}", f"{which}, ")
    ]
    accuracy = both("rewards/accuracies")
    drawn = [
        Chart("Loss", "" if accuracy else "nats a token", both("loss"), wide=True),
        Chart("Pairs whose chosen answer has the higher reward", "share", accuracy),
        Chart("Margin between the rewards of two answers", "", both("rewards/margins")),
        Chart("Log-probability of an answer", "nats", answers),
        Chart("Distance from the first weights (KL)", "nats an answer", both("kl")),
        Chart("Held-out bits per byte", "bits", _curves(runs, "eval/bits_per_byte", marked=True)),
        Chart(
            "Gradient norm, before clipping", "", _curves(runs, "train/grad_norm"), logarithmic=True
        ),
        Chart("Learning rate", "", _curves(runs, "train/learning_rate")),
        Chart(
            "Tokens a second, all processes", "tokens/s", _curves(runs, "train/tokens_per_second")
        ),
        Chart("Share of the devices' arithmetic", "MFU", _curves(runs, "train/mfu")),
        Chart("Memory of the process that holds most", "GiB", _curves(runs, most_memory)),
    ]
    return [chart for chart in drawn if chart.curves]


def names_of(runs: Sequence[History]) -> list[str]:
    """Return short names that tell runs apart: those of their folders, or their paths where two have the same."""
    names = [run.folder.absolute().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def most_memory(reading: Facts) -> float | None:
    """Return the GiB of the process that holds most."""
    held = reading.get("memory")
    return (
        max((size for sizes in held.values() for size in sizes), default=None)
        if isinstance(held, dict)
        else None
    )


def bars(runs: Sequence[History]) -> Bars | None:
    """Return the median of what was read, of each run's latest number of processes.

    Where there are many, they are those that took longest for themselves.
    """
    names: list[str] = []
    found: list[dict[str, float]] = []
    for name, run in zip(names_of(runs), runs, strict=True):
        readings = [line["phases"] for line in run.readings if isinstance(line.get("phases"), dict)]
        width = len(next(iter(readings[-1].values()), [])) if readings else 0
        readings = [
            phases for phases in readings if {len(phases[phase]) for phase in PHASES} == {width}
        ]
        ranks = [
            {
                phase: statistics.median(reading[phase][rank] for reading in readings)
                for phase in PHASES
            }
            for rank in range(width if readings else 0)
        ]
        slowest = sorted(
            range(len(ranks)), key=lambda rank: -sum(ranks[rank][phase] for phase in OWN)
        )
        shown = sorted(slowest[: max(1, _PROCESSES // len(runs))])
        names += [f"{name}, rank {rank}" if len(runs) > 1 else f"rank {rank}" for rank in shown]
        found += [ranks[rank] for rank in shown]
    return (
        Bars(names, {described(phase): [rank[phase] for rank in found] for phase in PHASES})
        if found
        else None
    )


def _curves(
    runs: Sequence[History], what: str | Value, label: str = "", marked: bool = False
) -> list[Curve]:
    found = []
    for number, (name, run) in enumerate(zip(names_of(runs), runs, strict=True)):
        points = [
            (value, line["step"], line.get("tokens"), hour)
            for line, hour in zip(run.readings, run.hours(), strict=True)
            if (value := what(line) if callable(what) else line.get(what)) is not None
            and math.isfinite(value)
        ]
        if points:
            values, *axes = zip(
                *(points[i] for i in thinned([point[0] for point in points])), strict=True
            )
            x = {axis: list(column) for axis, column in zip(AXES, axes, strict=True)}
            title = ", ".join(filter(None, (name if len(runs) > 1 else "", label)))
            found.append(Curve(title or name, number, marked, x, list(values)))
    return found


def thinned(values: Sequence[float], limit: int = _POINTS) -> Iterable[int]:
    """Return the places of at most ``limit`` values: of each stretch the lowest and the highest.

    No spike is lost.
    """
    if len(values) <= limit:
        return range(len(values))
    stretch = math.ceil(2 * len(values) / limit)
    stretches = (
        range(len(values))[start : start + stretch] for start in range(0, len(values), stretch)
    )
    both = (
        {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
        for places in stretches
    )
    return [place for pair in both for place in sorted(pair)]
