"""The content of a disk after the power went: a model for test_crashes.py.

A file keeps the bytes that its last fsync saw; a name survives if its folder was synced after it was made. Whatever was
not synced may be there or not, so two extremes are played: ``lost``, where nothing unsynced survives, and ``eager``,
where every name reached the disk before the bytes that it should hold.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

_NAMES = ("rename", "replace", "mkdir", "unlink", "rmdir")


class Disk:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.bytes: dict[int, bytes] = {}  # of each file (by inode) at its last fsync
        self.names: dict[int, dict[str, int]] = {}  # of each folder at its last fsync
        # As long as it is open, nothing else gets the inode of a deleted file.
        self.handles: dict[int, int] = {}
        for path in [root, *root.rglob("*")]:  # what is there now has been for long
            self.synced(path)

    def __del__(self) -> None:
        for handle in self.handles.values():
            os.close(handle)

    def synced(self, path: Path) -> None:
        inode = path.stat().st_ino
        if inode not in self.handles:
            self.handles[inode] = os.open(path, os.O_RDONLY)
        if path.is_dir():
            self.names[inode] = {child.name: child.stat().st_ino for child in path.iterdir()}
        else:
            self.bytes[inode] = path.read_bytes()

    def after_power_cut(self, target: Path, eager: bool) -> Path:
        """Make ``target`` what a restart could find."""
        shutil.rmtree(target, ignore_errors=True)
        live = {path.stat().st_ino: path for path in [self.root, *self.root.rglob("*")]}
        self._restore(self.root.stat().st_ino, target, live, eager)
        return target

    def _restore(self, inode: int, target: Path, live: dict[int, Path], eager: bool) -> None:
        is_folder = live[inode].is_dir() if inode in live else inode in self.names
        if not is_folder:
            target.write_bytes(self.bytes.get(inode, b""))
            return
        target.mkdir()
        names = dict(self.names.get(inode, {}))
        if eager and inode in live:
            names = {child.name: child.stat().st_ino for child in live[inode].iterdir()}
        for name, child in names.items():
            self._restore(child, target / name, live, eager)


@contextlib.contextmanager
def watched(disk: Disk, before_each: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Call ``before_each`` before every fsync and every change of a name, and let ``disk`` know what was synced.

    Yields a function that calls it at other moments.
    """
    fsync, looking = os.fsync, False

    def look(what: str) -> None:
        nonlocal looking
        if not looking:  # what is done while looking is not the process's own doing
            looking = True
            try:
                before_each(what)
            finally:
                looking = False

    def watched_fsync(handle: int) -> None:
        look("fsync")
        fsync(handle)
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if path.is_relative_to(disk.root):
            disk.synced(path)

    def watch(name: str) -> Callable[..., object]:
        original = getattr(os, name)

        def call(*words: object, **more: object) -> object:
            look(name)
            return original(*words, **more)

        return call

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(os, "fsync", watched_fsync))
        for name in _NAMES:
            patches.enter_context(mock.patch.object(os, name, watch(name)))
        yield look
