"""Shards in object storage, which come block by block into a bounded cache on this machine.

All processes of a machine share the cache of a set, a folder:

    manifest.json, tokenizer/    copies of those of the set (:mod:`llmtrain.data.remote_sets`)
    SHA256.safetensors           a shard, with holes for the blocks that have not arrived
    SHA256.safetensors.blocks    a byte for each block, which is 1 if it has arrived

A shard is deleted to make room for another one only if no process holds it. The locks of a process
that was killed are gone, so nobody waits for it.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import threading
import time
from collections.abc import Iterator, Sequence
from errno import ENOSPC
from pathlib import Path
from typing import BinaryIO

import numpy as np

from llmtrain.console import note, size_text
from llmtrain.data.order import GlobalBatchSampler
from llmtrain.data.shards import BLOCK_BYTES, CheckedFile, Rows, Shard
from llmtrain.errors import DamagedRowsError, UserError, first_line
from llmtrain.files import JsonObject
from llmtrain.locks import file_lock
from llmtrain.storage import Storage, StorageError

_RUN_BLOCKS = 4  # that are fetched at once
# Seconds to wait until other processes hold fewer shards. They do so when they read the same step.
_ROOM_SECONDS = 20.0
_POLL_SECONDS = 0.05


class ShardCache:
    """The shards of a set on this machine.

    A process holds the shards that it reads by a shared lock on their files.

    Args:
        folder: the folder of the cache.
        storage: the folder of the set.
        capacity: the bytes of training shards that may be on the disk.
        eval_names: the names of the shards of the eval data, which stay once they are there.
    """

    def __init__(self, folder: Path, storage: Storage, capacity: int, eval_names: set[str]) -> None:
        self.folder = folder
        self.storage = storage
        self.capacity = capacity
        self.eval_names = eval_names
        self._held: dict[str, BinaryIO] = {}
        self._needed: set[str] = set()  # the names of those that are read ahead
        self._kept: set[str] = set()  # the names of those that stay when another one needs room
        self._mutex = threading.RLock()  # of the reader and the thread that reads ahead

    def file(self, folder: Path, facts: JsonObject) -> "RemoteFile":
        """Open a shard, given its facts in the manifest."""
        path = folder / Path(facts["file"]).name
        return RemoteFile(path, facts["blocks"], size=facts["bytes"], cache=self)

    def expect(self, needed: set[str], kept: set[str]) -> None:
        """Let other processes delete all shards but some.

        Args:
            needed: the names of the shards that this process will read soon.
            kept: those of them that it still needs when it asks for one that is not there.
        """
        with self._mutex:
            self._needed = needed
            self._kept = kept
            self._release(needed)

    def _release(self, needed: set[str]) -> None:
        for name in self._held.keys() - needed:
            self._held.pop(name).close()

    def hold(self, file: "RemoteFile", should_wait: bool) -> bool:
        """Keep a shard on the disk from now on, without its blocks if it is new.

        Args:
            file: the shard.
            should_wait: wait until other processes leave room for it.

        Returns:
            Whether it is there.

        Raises:
            OSError: if the disk fails.
        """
        deadline = time.monotonic() + _ROOM_SECONDS
        while not self._try_to_hold(file, may_release=should_wait):
            if not should_wait:
                return False
            time.sleep(_POLL_SECONDS)
            if time.monotonic() > deadline:
                note(
                    f"{self.folder}: other processes hold more shards than fit into "
                    f"{size_text(self.capacity)}; the cache grows by one"
                )
                self.capacity += file.size
        return True

    def _try_to_hold(self, file: "RemoteFile", may_release: bool) -> bool:
        """Hold a shard if it is there, or if there is room for it; see :meth:`hold`."""
        name = file.path.name
        if name in self._held and file.path.exists():
            return True

        is_eval = name in self.eval_names
        with self._mutex, file_lock(self.folder / ".lock"):
            if not may_release and name not in self._needed:
                return False  # meanwhile, the reader has gone on to another window
            if not self._kept and not is_eval:
                self._release(set())  # rows are read in another order than that of steps

            has_room = is_eval or file.path.exists() or self._make_room(file.size)
            if not has_room and may_release:
                # The reader has read all rows of the window before; or it reads no step.
                self._release(self._kept if name in self._kept else set())
                has_room = self._make_room(file.size)
            if not has_room:
                return False

            if not file.path.exists():
                file.create()
            file.forget_checks()
            if not is_eval:
                handle = file.path.open("rb")
                with contextlib.suppress(OSError):  # of a file system without locks
                    fcntl.flock(handle, fcntl.LOCK_SH)
                self._held[name] = handle
        return True

    def _make_room(self, size: int) -> bool:
        """Delete shards that nobody holds, the oldest first, until there is room for ``size``."""
        files = self.folder.glob("*.safetensors")
        paths = [path for path in files if path.name not in self.eval_names]
        sizes = {path: path.stat().st_size for path in paths}
        room = self.capacity - sum(sizes.values())
        for path in sorted(paths, key=lambda path: path.stat().st_mtime):
            if room >= size:
                break
            with path.open("r+b") as file, contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                room += sizes[path]
        return room >= size


class RemoteFile(CheckedFile):
    """A shard in object storage. Blocks that are not in the cache are fetched before they are read.

    Args:
        path: its place in the cache.
        blocks: the sha256 of each block, in hexadecimal digits.
        size: its bytes.
        cache: the cache.

    Attributes:
        marks_path: the file that tells which blocks have arrived.
    """

    def __init__(self, path: Path, blocks: Sequence[str], size: int, cache: ShardCache) -> None:
        super().__init__(path, blocks)
        self.size = size
        self.cache = cache
        self.marks_path = path.with_name(f"{path.name}.blocks")

    def pieces(self, starts: np.ndarray, size: int) -> np.ndarray:
        """Return pieces of the file; see :class:`CheckedFile`."""
        first = starts // BLOCK_BYTES
        last = np.maximum(starts + size - 1, starts) // BLOCK_BYTES
        spans = [np.arange(*span) for span in zip(first, last + 1, strict=True)]
        blocks = np.unique(np.concatenate([*spans, np.zeros(0, np.int64)])).tolist()
        self._fetch_all(blocks)
        try:
            return super().pieces(starts, size)
        except DamagedRowsError:  # the disk of the cache has changed it
            self.path.unlink(missing_ok=True)
            self._fetch_all(blocks)
            return super().pieces(starts, size)

    def _fetch_all(self, blocks: Sequence[int]) -> None:
        """Fetch those of some blocks that are missing."""
        try:
            self.cache.hold(self, should_wait=True)
            if not np.fromfile(self.marks_path, np.uint8)[blocks].all():
                with file_lock(self.marks_path):
                    for run in _runs(blocks):
                        self._fetch(run)
        except FileNotFoundError:
            raise DamagedRowsError(
                f"{self.cache.storage}/{self.path.name} is gone; put the file back."
            ) from None
        except StorageError as error:
            raise DamagedRowsError(str(error)) from None
        except OSError as error:
            raise DamagedRowsError(
                f"{self.path.parent}: {first_line(error)}; free some space, or lower --cache_size."
            ) from None

    def create(self) -> None:
        """Make a new copy, of which no block has arrived."""
        self.marks_path.write_bytes(bytes(len(self.blocks)))
        with self.path.open("wb") as file:
            file.truncate(self.size)

    def forget_checks(self) -> None:
        """Compare all blocks with their hashes again: the file may be a new one."""
        self._is_checked[:] = False

    def fetch_next(self) -> bool:
        """Fetch some blocks that are missing, and return whether there are more.

        A file that another process is fetching counts as complete.
        """
        try:
            with file_lock(self.marks_path, timeout=0):
                marks = np.fromfile(self.marks_path, np.uint8)
                missing = [*_runs(np.flatnonzero(marks == 0).tolist())]
                if missing:
                    self._fetch(missing[0])
                return len(missing) > 1
        except BlockingIOError:
            return False

    def _fetch(self, blocks: Sequence[int]) -> None:
        """Fetch consecutive blocks, unless they have arrived. The caller holds the file's lock."""
        marks = np.fromfile(self.marks_path, np.uint8)
        if marks[blocks[0] : blocks[-1] + 1].all():
            return

        def is_intact(content: bytes) -> bool:
            parts = [content[i : i + BLOCK_BYTES] for i in range(0, len(content), BLOCK_BYTES)]
            hashes = [hashlib.sha256(part).hexdigest() for part in parts]
            return hashes == [self.blocks[block] for block in blocks]

        start = blocks[0] * BLOCK_BYTES
        stop = min(start + len(blocks) * BLOCK_BYTES, self.size)
        content = self.cache.storage.read(self.path.name, start, stop, is_intact)
        with self.path.open("r+b", buffering=0) as file:
            if os.pwrite(file.fileno(), content, start) < len(content):
                raise OSError(ENOSPC, os.strerror(ENOSPC))
        with self.marks_path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), b"\1" * len(blocks), blocks[0])


def _runs(blocks: Sequence[int]) -> Iterator[list[int]]:
    """Divide ascending numbers of blocks into runs of a few consecutive ones."""
    for _, group in itertools.groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        numbers = [int(block) for _, block in group]
        for start in range(0, len(numbers), _RUN_BLOCKS):
            yield numbers[start : start + _RUN_BLOCKS]


class ReadAhead:
    """Fetches the shards of the next steps while a run trains.

    Args:
        shards: all shards, of which some are in object storage.
    """

    def __init__(self, shards: Sequence[Rows]) -> None:
        self.files = {
            number: shard.file
            for number, shard in enumerate(shards)
            if isinstance(shard, Shard) and isinstance(shard.file, RemoteFile)
        }
        self._plan: list[RemoteFile] = []
        self._complete_plan: list[RemoteFile] = []  # of which all files are there
        self._windows: object = None
        self._thread: threading.Thread | None = None

    def begin_step(self, sampler: GlobalBatchSampler, step: int | None) -> None:
        """Keep the shards of a step, and read those of later steps ahead.

        After the last step, ``step`` is ``None``, and no shard is kept.
        """
        if not self.files:
            return
        windows: tuple[list[int], list[int]] = ([], [])
        if step is not None:
            windows = sampler.shards_at(step)
        if windows != self._windows:
            self._windows = windows
            first, last = ({self.files[n] for n in part if n in self.files} for part in windows)
            self._plan = [] if step is None else self._planned(sampler, step, first | last)
            for cache in {file.cache for file in self.files.values()}:
                # Other caches have none of these names.
                needed, kept = ({file.path.name for file in files} for files in (self._plan, last))
                cache.expect(needed, kept)
        is_idle = self._thread is None or not self._thread.is_alive()
        if is_idle and self._plan is not self._complete_plan:
            self._thread = threading.Thread(target=self._fetch, name="read-ahead", daemon=True)
            self._thread.start()

    def _planned(
        self, sampler: GlobalBatchSampler, step: int, needed: set["RemoteFile"]
    ) -> list["RemoteFile"]:
        """Return the files of a step and, if there is room, as many of the steps after it."""
        plan = [*needed]
        longest = min(2 * len(plan), len(self.files))
        steps_per_shard = max(1, sampler.n // sampler.batch_size // len(self.files))
        for ahead in range(step, sampler.steps.stop, steps_per_shard):
            if len(plan) >= longest:
                break
            for number in itertools.chain(*sampler.shards_at(ahead)):
                file = self.files.get(number)
                if file is None or file in plan:
                    continue
                used = sum(each.size for each in plan if each.cache is file.cache)
                if used + file.size > file.cache.capacity:
                    return plan
                plan.append(file)
        return plan

    def _fetch(self) -> None:
        """Fetch the files of the plan in their order, until all are there."""
        plan = self._plan
        # The reader meets the same error, if it needs the file.
        with contextlib.suppress(OSError, UserError):
            for file in plan:
                if not file.cache.hold(file, should_wait=False):
                    return
                while file.fetch_next():
                    if plan is not self._plan:
                        return
            if all(np.fromfile(file.marks_path, np.uint8).all() for file in plan):
                self._complete_plan = plan
