"""A run's folder for those who did not write it, while it is written or long after. Nothing is changed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError
from llmtrain.files import read_object
from llmtrain.record.format import read_versioned, version_fault

if TYPE_CHECKING:
    from llmtrain.types import Facts


class History(NamedTuple):
    """The record that a run left; what could not be read is empty."""

    folder: Path
    record: Facts  # run.json
    status: Facts  # status.json
    readings: list[Facts]  # metrics.jsonl
    incidents: list[Facts]  # incidents.jsonl
    samples: list[Facts]  # samples.jsonl
    scores: list[Facts]  # scores.jsonl, of llmtrain eval
    in_progress: bool  # a process holds its lock

    @classmethod
    def of(cls, folder: Path) -> History:
        """Read a run's folder.

        Raises:
            UserError: the folder holds no run, or another version of llmtrain has written it.
        """
        if not is_run(folder):
            raise UserError(
                f"{folder} is no run's folder: it has neither run.json nor status.json."
            )
        history = cls.found(folder)
        if history.record and version_fault("run.json", history.record):
            raise UserError(
                f"{folder}/run.json was written by an earlier llmtrain, whose format is no longer read."
            )
        return history

    @classmethod
    def found(cls, folder: Path) -> History:
        """Read whatever there is in a folder.

        Raises:
            UserError: a newer llmtrain has written ``run.json``.
        """
        return cls(
            folder=folder,
            record=read_versioned(folder / "run.json"),
            status=read_object(folder / "status.json"),
            readings=read_lines(folder / "metrics.jsonl"),
            incidents=read_lines(folder / "incidents.jsonl"),
            samples=read_lines(folder / "samples.jsonl"),
            scores=read_lines(folder / "scores.jsonl"),
            in_progress=_is_held(folder / ".lock"),
        )

    @property
    def state(self) -> str:
        """The state in ``status.json``; killed where that says running and no process does; unknown without one."""
        said = str(self.status.get("state", "unknown"))
        return (
            "killed"
            if said == "running" and not self.in_progress and not self._is_elsewhere
            else said
        )

    @property
    def step(self) -> int:
        """Updates made, where it is known."""
        known = [self.status.get("step"), *(reading.get("step") for reading in self.readings[-1:])]
        return max((step for step in known if isinstance(step, int)), default=0)

    @property
    def settings(self) -> Facts:
        """Every flag's value."""
        found = self.record.get("settings")
        entries = found.items() if isinstance(found, dict) else ()
        return {name: entry.get("value") for name, entry in entries if isinstance(entry, dict)}

    @property
    def starts(self) -> list[Facts]:
        """Every start of the run, the first one first."""
        found = self.record.get("starts")
        return (
            [start for start in found if isinstance(start, dict)] if isinstance(found, list) else []
        )

    def began(self) -> list[float | None]:
        """Return the time of each start, in seconds since 1970."""
        return [_seconds(start.get("time")) for start in self.starts]

    def series(self, key: str) -> dict[int, float]:
        """Return the values of one key of the readings, by step."""
        return {
            line["step"]: line[key]
            for line in self.readings
            if isinstance(line.get(key), int | float)
        }

    def last(self, key: str) -> float | None:
        """Return the newest value of one key of the readings, where there is one."""
        return next(reversed(self.series(key).values()), None)

    def hours(self) -> list[float | None]:
        """Return the hours that were trained until each reading; ``None`` where the readings have no time.

        Pauses between starts do not count, nor does what was trained and lost.
        """
        begun = sorted(when for when in self.began() if when is not None)
        total, before = 0.0, begun[0] if begun else None
        found: list[float | None] = []
        for reading in self.readings:
            now = reading.get("time")
            if not isinstance(now, int | float) or before is None:
                found.append(None)
                continue
            total += max(0.0, now - max([before, *(when for when in begun if when <= now)]))
            before = now
            found.append(total / 3600)
        return found

    def age(self) -> float:
        """Return the seconds since anything was written here."""
        files = [self.folder / name for name in ("metrics.jsonl", "status.json", "run.json")]
        return max(
            0.0,
            time.time()
            - max((path.stat().st_mtime for path in files if path.exists()), default=0.0),
        )

    def standing(self) -> str:
        """Return how it stands, in one line."""
        if not self.status:
            return "in progress; " * self.in_progress + "no status.json can be read"
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
    """Return whether a folder is a run's."""
    return any((folder / name).is_file() for name in ("run.json", "status.json"))


def runs_in(folder: Path) -> list[Path]:
    """Return the folders below a folder that are runs. A run's own folders are not searched."""
    found = []
    for path, folders, _ in os.walk(folder):
        if is_run(Path(path)):
            found.append(Path(path))
            folders.clear()
        folders[:] = sorted(name for name in folders if not name.startswith("."))
    return found


def read_lines(path: Path) -> list[Facts]:
    """Return the JSON objects with a ``step`` of a file that has one a line. Half a line is left out."""
    found = []
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found.append(json.loads(line))
    return [
        content
        for content in found
        if isinstance(content, dict) and isinstance(content.get("step"), int)
    ]


def _seconds(said: object) -> float | None:
    """Return the seconds since 1970 of a time in the format of ``run.json``."""
    with contextlib.suppress(ValueError):
        return datetime.strptime(str(said), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    return None


def _is_held(lock: Path) -> bool:
    """Return whether a process has locked a file.

    It is not opened to be written, as :class:`filelock.FileLock` would, and the shared lock is given back at once.
    """
    with (
        contextlib.suppress(OSError),
        lock.open("rb") as file,
    ):  # there is none, or a file system without locks
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
