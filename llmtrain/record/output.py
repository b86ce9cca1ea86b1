"""A copy of what a run prints, for trackers that show it."""

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

OUTPUT_FILE = "output.log"


@contextlib.contextmanager
def copied_output(path: Path) -> Iterator[None]:
    """Append what this process prints to a file, too, while the block runs."""
    with path.open("a") as file:
        out = _Copied(sys.stdout, file)
        err = _Copied(sys.stderr, file)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            yield


class _Copied(io.TextIOBase):
    """A stream whose text is also written to a file, except for frames of progress bars.

    Args:
        stream: the stream.
        file: the file. If it cannot be written, only the copy is incomplete.
    """

    def __init__(self, stream: TextIO, file: TextIO) -> None:
        self.stream = stream
        self.file = file

    def write(self, text: str) -> int:
        count = self.stream.write(text)
        if not text.startswith("\r"):
            with contextlib.suppress(OSError, ValueError):  # a full disk, or closed
                self.file.write(text)
                self.file.flush()
        return count

    def flush(self) -> None:
        self.stream.flush()

    def isatty(self) -> bool:
        return self.stream.isatty()

    def fileno(self) -> int:
        return self.stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding
