"""Files that are complete or absent: written under a temporary name, synced, then renamed.

Reading from a disk that fails for a moment is here, too.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from errno import EACCES, EBADF, EINVAL, EISDIR, ENOSYS, ENOTSUP, EOPNOTSUPP
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, TypeVar

from llmtrain.errors import UserError, first_line

T = TypeVar("T")
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
# A JSON object, such as an entry of run.json. Its reader knows the keys.
JsonObject: TypeAlias = dict[str, Any]

_BLOCK_BYTES = 1 << 24  # a file is hashed and written in blocks of this size
RETRY_PAUSES = (0.5, 1.0, 2.0)  # seconds between the attempts to read from a disk that fails
# What file systems answer that cannot open or sync a folder. Any other error of a sync means that
# something may not be on the disk.
_CANNOT_SYNC = (EINVAL, ENOTSUP, EOPNOTSUPP, EBADF, EACCES, EISDIR, ENOSYS)
# The file is not there, or another kind of file is.
ABSENCES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class UnreadableError(UserError):
    """A file or folder is there, but its disk fails. This says nothing about the content."""


class Hashed(TypedDict):
    """The size of a file, and the hash of its content."""

    bytes: int
    sha256: str


def write_json(path: Path, content: object, durable: bool = True) -> None:
    """Replace a file by JSON, atomically; see :func:`json_text`.

    Args:
        path: the file.
        content: what to write.
        durable: force it to the disk. Otherwise a killed process loses nothing, but a machine that
            loses power may.
    """
    _replace(path, json_text(content, indent=2) + "\n", durable)


def _replace(path: Path, text: str, durable: bool = True) -> None:
    working = temporary_sibling(path)
    try:
        with errors_name(path):
            working.write_text(text)
            if durable:
                sync(working)
            working.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to show
            working.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


@contextlib.contextmanager
def errors_name(path: Path, ignored: Collection[int] = ()) -> Iterator[None]:
    """Let errors of the disk name a file if they name none, as those of writes and syncs do.

    Libraries in Rust, such as tokenizers, raise other types of errors, which become ``OSError``.

    Args:
        path: the file or folder.
        ignored: the numbers of errors that end the block, and are not raised.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        of_rust = re.search(r"\(os error (\d+)\)", str(error))
        number = int(of_rust[1]) if of_rust else getattr(error, "errno", None)
        if number in ignored:
            return
        if number and getattr(error, "filename", None) is None:
            raise OSError(number, os.strerror(number), str(path)) from None
        raise


def write_hashed(path: Path, chunks: Iterable[bytes | memoryview]) -> Hashed:
    """Write a new file, force it to the disk, and return its size and hash.

    The hash covers the bytes in memory, and is computed while they are written. A disk that later
    returns different bytes is therefore noticed.
    """
    digest = hashlib.sha256()
    size = 0
    with errors_name(path), path.open("xb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for chunk in chunks:
            data = memoryview(chunk).cast("B")
            for start in range(0, len(data), _BLOCK_BYTES):
                block = data[start : start + _BLOCK_BYTES]
                hashing = hasher.submit(digest.update, block)
                written = 0
                while written < len(block):  # a signal or a full disk ends a write early
                    written += file.write(block[written:])
                hashing.result()
            size += len(data)
        os.fsync(file.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def read_hashed(path: Path) -> Hashed:
    """Read a file, and return its size and hash."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256")
        return {"bytes": file.tell(), "sha256": digest.hexdigest()}


def hashes_of(files: Iterable[Path]) -> list[Hashed]:
    """Read files, several at a time, and return the size and hash of each."""
    with ThreadPoolExecutor() as readers:
        return list(readers.map(read_hashed, files))


def damaged_files(folder: Path, hashes: Mapping[str, Hashed]) -> list[str]:
    """Read files, and return the names of those that differ from their hashes.

    Args:
        folder: the folder of the files.
        hashes: what :func:`read_hashed` has returned for each file, by its name.

    Raises:
        OSError: if a file cannot be read.
    """
    contents = hashes_of(folder / name for name in hashes)
    return [name for name, content in zip(hashes, contents, strict=True) if content != hashes[name]]


def json_text(content: object, indent: int | None = None, **options: Any) -> str:
    """Return content as JSON, with ``null`` for numbers that are not finite.

    JSON has no way to write those, so only this module may call ``json.dumps``.

    Args:
        content: what to write.
        indent: spaces for each level; ``None`` for a single line.
        options: other arguments of ``json.dumps``.
    """
    try:
        return json.dumps(content, indent=indent, allow_nan=False, **options)
    except ValueError:  # some number is not finite, which is rare
        finite = json.loads(json.dumps(content, **options), parse_constant=lambda name: None)
        return json.dumps(finite, indent=indent, **options)


def digest(content: JsonObject) -> str:
    """Return the sha256 of a JSON object, in hexadecimal digits, whatever the order of its keys."""
    return hashlib.sha256(json_text(content, sort_keys=True).encode()).hexdigest()


def append_json_line(path: Path, content: JsonObject) -> None:
    """Append one line of JSON to a file; see :func:`json_text`.

    Raises:
        UserError: if the line cannot be written, because the disk is full, for example.
    """
    line = json_text(content) + "\n"
    try:
        with path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":  # a kill or a full disk has left half a line
                    file.write(b"\n")
            file.write(line.encode())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the newest checkpoint is untouched.") from None


def read_patiently(path: Path, read: Callable[[], T]) -> T:
    """Return what a function reads, and try again for some seconds if the disk fails.

    A network disk may fail for a moment, and a reader must not conclude anything from that.

    Args:
        path: the file or folder that is read, for the error message.
        read: reads it.

    Raises:
        OSError: at once, if the file is absent or may not be read.
        UnreadableError: if the disk still fails.
    """
    for pause in (0, *RETRY_PAUSES):
        time.sleep(pause)
        try:
            with errors_name(path):
                return read()
        except (*ABSENCES, PermissionError):
            raise
        except OSError as error:
            reason = error.strerror or first_line(error)
    raise UnreadableError(
        f"{path} cannot be read: {reason}; nothing is known to be damaged, so start again when the "
        "disk answers."
    )


def read_object(path: Path) -> JsonObject:
    """Return the JSON object in a file, or an empty one if the file is absent or has no object.

    Raises:
        PermissionError: if the file may not be read.
        UnreadableError: if the disk fails.
    """
    try:
        content = json.loads(read_patiently(path, lambda: path.read_text(encoding="utf-8")))
    except (*ABSENCES, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def names_in(folder: Path) -> list[str] | None:
    """Return the names in a folder, or ``None`` if there is no such folder.

    ``Path.glob`` and ``Path.exists`` hide the errors of a disk.

    Raises:
        UnreadableError: if the disk fails.
    """
    try:
        return read_patiently(folder, lambda: [path.name for path in folder.iterdir()])
    except ABSENCES:
        return None


def write_sealed(path: Path, content: JsonObject) -> None:
    """Replace a file by a JSON object and its digest, which :func:`read_sealed` checks."""
    write_json(path, {**content, "sha256": digest(content)}, durable=False)


def read_sealed(path: Path) -> JsonObject:
    """Return an object that :func:`write_sealed` wrote, or an empty one if it is damaged."""
    content = read_object(path)
    return content if content.pop("sha256", None) == digest(content) else {}


def json_lines(path: Path) -> list[JsonObject]:
    """Return the objects of a JSON-lines file that have a ``step``.

    Lines that cannot be parsed are left out: a crash may have left half a line, and a damaged disk
    bytes that are no text.
    """
    contents = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            contents.append(json.loads(line))
    return [
        content
        for content in contents
        if isinstance(content, dict) and isinstance(content.get("step"), int)
    ]


def copy_lines_up_to(source: Path, target: Path, step: int) -> None:
    """Replace a JSON-lines file by the lines of another one that belong to steps up to ``step``.

    Args:
        source: the file to copy from. If it does not exist, nothing happens.
        target: the file to write, which may be the same: a resumed run makes later steps again.
        step: the last step whose lines are copied.
    """
    if not source.exists():
        return
    with errors_name(source):
        entries = json_lines(source)
    lines = [json_text(line) + "\n" for line in entries if line["step"] <= step]
    _replace(target, "".join(lines))


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a folder to fill, which replaces ``target`` when the block ends.

    After an error the new folder is deleted, and ``target`` is what it was before.

    Raises:
        UserError: if ``target`` is a file, or a link that leads nowhere.
    """
    if target.is_file() or (target.is_symlink() and not target.exists()):
        raise UserError(f"{target} is a file or a dead link, no folder; use another name.")
    target.parent.mkdir(parents=True, exist_ok=True)
    working = temporary_sibling(target)
    replaced = temporary_sibling(target, "replaced")
    working.mkdir()
    try:
        with errors_name(target):
            yield working
        sync_tree(working)
        if target.exists():
            target.rename(replaced)
        working.rename(target)
    except BaseException:
        if replaced.exists():
            replaced.rename(target)
        shutil.rmtree(working, ignore_errors=True)
        raise

    sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def temporary_sibling(path: Path, purpose: str = "") -> Path:
    """Return a name for a temporary file or folder next to ``path``.

    The name is random, not made of the process id: containers that share a file system may use the
    same process ids, and a process that was killed may have left such a name behind.
    """
    words = [".tmp", purpose, path.name, uuid.uuid4().hex[:12]]
    return path.with_name("-".join(word for word in words if word))


def sync_tree(folder: Path) -> None:
    """Force a folder and everything in it to the disk."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)


def sync(path: Path) -> None:
    """Force a file, or the names in a folder, to the disk. They may be read-only."""
    with errors_name(path, ignored=_CANNOT_SYNC if path.is_dir() else ()):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def local_path(name: str, source: str = "", remedy: str = "") -> str:
    """Return the path that a user has named.

    Args:
        name: the path.
        source: what has the name, for the error message, such as ``--output_dir`` and a space.
        remedy: what else takes an address, for the error message.

    Raises:
        UserError: if it is an address such as ``s3://bucket/run``. As a path, that would be a
            folder ``s3:`` of the working directory. Or if the name is not UTF-8, in which libraries
            and the files of a run write it.
    """
    if os.fsencode(name) != name.encode(errors="replace"):  # as libraries in Rust encode it
        raise UserError(
            f"{source}{name}: this name is not UTF-8, or Python is set to read names in another "
            "encoding; use another name, or set PYTHONUTF8=1."
        )
    if re.match(r"[A-Za-z][\w+.-]*://", name) and not Path(name).exists():
        raise UserError(
            f"{source}{name} is an address, not a path; name a folder of this machine"
            f"{remedy or ', such as one where the bucket is mounted'}."
        )
    return name


def cache_folder() -> Path:
    """Return ``$LLMTRAIN_CACHE``, or by default ``llmtrain`` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = os.environ.get("LLMTRAIN_CACHE") or str(base / "llmtrain")
    return Path(local_path(name, "LLMTRAIN_CACHE=")).expanduser()


def shipped_folder(folder: str) -> Path:
    """Return the path of ``recipes`` or ``accelerate_configs``.

    An installed package contains them. In a checkout, they are next to the package.
    """
    package = Path(__file__).parent
    installed = package / folder
    return installed if installed.is_dir() else package.parent / folder


def shipped_config(name: str) -> Path:
    """Return the path of an accelerate config, to show in a message.

    It is relative if the current folder is a checkout.
    """
    relative = Path("accelerate_configs") / f"{name}.yaml"
    return relative if relative.is_file() else shipped_folder("accelerate_configs") / relative.name
