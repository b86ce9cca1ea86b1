"""Figures and verdicts of a call: a JSON line for each when it is known, and a table at the end."""

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Figures = dict[str, object]

_COLUMNS = ("ms", "ms_median", "tokens/s", "mfu", "idle_ms", "host_ms", "launches", "waits", "GiB")


class Journal:
    """Writes figures and verdicts to stdout and to ``figures.jsonl``.

    Args:
        folder: where ``figures.jsonl`` is written.
        seconds: after which no further section begins.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "figures.jsonl"
        self.started = time.monotonic()
        self.seconds = seconds
        self.entries: list[Figures] = []
        self.card = "cpu"

    @property
    def seconds_left(self) -> float:
        """Seconds until no further section begins."""
        return self.seconds - (time.monotonic() - self.started)

    @property
    def has_failed(self) -> bool:
        """Whether a verdict was wrong, or a section ended in an error."""
        return any(entry.get("verdict") == "WRONG" or "error" in entry for entry in self.entries)

    def record(self, section: str, name: str, **figures: object) -> None:
        """Print a line of figures, and keep it for the table."""
        entry: Figures = {"section": section, "name": name, "card": self.card, **figures}
        self.entries.append(entry)

        line = json.dumps(_rounded(entry))
        print(line, flush=True)
        with self.file.open("a") as file:
            file.write(line + "\n")

    def judge(self, name: str, is_right: bool, **figures: object) -> None:
        """Record a verdict, with the figures that it follows from."""
        verdict = "right" if is_right else "WRONG"
        self.record("verdict", name, verdict=verdict, **figures)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time a section. An error ends the section, and is recorded."""
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.record(name, "error", error=f"{type(error).__name__}: {error}"[:500])
        self.record(name, "end", seconds=time.monotonic() - start)

    def table(self) -> str:
        """Return all verdicts, and a table of all variants that were timed."""
        lines = [f"card: {self.card}"]
        for entry in self.entries:
            if "verdict" in entry:
                lines.append(f"{entry['verdict']}  {entry['name']}")
            if "left_out" in entry:
                lines.append(f"left out  {entry['section']}: {entry['left_out']}")
            if "error" in entry:
                lines.append(f"ERROR  {entry['section']}: {entry['error']}")

        timed = [entry for entry in self.entries if "ms" in entry]
        width = max((len(str(entry["name"])) for entry in timed), default=4)
        lines.append("".join([" " * width, *(f"{column:>11}" for column in _COLUMNS)]))
        for entry in timed:
            cells = [_cell(entry.get(column)) for column in _COLUMNS]
            lines.append(f"{entry['name']!s:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
        return "\n".join(lines)


def _cell(value: object) -> str:
    """Return a number with the digits that mean something; empty without a number."""
    if isinstance(value, dict):
        value = sum(value.values())
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _rounded(value: object) -> object:
    """Return a value in which floats have six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
