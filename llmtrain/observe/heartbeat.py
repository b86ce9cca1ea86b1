"""A watch over processes that wait for each other, which names the one that is missing.

A collective that one process never joins blocks all others without a message. With this watch every process keeps
telling the others that it is alive and in which phase and step it is, through the store that the launcher set up. A
process that has waited too long in one place compares these beats, has every process write the stacks of its threads
to a file, names the process that is silent or behind, and ends the run.
"""

import contextlib
import faulthandler
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import psutil
from torch.distributed import distributed_c10d

from llmtrain.console import complain, note
from llmtrain.errors import ToldElsewhereError, UserError, explained, first_line
from llmtrain.observe.phases import MEETINGS, PHASES, Phases
from llmtrain.parallel.ranks import Ranks

T = TypeVar("T")

_BEATS_PER_TIMEOUT = 8
_LONGEST_INTERVAL_SECONDS = 2.0

# A peer that is silent this long is missed, which takes twice as long to notice: still less than the 30 s for which
# torchrun waits when a process has died.
_SILENCE_SECONDS = 10.0

_WARNING_SECONDS = 60.0  # of one wait, after which a note is printed; the run goes on
_LAST_WORDS_SECONDS = 10.0  # to write stacks and status; the disk may be what hangs

# Keys of the store.
_FAILED = "llmtrain/failed"  # why a process is about to end
_STACKS = "llmtrain/stacks"  # set: every process writes its stacks

_CONNECTION_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)


class Beat(NamedTuple):
    """What a process tells the others about itself."""

    number: int  # grows as long as the process runs
    step: int  # steps made
    phase: str
    seconds: float  # since the phase began
    collective: int  # how many collectives it has begun; -1 if that is unknown
    host: str
    pid: int

    @property
    def is_waiting(self) -> bool:
        """True in a phase in which processes wait for each other."""
        return self.phase in MEETINGS

    @property
    def place(self) -> str:
        return _place(self.phase, self.step)


class Heartbeat:
    """Names the process that the others wait for. Use :meth:`beating` around the loop, whose phases it follows."""

    def __init__(
        self,
        ranks: Ranks,
        phases: Phases,
        folder: Path,
        timeout: float,
        on_failure: Callable[[str], None],
    ) -> None:
        """Prepare the watch.

        Args:
            ranks: All processes of the run.
            phases: Knows the phase and the step of this process.
            folder: The run folder, for the stacks.
            timeout: Seconds of one wait after which the run is ended.
            on_failure: Called with the reason before this process ends with status 1.
        """
        self.ranks = ranks
        self.phases = phases
        self.folder = folder
        self.timeout = timeout
        self.on_failure = on_failure
        self.interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL_SECONDS)
        self.number = 0
        self.has_left_stacks = False
        self.store: distributed_c10d.Store | None = None
        self.over = threading.Event()

        # The beats at the beginning of the present wait, for _someone_is_silent.
        self.first_beats: dict[int, Beat] = {}
        self.first_beats_of = 0.0  # the wait they belong to: when its phase began
        self.first_beats_at = 0.0
        self.warned_of = 0.0  # the wait for which a note was printed: when its phase began

    def beat_while_reading(self, items: Iterable[T], phase: str) -> Iterator[T]:
        """Yield the items; each begins ``phase`` anew, so that a long one is not taken for a hang."""
        for item in items:
            self.phases.at(phase)
            yield item

    @contextlib.contextmanager
    def beating(self) -> Iterator["Heartbeat"]:
        """Beat while the block runs.

        If the block fails because a process lost contact, the error becomes a :class:`UserError` that names the
        missing process. Any other error is left in the store, for the processes that lose contact to this one.
        """
        if self.ranks.world_size == 1:
            yield self
            return

        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        try:
            yield self
        except Exception as error:
            if not _is_lost_connection(error):
                self._set(
                    _FAILED, f"rank {self.ranks.rank}: {explained(error) or first_line(error)}"
                )
                raise
            if reason := self._get(_FAILED):
                raise ToldElsewhereError(reason) from None
            missing = self._who_is_missing()
            raise UserError(
                f"lost contact with another process: {missing} ({first_line(error)})"
            ) from None
        finally:
            self.over.set()

    def _get(self, key: str) -> str | None:
        """Return the value of a key of the store; ``None`` if it has none, or if the store is gone."""
        if self.store is None:
            return None
        with contextlib.suppress(RuntimeError):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return None

    def _set(self, key: str, value: str) -> None:
        """Set a key of the store. Nothing happens if the store is gone."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(key, value)

    def _connect(self) -> None:
        """Connect to the launcher's store; without one, ``self.store`` stays ``None``."""
        # If the launcher is gone, and its store with it, this can take minutes.
        with contextlib.suppress(RuntimeError):
            store: distributed_c10d.Store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # its stub lacks it
            store.set_timeout(timedelta(seconds=2 * self.interval + 5))
            self.store = store

    def _beat(self) -> None:
        self.number += 1
        beat = Beat(
            number=self.number,
            step=self.phases.step,
            phase=self.phases.phase,
            seconds=time.monotonic() - self.phases.since,
            collective=_collectives_begun(),
            host=platform.node(),
            pid=os.getpid(),
        )
        self._set(f"llmtrain/beat/{self.ranks.rank}", json.dumps(beat))
        if self._get(_STACKS) is not None:
            self._leave_stacks()

    def _watch(self) -> None:
        """Beat, and look after the present wait, until the block of :meth:`beating` is over."""
        self._connect()
        self._beat()
        while self.store is not None and not self.over.wait(self.interval):
            self._beat()
            self._look_after_the_wait()

    def _look_after_the_wait(self) -> None:
        """Print a note about a long wait in one phase, or end the process if it is too long."""
        since = self.phases.since
        waited = time.monotonic() - since

        # A process that others wait for is more patient than they are: they must have the time to name it.
        patience = self.timeout
        if self.phases.phase not in MEETINGS:
            patience += 4 * self.interval + 2

        if waited > patience or (waited > _SILENCE_SECONDS and self._someone_is_silent()):
            self._set(_STACKS, "now")  # every process beats once more before this one ends
            missing = self._who_is_missing()
            has_just_ended = self.phases.since != since or self.over.is_set()
            if not has_just_ended:
                self._give_up(f"{self._wait(waited)}: {missing}")
        elif waited > min(_WARNING_SECONDS, self.timeout / 2) and self.warned_of != since:
            self.warned_of = since
            waiting = [rank for rank, beat in self._beats().items() if beat.is_waiting]
            if waiting and waiting[0] == self.ranks.rank:  # one note is enough
                note(f"waiting for {self._wait(waited)}: {self._who_is_missing()}")

    def _wait(self, waited: float) -> str:
        return f"{waited:.0f} s in {_place(self.phases.phase, self.phases.step)}"

    def _someone_is_silent(self) -> bool:
        """Return whether a process has not beaten since about the time that this one began to wait.

        Not every backend lets the main thread know that a peer died.
        """
        beats = self._beats()
        if not self.first_beats or self.first_beats_of != self.phases.since:
            self.first_beats = beats
            self.first_beats_of = self.phases.since
            self.first_beats_at = time.monotonic()
        if time.monotonic() - self.first_beats_at < _SILENCE_SECONDS:
            return False
        return any(
            rank not in beats or beats[rank].number == first.number
            for rank, first in self.first_beats.items()
        )

    def _give_up(self, why: str) -> None:
        """Say why, leave the stacks, and end this process."""
        reason = f"waited {why} Stacks are in {self.folder}/stacks-rank*.txt."
        threading.Timer(_LAST_WORDS_SECONDS, os._exit, [1]).start()
        try:
            with contextlib.suppress(Exception):
                complain(reason)
            self._leave_stacks()
            self.on_failure(reason)
        finally:
            os._exit(1)

    def _leave_stacks(self) -> None:
        """Write the stacks of this process's threads to the run folder, once."""
        if self.has_left_stacks:
            return
        self.has_left_stacks = True
        path = self.folder / f"stacks-rank{self.ranks.rank}.txt"
        with contextlib.suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _who_is_missing(self) -> str:
        """Compare two looks at everyone's beats, and name the processes that the others wait for."""
        if reason := self._get(_FAILED):
            return f"{reason}."

        before = self._beats()
        time.sleep(2 * self.interval + 1)
        now = self._beats()
        return missing_processes(
            rank=self.ranks.rank,
            size=self.ranks.world_size,
            place=_place(self.phases.phase, self.phases.step),
            before=before,
            now=now,
        )

    def _beats(self) -> dict[int, Beat]:
        """Return the last beat of every process that has beaten."""
        beats = {}
        for rank in range(self.ranks.world_size):
            text = self._get(f"llmtrain/beat/{rank}")
            if text is None:
                continue
            with contextlib.suppress(ValueError):
                beats[rank] = Beat(*json.loads(text))
        return beats


def missing_processes(
    *, rank: int, size: int, place: str, before: dict[int, Beat], now: dict[int, Beat]
) -> str:
    """Say which processes the others wait for.

    These are the silent ones, which have not beaten between the two looks. If there are none, it is those that have
    not come to the place where others wait; else those that are not where this process is.

    Args:
        rank: This process.
        size: The number of processes.
        place: The phase and step of this process.
        before: Everyone's beats at the first look.
        now: Everyone's beats at the second look, several intervals later.
    """
    others = [other for other in range(size) if other != rank]
    silent = [other for other in others if _is_silent(before.get(other), now.get(other))]
    waiting = [beat for other, beat in now.items() if other not in silent and beat.is_waiting]

    named = [f"rank {other} is silent{_last_trace(now.get(other))}" for other in silent]
    if not named:
        behind = [other for other in now if not now[other].is_waiting] if waiting else []
        elsewhere = [other for other in others if other in now and now[other].place != place]
        named = [
            f"rank {other} is in {now[other].place}, for {now[other].seconds:.0f} s"
            for other in behind or elsewhere
        ]
    if not named:
        return "all ranks are alive and in the same place."

    if waiting:
        named.append(f"the others wait in {waiting[0].place} (collective {waiting[0].collective})")
    return "; ".join(named) + "."


def _is_silent(before: Beat | None, now: Beat | None) -> bool:
    if now is None:
        return True
    return before is not None and before.number == now.number


def _last_trace(last: Beat | None) -> str:
    """Return what is known about a process that no longer beats: where it last was, and whether it still exists."""
    if last is None:
        return " since the start"

    state = "stopped, cut off or gone"
    if last.host == platform.node():
        try:
            state = f"process {last.pid} is {psutil.Process(last.pid).status()}"
        except psutil.NoSuchProcess:
            state = f"process {last.pid} is gone"
        except psutil.Error:  # this user may not look at it
            pass
    return f", last heard of in {last.place} ({state})"


def _place(phase: str, step: int) -> str:
    return f"{PHASES.get(phase, phase)} after step {step}"


def _collectives_begun() -> int:
    """Return how many collectives this process has begun; -1 if there is no process group any more."""
    with contextlib.suppress(RuntimeError, ValueError):
        group = distributed_c10d._get_default_group()
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]  # its stub lacks it
    return -1


def _is_lost_connection(error: Exception) -> bool:
    """Return whether an error says that another process could not be reached."""
    return isinstance(error, RuntimeError) and any(
        word in str(error) for word in _CONNECTION_ERRORS
    )
