"""What of runs is drawn: curves and bars as plain data, which the page hands to plotly."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from llmtrain.observe.phases import OWN, PHASES
from llmtrain.record.history import History

AXES = {"step": "updates", "tokens": "trained tokens", "hours": "hours of training"}
_POINTS = 2000  # of a curve; a page for a run of weeks must open
_PROCESSES = 32  # whose phases are drawn


class Curve(NamedTuple):
    name: str
    run: int  # whose colour it has
    marked: bool  # points that were measured now and then, on a line; else the line alone
    x: dict[str, list[float | None]]  # of each of the axes
    y: list[float]


class Chart(NamedTuple):
    title: str
    unit: str
    curves: list[Curve]
    logarithmic: bool = False
    wide: bool = False


class Bars(NamedTuple):
    """Seconds of an update in each phase, by process."""

    processes: list[str]
    phases: dict[str, list[float]]  # by the name that a person calls it


Value = Callable[[dict[str, Any]], float | None]


def charts(runs: Sequence[History]) -> list[Chart]:
    """Those for which some run has readings."""
    names = names_of(runs)
    drawn = [
        Chart(
            "Loss",
            "nats a token",
            [*_curves(runs, names, "train/loss", "training"), *_curves(runs, names, "eval/loss", "held out", True)],
            wide=True,
        ),
        Chart("Held-out bits per byte", "bits", _curves(runs, names, "eval/bits_per_byte", marked=True)),
        Chart("Gradient norm, before clipping", "", _curves(runs, names, "train/grad_norm"), logarithmic=True),
        Chart("Learning rate", "", _curves(runs, names, "train/learning_rate")),
        Chart("Tokens a second, all processes", "tokens/s", _curves(runs, names, "train/tokens_per_second")),
        Chart("Share of the devices' arithmetic", "MFU", _curves(runs, names, "train/mfu")),
        Chart("Memory of the process that holds most", "GiB", _curves(runs, names, most_memory)),
    ]
    return [chart for chart in drawn if chart.curves]


def names_of(runs: Sequence[History]) -> list[str]:
    """Short ones, that tell runs apart: the folders' own names, or their paths where two have the same."""
    names = [run.folder.absolute().name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def most_memory(reading: dict[str, Any]) -> float | None:
    """GiB of the process that holds most."""
    held = reading.get("memory")
    values = [size for sizes in held.values() for size in sizes] if isinstance(held, dict) else []
    return max(values, default=None)


def bars(runs: Sequence[History]) -> Bars | None:
    """The median of what was read, of each run's latest number of processes; where there are many, of those that took
    longest for themselves."""
    several = len(runs) > 1
    found: list[tuple[str, dict[str, float]]] = []
    for name, run in zip(names_of(runs), runs, strict=True):
        readings = [line["phases"] for line in run.readings if isinstance(line.get("phases"), dict)]
        width = len(next(iter(readings[-1].values()), [])) if readings else 0
        readings = [phases for phases in readings if {len(phases.get(phase, ())) for phase in PHASES} == {width}]
        ranks = [
            {phase: statistics.median(reading[phase][rank] for reading in readings) for phase in PHASES}
            for rank in range(width if readings else 0)
        ]
        slowest = sorted(range(len(ranks)), key=lambda rank: -sum(ranks[rank][phase] for phase in OWN))
        for rank in sorted(slowest[: max(1, _PROCESSES // len(runs))]):
            found.append((f"{name}, rank {rank}" if several else f"rank {rank}", ranks[rank]))
    if not found:
        return None
    said = {phase: f"{phase}: {words}" if words != phase else phase for phase, words in PHASES.items()}
    columns = {said[phase]: [seconds[phase] for _, seconds in found] for phase in PHASES}
    return Bars([name for name, _ in found], columns)


def _curves(
    runs: Sequence[History], names: Sequence[str], what: str | Value, label: str = "", marked: bool = False
) -> list[Curve]:
    found = []
    for number, (name, run) in enumerate(zip(names, runs, strict=True)):
        hours = run.hours()
        points = [
            (value, line["step"], line.get("tokens"), hour)
            for line, hour in zip(run.readings, hours, strict=True)
            if (value := what(line) if callable(what) else line.get(what)) is not None and math.isfinite(value)
        ]
        if points:
            values, *axes = zip(*(points[i] for i in thinned([point[0] for point in points])), strict=True)
            x = {axis: list(column) for axis, column in zip(AXES, axes, strict=True)}
            words = ", ".join(part for part in (name if len(runs) > 1 else "", label) if part)
            found.append(Curve(words or name, number, marked, x, list(values)))
    return found


def thinned(values: Sequence[float], limit: int = _POINTS) -> Iterable[int]:
    """Places of at most ``limit`` values: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(values) <= limit:
        return range(len(values))
    stretch = math.ceil(2 * len(values) / limit)
    kept: list[int] = []
    for start in range(0, len(values), stretch):
        places = range(start, min(start + stretch, len(values)))
        kept += sorted({min(places, key=values.__getitem__), max(places, key=values.__getitem__)})
    return kept
