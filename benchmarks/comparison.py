"""How this package is compared with another: in turn, in one run, as a ratio of medians; and where the figures go.

The machine's speed drifts by more than most differences that are looked for. So contenders take turns (A B A B ...), a
round in which something else used the processors is not counted, and what is kept is the ratio.
"""

import contextlib
import json
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from llmtrain import say

RESULTS = Path(__file__).resolve().parent / "results"
_FOREIGN = 0.1  # of the processors' time, that others may use in a round that counts


@dataclass(frozen=True)
class Row:
    """One line of a table. ``target`` is what the ratio, ours to theirs, should be: ``">= 1.15"``, ``"<= 0.85"``, or
    ``"+- 0.2"``, so near to 1."""

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
    """Of one contender: what it returned, and the CPU seconds of this process and those it waited for."""

    value: float
    cpu_seconds: float
    values: list[float]


def in_turn(
    contenders: dict[str, Callable[[], float]], rounds: int = 5, uncounted: int = 1, retries: int = 4
) -> dict[str, Medians]:
    """Call the contenders in turn; each returns the figure that it is compared by. A round in which something else was
    busy is thrown away, up to ``retries`` times."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(uncounted):
        for contender in contenders.values():
            contender()
    counted, discarded = 0, 0
    while counted < rounds:
        with _watching() as foreign:
            measured = {name: _measured(contender) for name, contender in contenders.items()}
        if foreign() > _FOREIGN and discarded < retries:
            discarded += 1
            continue
        counted += 1
        for name, figures in measured.items():
            found[name].append(figures)
    if discarded:
        say("discarded", f"{discarded} rounds in which other processes were busy")
    return {
        name: Medians(
            statistics.median(value for value, _ in tries),
            statistics.median(cpu for _, cpu in tries),
            [value for value, _ in tries],
        )
        for name, tries in found.items()
    }


def _measured(contender: Callable[[], float]) -> tuple[float, float]:
    before = _own_cpu_seconds()
    value = contender()
    return value, _own_cpu_seconds() - before


def _own_cpu_seconds() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@contextlib.contextmanager
def _watching() -> Iterator[Callable[[], float]]:
    """What share of the processors' time others used in the block."""

    def busy() -> float:
        times = psutil.cpu_times()
        return sum(times) - times.idle - getattr(times, "iowait", 0.0)

    began, before = time.monotonic(), busy() - _own_cpu_seconds()
    share = 0.0
    yield lambda: share
    passed = (time.monotonic() - began) * (psutil.cpu_count() or 1)
    share = max(0.0, busy() - _own_cpu_seconds() - before) / passed


def report(name: str, rows: list[Row], folder: Path = RESULTS, **details: object) -> None:
    """Print the rows of a table and write them to ``results/NAME.json``."""
    for row in rows:
        sign = "met" if row.is_met else "missed"
        print(f"{row.work:<56} {row.against:<40}{row.ours:>12,.4g}{row.theirs:>12,.4g} {row.unit:<10}", end="")
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


_PACKAGES = ("llmtrain", "torch", "accelerate", "transformers", "datasets", "trl")


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
