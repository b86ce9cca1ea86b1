"""Files that are whole or absent: written beside their place, forced to the disk, then renamed into it."""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from llmtrain.errors import UserError

if TYPE_CHECKING:
    from llmtrain.types import Facts

_BLOCK = 1 << 24  # bytes that are written while the ones before are hashed


class Hashed(TypedDict):
    """The size and the content of a file."""

    bytes: int
    sha256: str


def write_json(path: Path, content: object) -> None:
    """Replace ``path`` by the content, atomically."""
    _replace(path, json.dumps(content, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    working = temporary_sibling(path)
    try:
        working.write_text(text)
        sync_file(working)
        working.replace(path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Hashed:
    """Write a new file, force it to the disk, and return its size and hash.

    They are taken on the way: what a disk gives back later is compared with what was meant, not with what it held.
    """
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for chunk in chunks:
            whole = memoryview(chunk).cast("B")
            for start in range(0, len(whole), _BLOCK):
                block = whole[start : start + _BLOCK]
                hashing = hasher.submit(digest.update, block)
                written = 0
                while written < len(block):  # a signal, or the last bytes of a full disk
                    written += file.write(block[written:])
                hashing.result()
            size += len(whole)
        _flush(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def read_hashed(path: Path) -> Hashed:
    """Return the size and the hash of a file as it stands."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            digest.update(block)
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def json_text(content: object, indent: int | None = None) -> str:
    """Return content as JSON; a number that is not finite, for which JSON has no word, becomes null."""

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(content), indent=indent)


def append_json_line(path: Path, content: "Facts") -> None:
    """Append one line, as :func:`json_text` has it. Raises :class:`UserError` where the disk takes none."""
    try:
        with path.open("a") as file:
            file.write(json_text(content) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the newest checkpoint is untouched.") from None


def read_object(path: Path) -> "Facts":
    """Return a file's JSON object; empty where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text())
        return content if isinstance(content, dict) else {}
    return {}


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of a JSON-lines file that belong to updates after ``step``, which will be made again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(
            ValueError, KeyError, TypeError
        ):  # a line that a crash left half written
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")
    _replace(path, "".join(kept))


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which replaces ``target`` when the block ends.

    After an error the new folder is deleted, and ``target`` is what it was before.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    working = temporary_sibling(target)
    replaced = temporary_sibling(target, "replaced")
    working.mkdir()
    try:
        yield working
        for path in [working, *working.rglob("*")]:
            if path.is_dir():
                sync_folder(path)
            else:
                sync_file(path)

        if target.exists():
            target.rename(replaced)
        try:
            working.rename(target)
        except BaseException:
            if replaced.exists():
                replaced.rename(target)
            raise
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise

    sync_folder(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def temporary_sibling(path: Path, purpose: str = "") -> Path:
    """Return a name for a temporary file or folder beside ``path``.

    The name is random, not made of the process id: containers that share a file system may use the
    same process ids, and a process that was killed may have left such a name behind.
    """
    words = [".tmp", purpose, path.name, uuid.uuid4().hex[:12]]
    return path.with_name("-".join(word for word in words if word))


def sync_folder(path: Path) -> None:
    """Make renames in this folder durable, where the system can."""
    with contextlib.suppress(OSError):  # some systems cannot open or sync a folder
        handle = os.open(path, os.O_RDONLY)
        try:
            _flush(handle)
        finally:
            os.close(handle)


def sync_file(path: Path) -> None:
    """Force a file to the disk that another library wrote, and that may be read-only."""
    with path.open("rb") as file:
        _flush(file.fileno())


def _flush(handle: int) -> None:
    """Force a file to the disk, down to the medium: on a Mac fsync leaves the bytes in the drive's cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)
