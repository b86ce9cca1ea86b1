"""Lines for the user, each printed by one process."""

import contextlib
import os
import sys

from tqdm import tqdm

from llmtrain.secrets import redacted


def rank() -> int:
    """Return this process's global rank, also before any process group exists.

    The launcher sets it in the environment.
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


def say(label: str, text: str) -> None:
    """Print a line of the log on stdout, from rank 0 only.

    The run continues if nobody reads stdout any more, as after ``| head``.
    """
    if rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(labelled(label, text), flush=True)


def labelled(label: str, text: str) -> str:
    """Return a line with a label in a column of its own."""
    return f"{label:<9} {text}"


def note(message: str) -> None:
    """Print a line on stderr about a problem that does not stop the run."""
    print(f"note: {redacted(message)}", file=sys.stderr, flush=True)


def print_error(message: str) -> None:
    """Print an error on stderr, below a progress bar. Ranks other than 0 name themselves."""
    source = f"rank {rank()}: " if rank() else ""
    tqdm.write(f"error: {source}{redacted(message)}", file=sys.stderr)
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
