"""A model of a disk, which tells what is left on it after a power cut. Used by test_crashes.py.

A file keeps the bytes that it had at its last fsync. A name survives if its folder was synced after
the name was made. The disk may have written more than that, so two extremes are tried:

- ``lost``: nothing survives that was not synced.
- ``eager``: every name is on the disk, but files have only their synced bytes.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

_NAME_CHANGES = ("rename", "replace", "mkdir", "unlink", "rmdir")


class Disk:
    """The synced state of all files below a root. Those that are there now count as synced."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.synced_bytes: dict[int, bytes] = {}  # of each file, by inode
        self.synced_names: dict[int, dict[str, int]] = {}  # of each folder: names and inodes
        # An open handle keeps the inode of a deleted file from being used again.
        self.handles: dict[int, int] = {}

        for path in [root, *root.rglob("*")]:
            self.note_sync(path)

    def __del__(self) -> None:
        for handle in self.handles.values():
            os.close(handle)

    def note_sync(self, path: Path) -> None:
        """Take over the content of a file or folder that is being synced."""
        inode = path.stat().st_ino
        if inode not in self.handles:
            self.handles[inode] = os.open(path, os.O_RDONLY)

        if path.is_dir():
            self.synced_names[inode] = inodes_in(path)
        else:
            self.synced_bytes[inode] = path.read_bytes()

    def after_power_cut(self, target: Path, eager: bool) -> Path:
        """Fill the folder ``target`` with the files that a restart would find, and return it."""
        shutil.rmtree(target, ignore_errors=True)
        live = {path.stat().st_ino: path for path in [self.root, *self.root.rglob("*")]}
        self._restore(inode=self.root.stat().st_ino, target=target, live=live, eager=eager)
        return target

    def _restore(self, *, inode: int, target: Path, live: dict[int, Path], eager: bool) -> None:
        is_folder = live[inode].is_dir() if inode in live else inode in self.synced_names
        if not is_folder:
            target.write_bytes(self.synced_bytes.get(inode, b""))
            return

        target.mkdir()
        if eager and inode in live:
            names = inodes_in(live[inode])
        else:
            names = self.synced_names.get(inode, {})
        for name, child in names.items():
            self._restore(inode=child, target=target / name, live=live, eager=eager)


def inodes_in(folder: Path) -> dict[str, int]:
    """Return the inode of each entry of a folder, by its name."""
    return {child.name: child.stat().st_ino for child in folder.iterdir()}


@contextlib.contextmanager
def watched(disk: Disk, before_each: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Call ``before_each`` before every fsync and every change of a name.

    ``disk`` takes note of every fsync.

    Yields:
        A function that calls ``before_each``, for use at other moments.
    """
    real_fsync = os.fsync
    is_in_callback = False

    def call_back(operation: str) -> None:
        nonlocal is_in_callback
        if is_in_callback:  # the callback's own operations do not count
            return

        is_in_callback = True
        try:
            before_each(operation)
        finally:
            is_in_callback = False

    def watched_fsync(handle: int) -> None:
        call_back("fsync")
        real_fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_relative_to(disk.root):
            disk.note_sync(path)

    def watch(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def watched_operation(*args: object, **kwargs: object) -> object:
            call_back(name)
            return original(*args, **kwargs)

        return watched_operation

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, "fsync", watched_fsync))
        for name in _NAME_CHANGES:
            patches.enter_context(mock.patch.object(os, name, watch(name)))
        yield call_back
