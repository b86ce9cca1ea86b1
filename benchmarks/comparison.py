"""Comparisons with another package: in turn, in one run, as a ratio of medians; and where the figures go.

The machine's speed drifts by more than most differences that are looked for. So contenders take turns (A B A B ...), a
round in which something else used the processors is not counted, and the ratio is kept.
"""

import contextlib
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from llmtrain.console import say

RESULTS = Path(__file__).resolve().parent / "results"
_FOREIGN = 0.1  # of the processors' time, that others may use in a round that counts
_PACKAGES = ("llmtrain", "torch", "accelerate", "transformers", "datasets", "trl")


@dataclass(frozen=True)
class Row:
    """One line of a table.

    ``target`` is for the ratio, ours to theirs: ``">= 1.15"``, ``"<= 0.85"``, or ``"+- 0.2"``, so near to 1.
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
    def is_met(self) -> bool:
        sign, number = self.target.split()
        if sign == "+-":
            return abs(self.ratio - 1) <= float(number)
        return self.ratio >= float(number) if sign == ">=" else self.ratio <= float(number)


@dataclass(frozen=True)
class Medians:
    """Medians of one contender: what it returned, and the CPU seconds of this process and those it waited for."""

    value: float
    cpu_seconds: float
    values: list[float]


def in_turn(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int = 5,
    uncounted: int = 1,
    retries: int = 4,
) -> dict[str, Medians]:
    """Call the contenders in turn; each returns the figure that it is compared by.

    A round in which something else was busy is thrown away, up to ``retries`` times.
    """
    for _ in range(uncounted):
        for contender in contenders.values():
            contender()
    found: list[dict[str, tuple[float, float]]] = []
    discarded = 0
    while len(found) < rounds:
        with _watching() as foreign:
            measured = {name: _measured(contender) for name, contender in contenders.items()}
        if foreign() > _FOREIGN and discarded < retries:
            discarded += 1
        else:
            found.append(measured)
    if discarded:
        say("discarded", f"{discarded} rounds in which other processes were busy")
    medians = {}
    for name in contenders:
        values, cpu = zip(*(measured[name] for measured in found), strict=True)
        medians[name] = Medians(statistics.median(values), statistics.median(cpu), [*values])
    return medians


def forget(folder: Path) -> None:
    """Drop the pages of these files that the system keeps in memory."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(name: str, rows: list[Row], folder: Path = RESULTS, **details: object) -> None:
    """Print the rows of a table and write them to ``results/NAME.json``."""
    for row in rows:
        sign = "met" if row.is_met else "missed"
        print(
            f"{row.work:<56} {row.against:<40}{row.ours:>12,.4g}{row.theirs:>12,.4g} {row.unit:<10}",
            end="",
        )
        print(f"{row.ratio:>8.3f}  {row.target:<8} {sign}", flush=True)
    folder.mkdir(exist_ok=True)
    table = {
        "rows": [asdict(row) | {"ratio": row.ratio} for row in rows],
        "details": details,
        "versions": {package: _version(package) for package in _PACKAGES},
        "cpu": f"{_cpu()}, {psutil.cpu_count()} processors",
        "date": date.today().isoformat(),
    }
    (folder / f"{name}.json").write_text(json.dumps(table, indent=2) + "\n")


def _measured(contender: Callable[[], float]) -> tuple[float, float]:
    """Return the contender's figure, and the CPU seconds that it took."""
    before = _own_cpu_seconds()
    value = contender()
    return value, _own_cpu_seconds() - before


def _own_cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def _watching() -> Iterator[Callable[[], float]]:
    """Yield a function that tells, after the block, the share of the processors' time that others used in it."""

    def busy() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0)

    began, before = time.monotonic(), busy() - _own_cpu_seconds()
    share = 0.0
    yield lambda: share
    passed = (time.monotonic() - began) * (psutil.cpu_count() or 1)
    share = max(0.0, busy() - _own_cpu_seconds() - before) / passed


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
