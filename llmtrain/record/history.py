"""A run's folder as those find it who did not write it, while it is written or long after. Nothing is changed."""

import calendar
import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any, NamedTuple

from llmtrain.errors import UserError
from llmtrain.files import read_object


class History(NamedTuple):
    """What a run left; what could not be read is empty."""

    folder: Path
    record: dict[str, Any]  # run.json
    status: dict[str, Any]  # status.json
    readings: list[dict[str, Any]]  # metrics.jsonl
    incidents: list[dict[str, Any]]  # incidents.jsonl
    samples: list[dict[str, Any]]  # samples.jsonl
    in_progress: bool  # a process holds its lock

    @classmethod
    def of(cls, folder: Path) -> "History":
        """Raises :class:`UserError` where there is no run."""
        if not is_run(folder):
            raise UserError(f"{folder} is no run's folder: it has neither run.json nor status.json.")
        return cls.found(folder)

    @classmethod
    def found(cls, folder: Path) -> "History":
        """Of whatever there is."""
        return cls(
            folder,
            read_object(folder / "run.json"),
            read_object(folder / "status.json"),
            read_lines(folder / "metrics.jsonl"),
            read_lines(folder / "incidents.jsonl"),
            read_lines(folder / "samples.jsonl"),
            _is_held(folder / ".lock"),
        )

    @property
    def state(self) -> str:
        """As ``status.json`` has it, or killed where that says running and nobody does; unknown where there is none."""
        said = str(self.status.get("state", "unknown"))
        return "killed" if said == "running" and not self.in_progress and not self._is_elsewhere else said

    @property
    def step(self) -> int:
        """Updates made, as far as is known."""
        known = [self.status.get("step"), *(reading.get("step") for reading in self.readings[-1:])]
        return max((step for step in known if isinstance(step, int)), default=0)

    @property
    def settings(self) -> dict[str, Any]:
        """Every flag's value."""
        found = self.record.get("settings")
        if not isinstance(found, dict):
            return {}
        return {name: entry.get("value") for name, entry in found.items() if isinstance(entry, dict)}

    def origin(self, name: str) -> str:
        """Where a setting came from: the recipe, a file, the command line."""
        return str(self.record["settings"][name].get("from", ""))

    @property
    def starts(self) -> list[dict[str, Any]]:
        found = self.record.get("starts")
        return [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []

    def began(self) -> list[float | None]:
        """Of each start, seconds since 1970."""
        return [_seconds(start.get("time")) for start in self.starts]

    def series(self, key: str) -> dict[int, float]:
        """Step and value of one key of the readings."""
        return {line["step"]: line[key] for line in self.readings if isinstance(line.get(key), int | float)}

    def last(self, key: str) -> float | None:
        return next((line[key] for line in reversed(self.readings) if isinstance(line.get(key), int | float)), None)

    def hours(self) -> list[float | None]:
        """Of each reading, the hours that were trained until then: without the pauses between starts, and without what
        was trained and lost. ``None`` where the readings have no time."""
        begun = sorted(when for when in self.began() if when is not None)
        total, before = 0.0, begun[0] if begun else None
        found: list[float | None] = []
        for reading in self.readings:
            now = reading.get("time")
            if not isinstance(now, int | float) or before is None:
                found.append(None)
                continue
            since = max([before, *(when for when in begun if when <= now)])
            total += max(0.0, now - since)
            before = now
            found.append(total / 3600)
        return found

    def age(self) -> float:
        """Seconds since anything was written here."""
        newest = 0.0
        for name in ("metrics.jsonl", "status.json", "run.json"):
            with contextlib.suppress(OSError):
                newest = max(newest, (self.folder / name).stat().st_mtime)
        return max(0.0, time.time() - newest)

    def standing(self) -> str:
        """How it stands, in one line."""
        if not self.status:
            unread = "no status.json can be read"
            return f"in progress; {unread}" if self.in_progress else unread
        said = f"{self.status.get('state')} at step {self.status.get('step')}, {self.status.get('time')}"
        if self.status.get("reason"):
            said += f": {self.status['reason']}"
        if self.in_progress:
            said += "; in progress, a process holds its lock"
        elif self.status.get("state") == "running":
            elsewhere = f", or it runs on {self.status.get('host')}" if self._is_elsewhere else ""
            said += f"; no process holds its lock: it was killed{elsewhere}"
        return said

    @property
    def _is_elsewhere(self) -> bool:
        return self.status.get("host") not in (None, platform.node())


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("run.json", "status.json"))


def runs_in(folder: Path) -> list[Path]:
    """Of a folder's folders, and theirs: those that are runs. What lies inside of one is not looked at."""
    found = []
    for path, folders, _ in os.walk(folder):
        if is_run(Path(path)):
            found.append(Path(path))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file that has one a line; without those that a crash has cut off."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                content = json.loads(line)
                if isinstance(content, dict) and isinstance(content.get("step"), int):
                    found.append(content)
    return found


def _seconds(said: Any) -> float | None:
    """Since 1970, of a time as a start has it."""
    with contextlib.suppress(TypeError, ValueError):
        parsed = time.strptime(said, "%Y-%m-%dT%H:%M:%S%z")
        return calendar.timegm(parsed) - (parsed.tm_gmtoff or 0)
    return None


def _is_held(lock: Path) -> bool:
    """Whether a process has locked it. It is not opened to be written, as :class:`filelock.FileLock` would, and the
    shared lock that tells is given back at once."""
    import fcntl

    try:
        handle = os.open(lock, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(handle)
    return False
