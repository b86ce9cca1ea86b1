"""Lines for a person: one a fact, from one process."""

import contextlib
import os
import sys

from tqdm import tqdm

from llmtrain.secrets import redacted


def rank() -> int:
    """Return this process's global rank, as its launcher told it, also before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def debugging() -> bool:
    """Return whether a traceback is wanted above the line of an error."""
    return os.environ.get("LLMTRAIN_DEBUG", "") not in ("", "0")


def say(label: str, text: str) -> None:
    """Print a line of the start banner, from rank 0 alone. A reader that has gone (`| head`) does not end the run."""
    if rank() == 0:
        with contextlib.suppress(BrokenPipeError):
            print(f"{label:<9} {text}", flush=True)


def note(message: str) -> None:
    """Print a line on stderr about something that the run goes on without."""
    print(f"note: {redacted(message)}", file=sys.stderr, flush=True)


def complain(message: str) -> None:
    """Print a line on stderr, below a progress bar. It says who speaks where that is not rank 0."""
    who = f"rank {rank()}: " if rank() else ""
    tqdm.write(f"error: {who}{redacted(message)}", file=sys.stderr)
    sys.stderr.flush()
