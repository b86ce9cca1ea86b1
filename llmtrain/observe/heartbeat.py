"""Who is missing, when processes wait for each other.

A collective that one process never joins blocks the others without a word. Here every process keeps telling, through
the store that the launcher set up, that it lives and where it is; one that has waited too long in one place compares
these beats, names who is silent or behind, leaves the stacks of its threads in a file, and ends.
"""

import contextlib
import faulthandler
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from llmtrain.console import complain
from llmtrain.errors import UserError, first_line

_BEATS_PER_TIMEOUT, _LONGEST_BEAT_SECONDS = 8, 2.0
_SILENCE_SECONDS = 10.0  # of a peer, and twice that of waiting for it: less than the 30 s that torchrun waits itself
_NOTES_SECONDS = 10.0
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


T = TypeVar("T")


class Beat(NamedTuple):
    number: int  # grows while the process runs at all
    step: int  # updates made
    phase: str


class Heartbeat:
    """Use as a context around the loop, and call :meth:`at` where it goes from one phase to the next."""

    def __init__(self, accelerator: Accelerator, folder: Path, timeout: float, failed: Callable[[str], None]) -> None:
        """``timeout`` is in seconds; ``failed`` is told the reason before the process ends with status 1."""
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.folder, self.timeout, self.failed = folder, timeout, failed
        self.interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_BEAT_SECONDS)
        self.number, self.step, self.phase = 0, 0, "the start"
        self.since = time.monotonic()
        self.store: Any = None
        self.over = threading.Event()
        self.seen: dict[int, Beat] = {}
        self.seen_since = self.seen_at = 0.0

    def at(self, phase: str, step: int) -> None:
        """The main thread begins ``phase`` after ``step`` updates."""
        self.phase, self.step, self.since = phase, step, time.monotonic()

    def through(self, items: Iterable[T], phase: str, step: int) -> Iterator[T]:
        """The items; each begins ``phase`` anew, so that a long one is not taken for a hang."""
        for item in items:
            self.at(phase, step)
            yield item

    @contextlib.contextmanager
    def beating(self) -> Iterator["Heartbeat"]:
        """Beat while the block runs. An error by which a process lost contact becomes a :class:`UserError` that names
        who is missing."""
        if self.size == 1:
            yield self
            return
        thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield self
        except RuntimeError as error:
            if not any(word in str(error) for word in _LOST):
                raise
            raise UserError(
                f"lost contact with another process: {self._who_is_missing()} ({first_line(error)})"
            ) from None
        finally:
            self.over.set()

    def _connect(self) -> None:
        """A connection of this thread's own; where the launcher has gone, with its store, that can take minutes."""
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store
        store.set_timeout(timedelta(seconds=2 * self.interval + 5))
        self.store = store

    def _beat(self) -> None:
        self.number += 1
        self.store.set(f"llmtrain/beat/{self.rank}", json.dumps(Beat(self.number, self.step, self.phase)))

    def _watch(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._connect()
            self._beat()
        while self.store is not None and not self.over.wait(self.interval):
            with contextlib.suppress(RuntimeError):  # a store that has gone is seen by the collectives as well
                self._beat()
            since = self.since
            waited = time.monotonic() - since
            if waited > self.timeout or (waited > _SILENCE_SECONDS and self._someone_is_silent()):
                missing = self._who_is_missing()
                if self.since == since and not self.over.is_set():  # or the wait has just ended
                    self._give_up(waited, missing)

    def _someone_is_silent(self) -> bool:
        """Whether a process has not beaten since about the time that this one began to wait. Not every backend lets
        the main thread know that a peer died."""
        beats = self._beats()
        if not self.seen or self.seen_since != self.since:
            self.seen, self.seen_since, self.seen_at = beats, self.since, time.monotonic()
        if time.monotonic() - self.seen_at < _SILENCE_SECONDS:
            return False
        return any(rank not in beats or beats[rank].number == beat.number for rank, beat in self.seen.items())

    def _give_up(self, waited: float, missing: str) -> None:
        try:
            path = self.folder / f"stacks-rank{self.rank}.txt"
            reason = f"waited {waited:.0f} s in {self.phase} after update {self.step}: {missing} Stacks are in {path}."
            with contextlib.suppress(Exception):
                complain(reason)
            leaving = threading.Thread(target=self._leave_notes, args=(path, reason), daemon=True)
            leaving.start()
            leaving.join(_NOTES_SECONDS)  # it may be the folder's disk that hangs
        finally:
            os._exit(1)

    def _leave_notes(self, path: Path, reason: str) -> None:
        with contextlib.suppress(OSError), path.open("w") as file:  # other machines may not have the folder
            faulthandler.dump_traceback(file, all_threads=True)
        self.failed(reason)

    def _who_is_missing(self) -> str:
        """Compare two looks at everyone's beats: who is silent in between, else who is behind."""
        before = self._beats()
        time.sleep(2 * self.interval + 1)
        now = self._beats()
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = [r for r in others if r not in now or (r in before and before[r].number == now[r].number)]
        behind = [r for r in others if r in now and (now[r].step, now[r].phase) != (self.step, self.phase)]
        named = []
        for rank in silent or behind:
            where = f"{now[rank].phase} after update {now[rank].step}" if rank in now else "the start"
            state = "is silent (stopped, cut off or gone), last heard of" if rank in silent else "is still"
            named.append(f"rank {rank} {state} in {where}")
        return "; ".join(named or ["all ranks are alive and in the same place"]) + "."

    def _beats(self) -> dict[int, Beat]:
        found = {}
        for rank in range(self.size if self.store is not None else 0):
            with contextlib.suppress(RuntimeError, ValueError):
                if self.store.check([f"llmtrain/beat/{rank}"]):
                    found[rank] = Beat(*json.loads(self.store.get(f"llmtrain/beat/{rank}")))
        return found
