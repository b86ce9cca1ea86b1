"""The terminal: lines for the user, each printed by one process, numbers in them, and Ctrl-C."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from tqdm import tqdm

from llmtrain.redaction import redacted

_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_LONG_DURATIONS = ((86400, "d"), (3600, "h"), (60, "min"))
_SHORT_DURATIONS = ((1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))


def rank() -> int:
    """Return this process's global rank as the launcher has set it in the environment.

    It decides what is printed, also before any process group exists. A run asks its ranks.
    """
    return int(os.environ.get("RANK", "0"))


def debugging() -> bool:
    """Return whether to print the traceback of an error above its line."""
    return os.environ.get("LLMTRAIN_DEBUG", "") not in ("", "0")


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, or a fork of one."""
    kernel = sys.modules.get("ipykernel.kernelapp")
    return kernel is not None and bool(kernel.IPKernelApp.initialized())


def can_show_bars() -> bool:
    """Return whether stderr is a terminal or a notebook; a log file would keep each frame."""
    return sys.stderr.isatty() or in_notebook()


class Interrupt:
    """Handles Ctrl-C: raises KeyboardInterrupt, and remembers that.

    Python drops an exception that a destructor raises, and some libraries catch every exception of
    an import.
    """

    has_come = False

    def __call__(self, number: int, frame: object) -> None:
        self.has_come = True
        raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if Ctrl-C has come, and its exception was dropped."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupt) and handler.has_come:
        raise KeyboardInterrupt


def prepare_streams() -> None:
    """Open the streams that were closed, and let stdout and stderr take every character."""
    # A shell's `>&-` closes a stream, which is then None. The next file would get its number, and
    # what C libraries print.
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character must not end a run.
            stream.reconfigure(errors="replace")


def printable(text: str) -> str:
    """Return text with escapes instead of characters that control a terminal.

    Line breaks and tabs stay. Data, models and names of files may hold such characters.
    """
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: ascii(match[0])[1:-1], text)


def show(text: str) -> None:
    """Print the text of a model: as it is, except that it cannot control a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def write_line(line: str, stream: TextIO) -> None:
    """Write a line to stdout or stderr, in one piece.

    ``print`` writes the end of a line by itself. A line of another thread could come in between.
    """
    stream.write(f"{line}\n")
    stream.flush()


def say(label: str, text: str, stream: TextIO | None = None) -> None:
    """Print a line of the log on stdout, from rank 0 only.

    What takes longer than three seconds is announced on stderr, by whichever rank does it.

    The run continues if stdout cannot be written, because nobody reads it any more, as after
    ``| head``, or because its disk is full. Lines on stderr are lost in the same way.
    """
    if stream is not None or rank() == 0:
        with contextlib.suppress(OSError):
            write_line(printable(labelled(label, text)), stream or sys.stdout)


def labelled(label: str, text: str) -> str:
    """Return a line with a label in a column of its own, without secrets."""
    return redacted(f"{label:<9} {text}")


def note(message: str) -> None:
    """Print a line on stderr about a problem that does not stop the run."""
    with contextlib.suppress(OSError):
        write_line(f"note: {printable(redacted(message))}", sys.stderr)


def print_error(message: str) -> None:
    """Print an error on stderr, below a progress bar. Ranks other than 0 name themselves."""
    source = f"rank {rank()}: " if rank() else ""
    with contextlib.suppress(OSError):
        tqdm.write(f"error: {source}{printable(redacted(message))}", file=sys.stderr)
        sys.stderr.flush()


def pluralize(n: int, word: str) -> str:
    """Return a number and its noun, such as ``2 processes``."""
    if n == 1:
        return f"1 {word}"
    ending = "es" if word.endswith(("s", "ch")) else "s"
    return f"{n:,} {word}{ending}"


def is_or_are(n: int) -> str:
    """Return the verb that follows so many things."""
    return "is" if n == 1 else "are"


# --- quantities, in the unit that fits the number


def size_text(size: float) -> str:
    """Return a number of bytes in binary units, such as ``2.75 GiB``."""
    if size < 1024:
        return f"{size:.0f} B"
    return _scaled(size, _SIZES)


def duration_text(seconds: float) -> str:
    """Return a duration, such as ``90.0 min``: above two minutes in a unit of which it has two."""
    if seconds == 0:
        return "0 s"
    for unit_seconds, unit in _LONG_DURATIONS:
        if seconds >= 2 * unit_seconds:
            return f"{_digits(seconds / unit_seconds)} {unit}"
    return _scaled(seconds, _SHORT_DURATIONS)


def rate_text(number: float, unit: str) -> str:
    """Return a number with the prefix that fits, such as ``51.5 GFLOPs``."""
    return _scaled(number, [(factor, f"{prefix}{unit}") for factor, prefix in _PREFIXES])


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number in the largest unit in which it is at least 1, or in the smallest unit.

    Args:
        number: the number.
        units: the size and the name of each unit, the largest first.
    """
    for factor, unit in units:
        if number >= factor:
            return f"{_digits(number / factor)} {unit}"
    factor, unit = units[-1]
    return f"{_digits(number / factor)} {unit}"


def _digits(number: float) -> str:
    """Return a number to three digits, and with all digits before the point."""
    if number >= 100:
        return f"{number:,.0f}"
    if number >= 10:
        return f"{number:.1f}"
    return f"{number:.2f}"
