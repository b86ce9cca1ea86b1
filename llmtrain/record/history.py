"""Reads a run folder, while the run writes it or long after. It changes nothing."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import platform
import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.errors import UserError
from llmtrain.files import json_lines, names_in, read_object
from llmtrain.record.run_record import read_versioned, start_times
from llmtrain.storage import Storage, is_address

if TYPE_CHECKING:
    from llmtrain.files import JsonObject


class History(NamedTuple):
    """The record of a run. Files that could not be read are empty."""

    folder: Path
    record: JsonObject  # run.json
    status: JsonObject  # status.json
    entries: list[JsonObject]  # metrics.jsonl, an item for each log entry
    events: list[JsonObject]  # events.jsonl, an item for each event
    samples: list[JsonObject]  # samples.jsonl
    is_in_progress: bool | None  # whether a process holds the run's lock; None: not known
    address: str = ""  # which the files were copied from; the copy is gone

    @classmethod
    def at(cls, name: str) -> History:
        """Read the run in a folder, or at an address.

        Raises:
            UserError: as :meth:`of_run` does, or if the storage does not answer.
        """
        if not is_address(name):
            return cls.of_run(Path(name))
        files = ("run.json", "status.json", "metrics.jsonl", "events.jsonl", "samples.jsonl")
        with tempfile.TemporaryDirectory(prefix="llmtrain-run-") as copy:
            Storage(name).download_all(files, Path(copy))
            try:
                history = cls.of_run(Path(copy))
            except UserError as error:
                raise UserError(str(error).replace(copy, name)) from None
        return history._replace(address=name, is_in_progress=None)

    @classmethod
    def of_run(cls, folder: Path) -> History:
        """Read a run folder.

        Raises:
            UserError: if the folder holds no run, or another version of llmtrain has written it.
        """
        if not is_run(folder):
            raise UserError(
                f"{folder} is not a run folder: it has neither run.json nor status.json."
            )
        return cls.read(folder)

    @classmethod
    def read(cls, folder: Path) -> History:
        """Read whatever is in a folder, which need not be a complete run.

        Raises:
            UserError: if another version of llmtrain has written ``run.json``.
        """
        return cls(
            folder=folder,
            record=read_versioned(folder / "run.json"),
            status=read_object(folder / "status.json"),
            entries=read_lines(folder / "metrics.jsonl"),
            events=read_lines(folder / "events.jsonl"),
            samples=read_lines(folder / "samples.jsonl"),
            is_in_progress=_is_locked(folder / ".lock"),
        )

    @property
    def state(self) -> str:
        """The state of the run: the one in ``status.json``, ``killed`` or ``unknown``.

        A run is killed if its state is ``running``, but no process runs. It is unknown without a
        state in ``status.json``.
        """
        state = str(self.status.get("state", "unknown"))
        if state == "running" and self.is_in_progress is False and not self._is_elsewhere:
            return "killed"
        return state

    @property
    def step(self) -> int:
        """The steps made so far; 0 if the record does not have them."""
        candidates = [self.status.get("step")]
        if self.entries:
            candidates.append(self.entries[-1].get("step"))
        return max((step for step in candidates if isinstance(step, int)), default=0)

    @property
    def time(self) -> float:
        """When the run last recorded anything, in seconds since 1970; 0 if that is not known."""
        times = [seconds_of(entry.get("time")) for entry in (self.status, *self.starts)]
        times.append(self.latest("time"))
        return max((time for time in times if time is not None), default=0.0)

    @property
    def settings(self) -> JsonObject:
        """The value of every flag."""
        flags: dict[str, JsonObject] = self.record.get("settings", {})
        return {name: setting.get("value") for name, setting in flags.items()}

    def affects(self, name: str) -> str:
        """Return what a flag affects: ``data``, ``numbers`` or ``nothing``."""
        affects: str = self.record["settings"][name]["affects"]
        return affects

    @property
    def starts(self) -> list[JsonObject]:
        """The starts of the run, in their order."""
        starts: list[JsonObject] = self.record.get("starts", [])
        return starts

    @property
    def extends(self) -> JsonObject:
        """The run that this one extends, as in ``run.json``; empty if it extends none.

        The keys are ``run``, its folder; ``run_id``; ``step``, the last step that was taken over;
        and ``start_times``, the times of all starts that made those steps.
        """
        return self.record.get("extends") or {}

    def series(self, key: str) -> dict[int, float]:
        """Return a metric by step."""
        return {
            entry["step"]: entry[key]
            for entry in self.entries
            if isinstance(entry.get(key), int | float)
        }

    def last(self, key: str) -> tuple[int, float] | None:
        """Return the newest step of a metric and its value, or ``None`` if there is none.

        A value that was not finite, which is null in the file, is NaN.
        """
        for entry in reversed(self.entries):
            if key in entry:
                value = entry[key]
                return entry["step"], value if isinstance(value, int | float) else math.nan
        return None

    def latest(self, key: str) -> float | None:
        """Return the newest value of a metric; see :meth:`last`."""
        last = self.last(key)
        return None if last is None else last[1]

    def training_hours(self) -> list[float | None]:
        """Return the hours of training until each log entry.

        Pauses between two starts do not count. Neither do steps that were lost in a crash. The
        hours of a run that this one extends count.

        Returns:
            A number for each log entry; ``None`` if the entry or the starts have no time.
        """
        times = [seconds_of(time) for time in start_times(self.record)]
        known_times = [time for time in times if time is not None]
        hours: list[float | None] = []
        seconds = 0.0
        last_time = -math.inf
        for entry in self.entries:
            now = entry.get("time")
            if not known_times or not isinstance(now, int | float):
                hours.append(None)
                continue
            # Count from the last log entry, or from the newest start if that was later.
            begin = max([time for time in known_times if time <= now], default=now)
            seconds += max(0.0, now - max(begin, last_time))
            last_time = now
            hours.append(seconds / 3600)
        return hours

    def summary(self) -> str:
        """Describe the state of the run in one line."""
        if not self.status:
            prefix = "in progress; " if self.is_in_progress else ""
            return f"{prefix}no status.json can be read"

        state = self.status.get("state")
        line = f"{state} at step {self.status.get('step')}, {self.status.get('time')}"
        if self.status.get("reason"):
            line += f": {self.status['reason']}"

        if self.is_in_progress:
            line += "; in progress, a process holds its lock"
        elif state == "running" and self.is_in_progress is None:
            line += "; whether a process still runs it is not known: its lock cannot be read"
        elif state == "running":
            line += "; no process holds its lock: it was killed"
            if self._is_elsewhere:
                line += f", or it runs on {self.status.get('host')}"
        return line

    @property
    def _is_elsewhere(self) -> bool:
        """Whether the run was last started on another machine, whose locks may be invisible."""
        return self.status.get("host") not in (None, platform.node())


def is_run(folder: Path) -> bool:
    """Return whether a folder is a run's."""
    return any((folder / name).is_file() for name in ("run.json", "status.json"))


def runs_in(folder: Path) -> list[Path]:
    """Return the runs in a folder and its subfolders. Folders inside a run are not searched."""
    runs = []
    for name, subfolders, _ in os.walk(folder):
        path = Path(name)
        if is_run(path):
            runs.append(path)
            subfolders.clear()
        # os.walk goes on with the names that are left in this list, in its order.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
    return runs


def candidate_folders(output_dir: str) -> Iterator[Path]:
    """Yield the folders that a run may use: ``output_dir``, then with -2, -3, ... at its end."""
    base = Path(output_dir)
    if not base.name or base.name == "..":
        base = base.resolve()
    if not base.name:
        raise UserError(f"--output_dir {output_dir} cannot be a run folder; use one inside it.")

    yield base
    for number in itertools.count(2):
        yield base.with_name(f"{base.name}-{number}")


def is_free(folder: Path) -> bool:
    """Return whether a folder is absent or holds only leftovers.

    Raises:
        UserError: if ``folder`` is a file.
    """
    names = names_in(folder) or []
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--output_dir {folder} is a file; use the name of a folder.")
    return all(name.startswith((".lock", ".tmp-")) for name in names)


def read_lines(path: Path) -> list[JsonObject]:
    """Return what :func:`llmtrain.files.json_lines` does; nothing if the file cannot be read."""
    with contextlib.suppress(OSError):
        return json_lines(path)
    return []


def as_numbers(entry: JsonObject) -> dict[str, float]:
    """Return the numbers of a log entry, by a flat name.

    If there is a value for each rank, the largest one is returned: the rank that holds most memory
    runs out of it first, and the slowest rank holds up the others. JSON's null becomes NaN, and
    text is left out.
    """
    numbers: dict[str, float] = {}
    for key, value in entry.items():
        if isinstance(value, dict):
            for name, by_rank in value.items():
                numbers[f"{key}/{name}"] = max(by_rank)
        elif value is None:
            numbers[key] = math.nan
        elif not isinstance(value, str):
            numbers[key] = value
    return numbers


def seconds_of(timestamp: object) -> float | None:
    """Return the seconds since 1970 of a time as in ``run.json``, or ``None`` for anything else."""
    try:
        return datetime.strptime(str(timestamp), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None


def _is_locked(path: Path) -> bool | None:
    """Return whether a process has locked a file; ``None`` if that cannot be found out.

    This takes a shared lock for a moment and opens the file only to read it.
    """
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # the file system has no locks, or fails
        return None
    return False
