"""Make single calls of the file system fail in a process, with any errno. The calls are those of failing_calls.c."""

import errno
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_suffix(".c")
KINDS = ("open", "read", "write", "fsync", "rename", "mkdir", "unlink", "flock")

needs_failing_calls = pytest.mark.skipif(
    shutil.which("cc") is None, reason="needs a C compiler, to make file system calls fail"
)


@functools.cache
def library() -> str:
    """Compile the library for LD_PRELOAD, once for each process of tests, and return its path."""
    target = Path(tempfile.mkdtemp(prefix="failing-calls-"), "failing_calls.so")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(target), str(_SOURCE), "-ldl"]
    subprocess.run(command, check=True)
    return str(target)


def preloaded() -> dict[str, str]:
    """Return variables that load the library, if there is a C compiler. No call fails yet."""
    return {"LD_PRELOAD": library()} if shutil.which("cc") else {}


def failing(kind: str, error: str, path: str, after: int = 0, times: int = 1) -> dict[str, str]:
    """Return variables for a process whose file system calls shall fail.

    They work in real processes and in those of tests/forked.py.

    Args:
        kind: one of :data:`KINDS`. A mapped file is read; a copy is written.
        error: the name of an errno, such as ``"EIO"``.
        path: a part of the path of the files whose calls are counted. A rename counts under its
            new name.
        after: how many such calls succeed first.
        times: how many calls then fail.
    """
    assert kind in KINDS
    number = getattr(errno, error)
    return {
        **preloaded(),
        "LLMTRAIN_FAIL": f"{kind}:{number}:{after}:{times}:{path}",
    }


def logging_calls(path: str, log: Path) -> dict[str, str]:
    """Return variables for a process that writes down its calls: lines of a kind and a path.

    Args:
        path: a part of the path of the files whose calls are written down.
        log: the file that gets the lines.
    """
    return {
        **preloaded(),
        "LLMTRAIN_CALLS": path,
        "LLMTRAIN_CALLS_LOG": str(log),
    }
