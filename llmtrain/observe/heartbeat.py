"""Names the process that the others wait for.

A collective that one process never joins blocks all others without a message. So every process
sends *beats*: it keeps telling the others that it is alive, and in which phase and step. The beats
go through the store that the launcher has set up.

A process that has waited too long in one phase compares the beats of all processes. It makes every
process write the stacks of its threads to a file, names the process that is silent or behind, and
ends the run.
"""

import contextlib
import faulthandler
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

from llmtrain.console import note, print_error
from llmtrain.errors import ReportedElsewhereError, UserError, explain, first_line
from llmtrain.files import json_text
from llmtrain.interfaces.callback import Callback
from llmtrain.parallel.ranks import Ranks
from llmtrain.phases import Phases

_BEATS_PER_TIMEOUT = 8
_LONGEST_INTERVAL_SECONDS = 2.0

# A process counts as silent after this long. To notice takes twice as long, which is still less
# than the 30 s for which torchrun waits when a process has died.
_SILENCE_SECONDS = 10.0

_WARNING_SECONDS = 60.0  # of one wait, after which a note is printed; the run continues
_LAST_WORDS_SECONDS = 10.0  # to write stacks and the status: the disk may be what hangs

# Keys of the store.
_FAILED = "llmtrain/failed"  # why a process is about to end
_STACKS = "llmtrain/stacks"  # if it is set, every process writes its stacks

_STOPPED = ("stopped", "tracing-stop")  # states of a process
_CONNECTION_ERRORS = (
    "gloo",
    "NCCL",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
)


class Beat(NamedTuple):
    """A sign of life that a process sends to the others."""

    number: int  # grows as long as the process runs
    location: str  # the phase or the callback, and the steps made, in words
    is_waiting: bool  # whether processes wait for each other in this phase
    seconds: float  # since the phase or the callback began
    host: str
    pid: int


class Heartbeat(Callback):
    """Names the process that the others wait for.

    Args:
        ranks: the ranks of the run.
        phases: knows where this process is.
        folder: the run folder, for the stacks.
        timeout: seconds of one wait after which the run is ended.
        on_failure: called with the reason and the steps made, before this process ends with status
            1.
    """

    def __init__(
        self,
        ranks: Ranks,
        phases: Phases,
        folder: Path,
        timeout: float,
        on_failure: Callable[[str, int], None],
    ) -> None:
        self.ranks = ranks
        self.phases = phases
        self.folder = folder
        self.timeout = timeout
        self.on_failure = on_failure
        self.interval = min(timeout / _BEATS_PER_TIMEOUT, _LONGEST_INTERVAL_SECONDS)
        self.number = 0  # of beats so far
        self.store: dist.Store | None = None
        self.beats: dict[int, Beat] = {}  # the last one of each rank that this process has seen
        self._seen: dict[int, float] = {}  # when it first saw that beat
        self._is_over = threading.Event()
        self._has_written_stacks = False
        # When the phase began for which a note was printed: one note is enough for each wait.
        self._noted_wait = 0.0

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Send beats while the block runs.

        If the block fails because this process has lost contact to another, the error becomes a
        :class:`UserError` that names the missing process. Any other error is left in the store, for
        the processes that then lose contact to this one.
        """
        if self.ranks.world_size == 1:
            yield
            return

        threading.Thread(target=self._watch, name="heartbeat", daemon=True).start()
        try:
            yield
        except Exception as error:
            is_lost_connection = isinstance(error, RuntimeError) and any(
                text in str(error) for text in _CONNECTION_ERRORS
            )
            if not is_lost_connection:
                reason = explain(error) or first_line(error)
                self._set(_FAILED, f"rank {self.ranks.rank}: {reason}")
                raise

            other_reason = self._get(_FAILED)
            if other_reason:
                raise ReportedElsewhereError(other_reason) from None

            missing = self._find_missing()
            raise UserError(
                f"lost contact with another process: {missing} ({first_line(error)})"
            ) from None
        finally:
            self._is_over.set()

    # --- the store

    def _connect(self) -> None:
        """Connect to the launcher's store. If there is none, ``self.store`` stays ``None``."""
        # If the launcher is gone, and its store with it, this can take minutes.
        with contextlib.suppress(RuntimeError):
            default_store = dist.distributed_c10d._get_default_store()
            # torch's stub lacks this method.
            store: dist.Store = default_store.clone()  # type: ignore[attr-defined]
            store.set_timeout(timedelta(seconds=2 * self.interval + 5))
            self.store = store

    def _get(self, key: str) -> str | None:
        """Return the value of a key, or ``None`` if it has no value or the store is gone."""
        if self.store is None:
            return None
        with contextlib.suppress(RuntimeError):
            if self.store.check([key]):
                return self.store.get(key).decode()
        return None

    def _set(self, key: str, value: str) -> None:
        """Set a key. Nothing happens if the store is gone."""
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):
            self.store.set(key, value)

    def _look(self) -> None:
        """Read the last beat of every rank that has sent one."""
        for rank in range(self.ranks.world_size):
            text = self._get(f"llmtrain/beat/{rank}")
            if text is None:
                continue
            beat = Beat(*json.loads(text))
            if rank not in self.beats or self.beats[rank].number != beat.number:
                self.beats[rank] = beat
                self._seen[rank] = time.monotonic()

    def _silent_ranks(self, since: float) -> list[int]:
        """Return the other ranks of which this process has seen no new beat since a moment."""
        peers = [rank for rank in range(self.ranks.world_size) if rank != self.ranks.rank]
        return [peer for peer in peers if self._seen.get(peer, 0.0) <= since]

    # --- the thread that sends beats and watches how long this process waits

    def _watch(self) -> None:
        """Send beats, and check the current wait, until the block of :meth:`context` is over."""
        self._connect()
        self._beat()
        while self.store is not None and not self._is_over.wait(self.interval):
            self._beat()
            self._check_wait()

    def _beat(self) -> None:
        self.number += 1
        beat = Beat(
            number=self.number,
            location=self.phases.location,
            is_waiting=self.phases.is_waiting,
            seconds=time.monotonic() - self.phases.since,
            host=platform.node(),
            pid=os.getpid(),
        )
        self._set(f"llmtrain/beat/{self.ranks.rank}", json_text(beat))
        if self._get(_STACKS) is not None:
            self._write_stacks()

    def _check_wait(self) -> None:
        """Print a note if the current phase takes long. If it takes too long, end this process."""
        wait_start = self.phases.since
        seconds = time.monotonic() - wait_start
        wait = f"{seconds:.0f} s in {self.phases.location}"

        # A process that others wait for is more patient than they are: they need time to name it.
        patience = self.timeout
        if not self.phases.is_waiting:
            patience += 4 * self.interval + 2

        if seconds > patience or (seconds > _SILENCE_SECONDS and self._some_process_is_silent()):
            # Every process sees this with its next beat, before this process ends.
            self._set(_STACKS, "now")
            missing = self._find_missing()
            has_just_ended = self.phases.since != wait_start or self._is_over.is_set()
            if not has_just_ended:
                self._end_process(f"waited {wait}: {missing}")
            return

        note_is_due = seconds > min(_WARNING_SECONDS, self.timeout / 2)
        if note_is_due and self._noted_wait != wait_start:
            self._noted_wait = wait_start
            self._look()
            waiting = [rank for rank, beat in sorted(self.beats.items()) if beat.is_waiting]
            is_first_to_wait = waiting[:1] == [self.ranks.rank]
            if is_first_to_wait:  # a note from one process is enough
                note(f"waiting for {wait}: {self._find_missing()}")

    def _some_process_is_silent(self) -> bool:
        """Return whether a process has sent no beat for as long as this one has looked.

        Not every backend tells the main thread that another process has died.
        """
        self._look()
        silent = self._silent_ranks(since=time.monotonic() - _SILENCE_SECONDS)
        last_beats = [self.beats[peer] for peer in silent if peer in self.beats]
        # One that a debugger has stopped may continue.
        return any(_process_state(beat) not in _STOPPED for beat in last_beats)

    def _end_process(self, reason: str) -> None:
        """Print the reason, write the stacks, and end this process."""
        reason = f"{reason} Stacks are in {self.folder}/stacks-rank*.txt."
        threading.Timer(_LAST_WORDS_SECONDS, os._exit, [1]).start()
        try:
            with contextlib.suppress(Exception):
                print_error(reason)
            self._write_stacks()
            self.on_failure(reason, self.phases.step)
        finally:
            os._exit(1)

    def _write_stacks(self) -> None:
        """Write the stacks of this process's threads to the run folder, once."""
        if self._has_written_stacks:
            return
        self._has_written_stacks = True
        path = self.folder / f"stacks-rank{self.ranks.rank}.txt"
        with contextlib.suppress(OSError), path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)

    def _find_missing(self) -> str:
        """Look at all beats twice, and name the processes that the others wait for."""
        reason = self._get(_FAILED)
        if reason:
            return f"{reason}."

        self._look()
        start = time.monotonic()
        time.sleep(2 * self.interval + 1)
        self._look()
        return describe_missing(
            rank=self.ranks.rank,
            location=self.phases.location,
            beats=dict(sorted(self.beats.items())),
            silent=self._silent_ranks(since=start),
        )


def describe_missing(rank: int, location: str, beats: dict[int, Beat], silent: list[int]) -> str:
    """Name the processes that the others wait for.

    These are the silent processes. If there are none, they are the processes that have not come to
    the phase in which others wait. If none wait, they are the processes in another phase or step
    than this one.

    Args:
        rank: this process.
        location: where this process is, in words.
        beats: the last beat of each process that has sent one, by rank.
        silent: the ranks that have stopped sending heartbeats.
    """
    alive = {peer: beat for peer, beat in beats.items() if peer not in silent}
    waiting = [beat for beat in alive.values() if beat.is_waiting]

    missing = [_describe_silent(peer, last_beat=beats.get(peer)) for peer in silent]
    if not missing:
        behind = [peer for peer in alive if not alive[peer].is_waiting] if waiting else []
        elsewhere = [peer for peer in alive if alive[peer].location != location and peer != rank]
        missing = [
            f"rank {peer} is in {alive[peer].location}, for {alive[peer].seconds:.0f} s"
            for peer in behind or elsewhere
        ]
    if not missing:
        return "all ranks are alive, and in the same phase and step."

    if waiting:
        missing.append(f"the others wait in {waiting[0].location}")
    return "; ".join(missing) + "."


def _describe_silent(rank: int, last_beat: Beat | None) -> str:
    """Return where a silent process was last, and whether it still exists."""
    if last_beat is None:
        return f"rank {rank} is silent, and no earlier heartbeat of it is known"
    state = _process_state(last_beat)
    process = f"process {last_beat.pid} is {state}" if state else "stopped, cut off or gone"
    return f"rank {rank} is silent, last seen in {last_beat.location} ({process})"


def _process_state(beat: Beat) -> str:
    """Return the state of the process that sent a beat; empty if it is not known here."""
    if beat.host != platform.node():
        return ""
    try:
        return psutil.Process(beat.pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.Error:  # this user may not look at it
        return ""
