"""Files that are whole or absent: written beside their place, forced to the disk, then renamed into it."""

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmtrain.errors import UserError


def write_json(path: Path, content: Any) -> None:
    """Replace ``path`` by the content, atomically."""
    handle, name = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o666 & ~_umask())  # mkstemp ignores the umask
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def append_json_line(path: Path, content: dict[str, Any]) -> None:
    """One more line; a number that is not finite, which JSON has no word for, becomes null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in content.items()}
    try:
        with path.open("a") as file:
            file.write(json.dumps(plain) + "\n")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the newest checkpoint is untouched.") from None


def forget_after(path: Path, step: int) -> None:
    """Drop the lines of a JSON-lines file that belong to updates after ``step``, which will be made again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError):  # a line cut off by a crash
            if json.loads(line)["step"] <= step:
                kept.append(line)
    working = path.with_suffix(".tmp")
    working.write_text("".join(f"{line}\n" for line in kept))
    working.replace(path)


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` when the block ends; after an error nothing of it is left."""
    target.parent.mkdir(parents=True, exist_ok=True)
    working = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir()
    try:
        yield working
        for path in [working, *working.rglob("*")]:
            sync_folder(path) if path.is_dir() else _sync_file(path)
        if target.exists():
            shutil.rmtree(target)
        working.rename(target)
    except BaseException:
        shutil.rmtree(working, ignore_errors=True)
        raise
    sync_folder(target.parent)


def sync_folder(path: Path) -> None:
    """Make renames in this folder durable, where the system can."""
    with contextlib.suppress(OSError):  # some systems cannot open or sync a folder
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
