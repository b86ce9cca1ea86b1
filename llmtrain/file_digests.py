"""Digests of files, kept in the user's cache folder."""

import contextlib
import hashlib
import os
import time
from pathlib import Path
from typing import NamedTuple

from llmtrain.errors import UserError
from llmtrain.files import cache_folder, read_sealed, write_sealed
from llmtrain.json_types import JsonObject

# The size in bytes from which a digest is kept. Reading a smaller file again takes next to no time.
_MIN_KEPT_SIZE = 1 << 20
# Seconds in which a file may change again and show the same times: the clocks of file systems are
# coarse, and another machine may set the times.
_SETTLING_TIME = 60.0


def file_digest(path: Path, *, reread: bool = False) -> bytes:
    """Return the sha256 of a file's content.

    The digest of a large file is kept in the cache. It is used again as long as the file system
    reports the same size and times, which is also how git decides whether a file has changed. A
    file that changed a short time ago is always read, because its times may hide the next change.

    Args:
        path: the file.
        reread: read the file in any case. A disk may return other bytes without a change of times.
    """
    path_hash = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    record = cache_folder() / "digests" / path_hash
    # A network file system asks its server for the state of a file only when the file is opened.
    with path.open("rb") as file:
        state = _state(file.fileno())
        kept: JsonObject = {}
        # Another user may have written the record, and the file is here to be read.
        with contextlib.suppress(OSError, UserError):
            kept = read_sealed(record)
        if kept.get("state") == list(state) and not reread:
            return bytes.fromhex(kept["digest"])
        digest = hashlib.file_digest(file, "sha256").digest()
        age = time.time() - max(state.modified, state.changed) / 1e9
        is_settled = age > _SETTLING_TIME and _state(file.fileno()) == state

    if state.size >= _MIN_KEPT_SIZE and is_settled:
        with contextlib.suppress(OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            write_sealed(record, {"state": list(state), "digest": digest.hex()})
    return digest


class _FileState(NamedTuple):
    """Numbers that change when a file's content changes; times in nanoseconds."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int


def _state(file: int) -> _FileState:
    """Return the state of an open file, given its descriptor."""
    stat = os.fstat(file)
    return _FileState(
        device=stat.st_dev,
        inode=stat.st_ino,
        size=stat.st_size,
        modified=stat.st_mtime_ns,
        changed=stat.st_ctime_ns,
    )
