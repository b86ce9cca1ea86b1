"""Digests of files, kept in the user's cache folder."""

import contextlib
import hashlib
import os
import time
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import cache_folder, read_hashed, read_sealed, write_sealed
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
        if kept.get("state") == state and not reread:
            return bytes.fromhex(kept["digest"])
        content = read_hashed(path)
        stat = os.fstat(file.fileno())
        is_settled = time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLING_TIME

        if content["bytes"] >= _MIN_KEPT_SIZE and is_settled and _state(file.fileno()) == state:
            with contextlib.suppress(OSError):
                record.parent.mkdir(parents=True, exist_ok=True)
                write_sealed(record, {"state": state, "digest": content["sha256"]})
    return bytes.fromhex(content["sha256"])


def _state(file: int) -> list[int]:
    """Return numbers that change when the content of a file changes, given its descriptor."""
    stat = os.fstat(file)
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
