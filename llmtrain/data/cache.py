"""The user's cache: where the rows of tokens lie, and what is remembered of the files that they were made of."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path
from typing import IO

_WORTH_REMEMBERING = 1 << 20  # bytes; fewer are read again in no time
_YOUNG = 60.0  # seconds in which a file may change once more and show the same times, which other machines may set


def cache_folder() -> Path:
    """Return ``$LLMTRAIN_CACHE``, else ``llmtrain`` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LLMTRAIN_CACHE") or base / "llmtrain").expanduser()


def file_digest(path: Path) -> bytes:
    """Return the sha256 of a file's content.

    That of a large file is remembered for as long as the file system says that nobody has touched it, as git knows by
    its index which files to read. A file changed a short time ago is read again, for its times need not tell the next
    change from this one.
    """
    remembered = (
        cache_folder() / "digests" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    )
    with path.open("rb") as file:  # opened, for which a network file system asks its server
        state = _state(file.fileno())
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            known = json.loads(remembered.read_text())
            digest = bytes.fromhex(known["sha256"])
            if known["state"] == state and len(digest) == hashlib.sha256().digest_size:
                return digest
        digest = _digest(file)
        _, _, size, modified, changed = state
        settled = (
            time.time() - max(modified, changed) / 1e9 > _YOUNG and _state(file.fileno()) == state
        )
    if size >= _WORTH_REMEMBERING and settled:
        with contextlib.suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.write_text(
                json.dumps({"state": state, "sha256": digest.hex()})
            )  # torn, it is nothing
    return digest


def _digest(file: IO[bytes]) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.digest()


def _state(file: int) -> list[int]:
    """Return what changes with a file's content; times in nanoseconds."""
    stat = os.fstat(file)
    return [stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]
