"""A watch over processes that wait for each other, which names the one that is missing.

A collective that one process never joins blocks the others without a word. Here every process keeps telling, through
the store that the launcher set up, that it lives and where it is; one that has waited too long in one place compares
these beats, has every process leave the stacks of its threads in a file, names who is silent or behind, and ends.

A beat is up to two seconds old when its process stops. So on Linux the thread that beats also bears the phase as its
name, which the other processes of the machine can read until the process is gone.
"""

import contextlib
import faulthandler
import json
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
from accelerate import Accelerator
from torch.distributed import distributed_c10d

from llmtrain.console import complain, note
from llmtrain.errors import ToldElsewhereError, UserError, explained, first_line
from llmtrain.observe.phases import MEETINGS, PHASES, Mark, Phases

T = TypeVar("T")
_BEATS_PER_TIMEOUT, _LONGEST_BEAT_SECONDS = 8, 2.0
_SILENCE_SECONDS = 10.0  # of a peer, and twice that of waiting for it: less than the 30 s that torchrun waits itself
_NOTES_SECONDS = 10.0
_WARNING_SECONDS = 60.0  # of one wait, after which it is said; the run goes on
_FAILED, _STACKS = (
    "llmtrain/failed",
    "llmtrain/stacks",
)  # keys of the store: why one is about to end; all leave stacks
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class Beat(NamedTuple):
    number: int  # grows while the process runs at all
    step: int  # updates made
    phase: str
    seconds: float  # in it
    collective: int  # how many it has begun
    thread: tuple[str, int, int]  # host, process and thread that beats


class Heartbeat:
    """Names the process that the others wait for. Use :meth:`beating` around the loop, whose phases it follows."""

    def __init__(
        self,
        accelerator: Accelerator,
        phases: Phases,
        folder: Path,
        timeout: float,
        failed: Callable[[str], None],
    ) -> None:
        """``timeout`` is in seconds; ``failed`` is told the reason before the process ends with status 1."""
        self.rank, self.size = accelerator.process_index, accelerator.num_processes
        self.phases, self.folder, self.timeout, self.failed = phases, folder, timeout, failed
        self.interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_BEAT_SECONDS)
        self.number, self.has_left_stacks = 0, False
        self.store: distributed_c10d.Store | None = None
        self.over = threading.Event()
        self.seen: dict[int, Beat] = {}
        self.seen_since = self.seen_at = self.warned_since = 0.0

    def through(self, items: Iterable[T], phase: str) -> Iterator[T]:
        """Yield the items; each begins ``phase`` anew, so that a long one is not taken for a hang."""
        for item in items:
            self.phases.at(phase)
            yield item

    @contextlib.contextmanager
    def beating(self) -> Iterator["Heartbeat"]:
        """Beat while the block runs.

        An error by which a process lost contact becomes a :class:`UserError` that names who is missing. Every other
        one is left for the processes that will lose contact to this one.
        """
        if self.size == 1:
            yield self
            return
        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        try:
            yield self
        except Exception as error:
            if not isinstance(error, RuntimeError) or not any(word in str(error) for word in _LOST):
                with contextlib.suppress(RuntimeError):
                    if self.store is not None:
                        self.store.set(
                            _FAILED, f"rank {self.rank}: {explained(error) or first_line(error)}"
                        )
                raise
            if reason := self._told(_FAILED):
                raise ToldElsewhereError(reason) from None
            missing = self._who_is_missing()
            raise UserError(
                f"lost contact with another process: {missing} ({first_line(error)})"
            ) from None
        finally:
            self.over.set()

    def _told(self, key: str) -> str | None:
        """Return what the store has under a key, where it is there and has it."""
        with contextlib.suppress(RuntimeError):
            if self.store is not None and self.store.check([key]):
                return self.store.get(key).decode()
        return None

    def _name_this_thread(self) -> None:
        """Give this thread the name of the phase that the main thread is in, from now on."""
        with contextlib.suppress(OSError):
            name = os.open(f"/proc/self/task/{threading.get_native_id()}/comm", os.O_WRONLY)

            def write(phase: str, _: Mark) -> None:
                with contextlib.suppress(OSError):  # this thread may have ended
                    os.write(name, f"{self.phases.step % 100000} {phase}".encode())

            self.phases.on_change.append(write)

    def _beat(self, store: distributed_c10d.Store) -> None:
        self.number += 1
        phases, seconds, collective = self.phases, time.monotonic() - self.phases.since, -1
        with contextlib.suppress(RuntimeError, ValueError):  # there is none any more
            group = distributed_c10d._get_default_group()
            collective = group._get_sequence_number_for_group()  # type: ignore[attr-defined]  # its stub lacks it
        thread = platform.node(), os.getpid(), threading.get_native_id()
        beat = Beat(self.number, phases.step, phases.phase, seconds, collective, thread)
        store.set(f"llmtrain/beat/{self.rank}", json.dumps(beat))
        if store.check([_STACKS]):
            self._leave_stacks()

    def _watch(self) -> None:
        self._name_this_thread()
        with contextlib.suppress(
            RuntimeError
        ):  # where the launcher has gone, with its store, that can take minutes
            store: distributed_c10d.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # likewise
            store.set_timeout(timedelta(seconds=2 * self.interval + 5))
            self.store = store
            self._beat(store)
        while self.store is not None and not self.over.wait(self.interval):
            with contextlib.suppress(
                RuntimeError
            ):  # a store that has gone is seen by the collectives as well
                self._beat(self.store)
            since = self.phases.since
            waited = time.monotonic() - since
            patience = (
                self.timeout
            )  # who is waited for lets those speak that wait, and do not go silent meanwhile
            patience += 0.0 if self.phases.phase in MEETINGS else 4 * self.interval + 2
            if waited > patience or (waited > _SILENCE_SECONDS and self._someone_is_silent()):
                with contextlib.suppress(RuntimeError):
                    self.store.set(
                        _STACKS, ""
                    )  # for all: each beats once more before this one ends
                missing = self._who_is_missing()
                if (
                    self.phases.since == since and not self.over.is_set()
                ):  # or the wait has just ended
                    self._give_up(f"{self._wait(waited)}: {missing}")
            elif waited > min(_WARNING_SECONDS, self.timeout / 2) and self.warned_since != since:
                self.warned_since = since
                waiting = [rank for rank, beat in self._beats().items() if beat.phase in MEETINGS]
                if self.rank in waiting[:1]:  # the first of those that wait says it
                    note(f"waiting for {self._wait(waited)}: {self._who_is_missing()}")

    def _wait(self, waited: float) -> str:
        return f"{waited:.0f} s in {_place(self.phases.phase, self.phases.step)}"

    def _someone_is_silent(self) -> bool:
        """Return whether a process has not beaten since about the time that this one began to wait.

        Not every backend lets the main thread know that a peer died.
        """
        beats = self._beats()
        if not self.seen or self.seen_since != self.phases.since:
            self.seen, self.seen_since, self.seen_at = beats, self.phases.since, time.monotonic()
        if time.monotonic() - self.seen_at < _SILENCE_SECONDS:
            return False
        return any(
            rank not in beats or beats[rank].number == beat.number
            for rank, beat in self.seen.items()
        )

    def _give_up(self, why: str) -> None:
        reason = f"waited {why} Stacks are in {self.folder}/stacks-rank*.txt."
        threading.Timer(
            _NOTES_SECONDS, os._exit, [1]
        ).start()  # it may be the folder's disk that hangs
        try:
            with contextlib.suppress(Exception):
                complain(reason)
            self._leave_stacks()
            self.failed(reason)
        finally:
            os._exit(1)

    def _leave_stacks(self) -> None:
        if self.has_left_stacks:
            return
        self.has_left_stacks = True
        path = self.folder / f"stacks-rank{self.rank}.txt"
        with (
            contextlib.suppress(OSError),
            path.open("w") as file,
        ):  # other machines may not have the folder
            faulthandler.dump_traceback(file, all_threads=True)

    def _who_is_missing(self) -> str:
        """Compare two looks at everyone's beats.

        Name who is silent in between, else who has not come to where others wait, else who is elsewhere than this
        process. One that failed has said so.
        """
        if reason := self._told(_FAILED):
            return f"{reason}."
        before = self._beats()
        time.sleep(2 * self.interval + 1)
        now = self._beats()
        others = [rank for rank in range(self.size) if rank != self.rank]
        silent = [
            r for r in others if r not in now or (r in before and before[r].number == now[r].number)
        ]
        waiting = [
            beat for rank, beat in now.items() if rank not in silent and beat.phase in MEETINGS
        ]
        mine = self.phases.step, self.phases.phase
        missing = [rank for rank in now if now[rank].phase not in MEETINGS] if waiting else []
        elsewhere = missing or [
            rank for rank in others if rank in now and (now[rank].step, now[rank].phase) != mine
        ]
        named = [f"rank {rank} is silent {_trace(now.get(rank))}" for rank in silent] or [
            f"rank {rank} is in {_place(now[rank].phase, now[rank].step)}, for {now[rank].seconds:.0f} s"
            for rank in elsewhere
        ]
        if waiting and named:
            place = _place(waiting[0].phase, waiting[0].step)
            named.append(f"the others wait in {place} (collective {waiting[0].collective})")
        return "; ".join(named or ["all ranks are alive and in the same place"]) + "."

    def _beats(self) -> dict[int, Beat]:
        found = {}
        for rank in range(self.size):
            with contextlib.suppress(ValueError):
                if told := self._told(f"llmtrain/beat/{rank}"):
                    found[rank] = Beat(*json.loads(told))
        return found


def _place(phase: str, step: int) -> str:
    return f"{PHASES.get(phase, phase)} after update {step}"


def _trace(last: Beat | None) -> str:
    """Return what can be found out about a process that no longer beats."""
    if last is None:
        return "since the start"
    host, process, thread = last.thread
    if host == platform.node():
        with contextlib.suppress(psutil.Error, OSError):
            state = psutil.Process(process).status()
            name = Path(f"/proc/{process}/task/{thread}/comm").read_text().rstrip("\n")
            if found := re.fullmatch(r"(\d+) (.+)", name):
                # of a name Linux keeps 15 bytes
                phase = next(
                    (phase for phase in (last.phase, *PHASES) if phase.startswith(found[2])),
                    found[2],
                )
                step = last.step + (int(found[1]) - last.step) % 100000
                return f"in {_place(phase, step)}: its process {process} is {state}"
    return f"(stopped, cut off or gone), last heard of in {_place(last.phase, last.step)}"
