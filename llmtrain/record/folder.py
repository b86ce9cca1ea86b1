"""A run's folder, as the run itself writes it: status, incidents and ledgers. Only rank 0 writes."""

import contextlib
import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import append_json_line, drop_lines_after, read_object, sync_file, write_json
from llmtrain.types import Facts

_LEDGERS = ("metrics.jsonl", "rows.jsonl", "samples.jsonl", "scores.jsonl")


class RunFolder:
    """The folder at ``path``; ``incarnation`` tells this start from another that takes it over."""

    def __init__(self, path: Path, incarnation: str, is_main: bool) -> None:
        self.path, self.incarnation, self.is_main = path, incarnation, is_main

    def begin(self, step: int) -> None:
        """Delete files that a killed process left half-written, and log entries after ``step``.

        The caller holds the folder's lock.
        """
        for leftover in [*self.path.glob(".tmp-*"), *self.path.glob("checkpoints/.tmp-*")]:
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()
        for name in _LEDGERS:
            drop_lines_after(self.path / name, step)
        self._write_status("running", step)

    def append(self, name: str, line: Facts) -> None:
        """Append a JSON line to a ledger."""
        if self.is_main:
            append_json_line(self.path / name, line)

    def write(self, name: str, content: Facts) -> None:
        """Replace a JSON file."""
        if self.is_main:
            write_json(self.path / name, content)

    def sync_ledgers(self) -> None:
        """Make what is logged of the updates before a checkpoint as durable as the checkpoint."""
        for path in (self.path / name for name in _LEDGERS):
            if path.exists():
                sync_file(path)

    def incident(self, step: int, kind: str, text: str) -> None:
        """Keep something to know of when the run is looked at later."""
        with contextlib.suppress(UserError):  # a full disk, which the run itself will meet
            self.append(
                "incidents.jsonl",
                {"step": step, "time": round(time.time(), 3), "kind": kind, "text": text},
            )

    def status(self, state: str, step: int, reason: str = "") -> None:
        """Write ``status.json``, unless another start has taken over."""
        if self.is_main and not self.taken_over():
            self._write_status(state, step, reason)
            if state not in ("finished", "running"):
                self.incident(step, state, reason)

    def _write_status(self, state: str, step: int, reason: str = "") -> None:
        """Say how the run stands, for whoever looks at its folder: launchers hide exit statuses."""
        content = {
            "state": state,
            "step": step,
            "reason": reason,
            "incarnation": self.incarnation,
            "pid": os.getpid(),
        }
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.path / "status.json", {**content, "host": platform.node(), "time": now})

    def taken_over(self) -> bool:
        """Return whether another start writes here: seen where a file system does not keep locks."""
        return read_object(self.path / "status.json").get("incarnation") not in (
            None,
            self.incarnation,
        )

    def can_write(self) -> bool:
        """Return whether this rank sees the folder of this very start, and may write there."""
        with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=self.path):
            return bool(
                read_object(self.path / "status.json").get("incarnation") == self.incarnation
            )
        return False
