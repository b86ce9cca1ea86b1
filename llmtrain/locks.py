"""Locks that processes hold on files."""

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterator
from errno import EACCES, EAGAIN, ENOLCK, ENOSYS, EOPNOTSUPP
from pathlib import Path

from llmtrain.console import note

# What flock answers on a file system that has no locks, or whose lock server cannot be reached.
_NO_LOCKS = (ENOSYS, ENOLCK, EOPNOTSUPP)


@contextlib.contextmanager
def file_lock(path: Path, timeout: float = math.inf) -> Iterator[bool]:
    """Hold the lock of a file until the block ends. The file is made if it is absent, and stays.

    The lock is flock's: it ends with its process, also on another machine. A file system without
    locks is used without them, after a note.

    Args:
        path: the file.
        timeout: seconds to wait for another process that holds the lock.

    Yields:
        Whether there is a lock.

    Raises:
        BlockingIOError: if another process still holds the lock.
        OSError: if the file cannot be opened or locked.
    """
    deadline = time.monotonic() + timeout
    # A link could lead to a file outside the folder.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    has_lock = False
    try:
        while not has_lock:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    note(
                        f"{path.parent} is on a file system without locks ({error.strerror}); do "
                        "not use it from two starts at the same time."
                    )
                    break
                # Some file systems answer EACCES if another process holds the lock.
                if error.errno not in (EAGAIN, EACCES):
                    raise
                if time.monotonic() >= deadline:
                    raise BlockingIOError(f"{path} is locked by another process") from None
                time.sleep(0.05)
        yield has_lock
    finally:
        # An error here would hide how the block has ended. Closing is not enough: a process that
        # was forked meanwhile has the handle, too.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(handle)
