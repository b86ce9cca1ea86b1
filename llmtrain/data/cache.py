"""The user's cache: where prepared rows lie, and what is remembered of the files that they were made of."""

import contextlib
import hashlib
import json
import os
import time
from pathlib import Path

from llmtrain.files import write_json

_WORTH_REMEMBERING = 1 << 24  # bytes; fewer are read again in no time
_YOUNG = 2.0  # seconds in which a file may change once more and have the same times


def cache_folder() -> Path:
    """``$LLMTRAIN_CACHE``, else ``llmtrain`` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("LLMTRAIN_CACHE") or base / "llmtrain").expanduser()


def file_digest(path: Path) -> bytes:
    """The sha256 of a file's content. That of a large file is remembered, for as long as the file system says that
    nobody has touched it: as git knows by its index which files to read. A file changed just now is read again, for
    its times need not tell the next change from this one."""
    state = _state(path)
    name = hashlib.sha256(json.dumps([str(path.resolve()), *state]).encode()).hexdigest()
    remembered = cache_folder() / "digests" / name
    with contextlib.suppress(OSError, ValueError, TypeError):
        digest = bytes.fromhex(json.loads(remembered.read_text()))
        if len(digest) == hashlib.sha256().digest_size:
            return digest
    digest = _digest(path)
    _, _, size, modified, changed = state
    settled = time.time() - max(modified, changed) / 1e9 > _YOUNG and _state(path) == state
    if size >= _WORTH_REMEMBERING and settled:
        with contextlib.suppress(OSError):
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_json(remembered, digest.hex())
    return digest


def _state(path: Path) -> tuple[int, ...]:
    """What changes with a file's content; times in nanoseconds."""
    stat = path.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.digest()
