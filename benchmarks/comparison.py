"""Let contenders take turns, print the table that compares them, and store it in ``results/``.

The speed of a machine drifts by more than most of the differences that these tables look for. So
the contenders take turns in one run (A B A B ...), a round in which other programs were busy is
discarded, and a table compares medians.
"""

import contextlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from llmtrain.console import say

RESULTS = Path(__file__).resolve().parent / "results"

_MAX_FOREIGN_SHARE = 0.1  # of the processors' time, in a round that counts
_PACKAGES = ("llmtrain", "torch", "accelerate", "transformers", "datasets", "trl")

Figures = dict[str, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Turns(Generic[T]):
    """The turns of one contender, without warm-up rounds and discarded rounds.

    Attributes:
        results: the result of each turn: a number, or several numbers by name.
        cpu_seconds: CPU seconds of each turn, of this process and the child processes it waited for.
    """

    results: list[T]
    cpu_seconds: list[float]

    @property
    def median(self: "Turns[float]") -> float:
        """The median, if the contender returns a number."""
        return statistics.median(self.results)

    @property
    def median_cpu_seconds(self) -> float:
        """The median CPU seconds of a turn."""
        return statistics.median(self.cpu_seconds)

    def values_of(self: "Turns[Figures]", name: str) -> list[float]:
        """Return one of the numbers of each turn, if the contender returns several."""
        return [figures[name] for figures in self.results]

    def median_of(self: "Turns[Figures]", name: str) -> float:
        """Return the median of one of the numbers, if the contender returns several."""
        return statistics.median(self.values_of(name))


def take_turns(
    contenders: Mapping[str, Callable[[], T]],
    rounds: int = 5,
    warm_up_rounds: int = 1,
    retries: int = 4,
) -> dict[str, Turns[T]]:
    """Call each contender once per round; return the turns of each by its name.

    Args:
        contenders: functions that measure something and return it.
        rounds: the rounds that count.
        warm_up_rounds: rounds before them.
        retries: how many rounds may be discarded and repeated because other programs were busy.
            Must be 0 if several processes take the turns together, or they would disagree.
    """
    for _ in range(warm_up_rounds):
        for contender in contenders.values():
            contender()

    turns: dict[str, Turns[T]] = {name: Turns([], []) for name in contenders}
    counted_rounds = 0
    discarded_rounds = 0
    while counted_rounds < rounds:
        load = _ForeignLoad()
        results: dict[str, T] = {}
        cpu_seconds: dict[str, float] = {}
        for name, contender in contenders.items():
            cpu_before = _own_cpu_seconds()
            results[name] = contender()
            cpu_seconds[name] = _own_cpu_seconds() - cpu_before

        if load.share() > _MAX_FOREIGN_SHARE and discarded_rounds < retries:
            discarded_rounds += 1
            continue
        counted_rounds += 1
        for name in contenders:
            turns[name].results.append(results[name])
            turns[name].cpu_seconds.append(cpu_seconds[name])

    if discarded_rounds:
        say("discarded", f"{discarded_rounds} rounds in which other processes were busy")
    return turns


@dataclass(frozen=True)
class Row:
    """A line of a table.

    Attributes:
        work: a name for the work that both sides do.
        against: the name of the other side.
        ours: the figure of llmtrain.
        theirs: the figure of the other side.
        unit: the unit of both.
        target: the aim for the ratio, ours to theirs: ``">= 1.15"``, ``"<= 0.85"``, ``"+- 0.2"``
            for at most so far from 1, or an empty string without an aim.
    """

    work: str
    against: str
    ours: float
    theirs: float
    unit: str
    target: str

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def verdict(self) -> str:
        """Whether the aim is met; empty without an aim."""
        if not self.target:
            return ""
        sign, number = self.target.split()
        if sign == ">=":
            is_met = self.ratio >= float(number)
        elif sign == "<=":
            is_met = self.ratio <= float(number)
        else:
            is_met = abs(self.ratio - 1) <= float(number)
        return "met" if is_met else "missed"

    def __str__(self) -> str:
        names = f"{self.work:<56} {self.against:<40}"
        figures = f"{self.ours:>12,.4g}{self.theirs:>12,.4g} {self.unit:<10}"
        return f"{names}{figures}{self.ratio:>8.3f}  {self.target:<8} {self.verdict}".rstrip()


class Table:
    """A table, whose rows are printed as soon as they are known.

    Args:
        name: the table's name, and the name of its file in ``results/``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[Row] = []

    def add(
        self, *, work: str, against: str, ours: float, theirs: float, unit: str, target: str = ""
    ) -> None:
        """Add a row, and print it. ``Row`` describes the arguments."""
        row = Row(work, against, ours=ours, theirs=theirs, unit=unit, target=target)
        self.rows.append(row)
        print(row, flush=True)

    def write(self, **details: object) -> None:
        """Write the rows to ``results/NAME.json``.

        Args:
            **details: further values for the file, such as single runs and settings.
        """
        RESULTS.mkdir(exist_ok=True)
        content = {
            "rows": [asdict(row) | {"ratio": row.ratio} for row in self.rows],
            "details": details,
            "versions": {package: _version(package) for package in _PACKAGES},
            "cpu": f"{_processor_name()}, {psutil.cpu_count()} processors",
            "date": date.today().isoformat(),
        }
        file = RESULTS / f"{self.name}.json"
        file.write_text(json.dumps(content, indent=2) + "\n")


def drop_from_page_cache(folder: Path) -> None:
    """Make the system forget the pages of these files, so that the next read is from disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                # From offset 0; the length 0 stands for the rest of the file.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class _ForeignLoad:
    """How much of the processors' time other programs use, from now on."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._busy_seconds = self._busy_seconds_of_others()

    def share(self) -> float:
        """Return the share of the processors' time that other programs have used until now."""
        busy_seconds = self._busy_seconds_of_others() - self._busy_seconds
        all_seconds = (time.monotonic() - self._start) * (psutil.cpu_count() or 1)
        return max(0.0, busy_seconds) / all_seconds

    @staticmethod
    def _busy_seconds_of_others() -> float:
        times = psutil.cpu_times()
        idle_seconds = times.idle + getattr(times, "iowait", 0.0)
        return sum(times) - idle_seconds - _own_cpu_seconds()


def _own_cpu_seconds() -> float:
    """Return the CPU seconds of this process and the child processes that it has waited for."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
