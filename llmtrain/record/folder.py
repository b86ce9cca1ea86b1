"""A run folder, as the run itself writes it: status, events and logs. Only rank 0 writes."""

import contextlib
import os
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import (
    JsonObject,
    append_json_line,
    copy_lines_up_to,
    read_object,
    sync,
    write_json,
)
from llmtrain.redaction import redacted

# Files with a line for each step or evaluation. A resumed run drops the lines of steps it repeats.
# A run that extends another one begins with copies of them.
LOGS = ("metrics.jsonl", "rows.jsonl", "samples.jsonl")
# What a copy of a run elsewhere has besides its status, its checkpoints and its model.
RECORDS = ("run.json", "events.jsonl", *LOGS)


class RunFolder:
    """The folder of a run.

    Args:
        path: the folder.
        start_id: identifies this start of the run, in case another one takes over the folder.
        is_main: whether this is rank 0.
    """

    def __init__(self, path: Path, start_id: str, is_main: bool) -> None:
        self.path = path
        self.start_id = start_id
        self.is_main = is_main
        self._status_lock = threading.Lock()  # for the threads of the run and of its mirror

    def begin(self, step: int, extends: JsonObject | None = None) -> None:
        """Delete files that a killed process left half-written, and log entries after ``step``.

        The caller holds the folder's lock.

        Args:
            step: steps made so far.
            extends: what ``run.json`` says about the run that this one extends. Its log entries
                become the beginning of this run's, unless this run has some already.
        """
        for leftover in [*self.path.glob(".tmp-*"), *self.path.glob("checkpoints/.tmp-*")]:
            # What cannot be deleted now, such as an open file on NFS, goes at a later start.
            with contextlib.suppress(OSError):
                leftover.unlink()  # a file or a link
            shutil.rmtree(leftover, ignore_errors=True)

        for name in LOGS:
            log = self.path / name
            copy_lines_up_to(log, log, step)
            if extends is not None and not log.exists():
                copy_lines_up_to(Path(extends["run"], name), log, min(step, extends["step"]))
        self.set_status("running", step, takes_over=True)

    def append(self, name: str, line: JsonObject) -> None:
        """Append a line to a JSON-lines file."""
        if self.is_main:
            append_json_line(self.path / name, line)

    def write(self, name: str, content: JsonObject) -> None:
        """Replace a JSON file."""
        if self.is_main:
            write_json(self.path / name, content)

    def sync_logs(self) -> None:
        """Force the logs to the disk.

        Call this before a checkpoint is written: the log of its steps is then as durable as the
        checkpoint.
        """
        for name in LOGS:
            path = self.path / name
            if path.exists():
                sync(path)

    def record_event(self, step: int, kind: str, text: str) -> None:
        """Record an event that a later reader of the run should know of."""
        event = {"step": step, "time": round(time.time(), 3), "kind": kind, "text": text}
        # If the disk is full, the run itself will fail on its next write, and report it.
        with contextlib.suppress(UserError):
            self.append("events.jsonl", redacted(event))

    def set_status(
        self, state: str, step: int, reason: str = "", *, takes_over: bool = False
    ) -> None:
        """Write ``status.json``, which says how the run ended. Launchers hide exit statuses.

        Args:
            state: ``running``, ``finished``, ``preempted`` or ``failed``.
            step: steps made so far.
            reason: why the run is in this state.
            takes_over: write it even if another start has this folder.
        """
        if not self.is_main or (not takes_over and self.is_taken_over()):
            return
        status = {
            "state": state,
            "step": step,
            # A saved checkpoint has no reason; redacting goes through all variables of the process.
            "reason": redacted(reason) if reason else "",
            "start_id": self.start_id,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        path = self.path / "status.json"
        with self._status_lock:
            write_json(path, status | {"mirrored_step": read_object(path).get("mirrored_step")})
        if state not in ("finished", "running"):
            self.record_event(step, state, reason)

    def set_mirrored_step(self, step: int) -> None:
        """Write into ``status.json`` which checkpoint is the newest one that the mirror has."""
        path = self.path / "status.json"
        with self._status_lock:
            status = read_object(path)
            if status.get("mirrored_step") != step and not self.is_taken_over():
                write_json(path, status | {"mirrored_step": step})

    def is_taken_over(self) -> bool:
        """Return whether another start of the run writes here.

        This can happen on file systems that do not keep locks between machines.
        """
        start_id = read_object(self.path / "status.json").get("start_id")
        return start_id not in (None, self.start_id)

    def can_write(self) -> bool:
        """Return whether this rank sees the folder that rank 0 writes, and may write there."""
        try:
            with tempfile.TemporaryFile(dir=self.path):
                status = read_object(self.path / "status.json")
                return bool(status.get("start_id") == self.start_id)
        except (OSError, UserError):
            return False
