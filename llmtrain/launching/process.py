"""Run a recipe as a process: from its start to the exit status."""

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import psutil

from llmtrain.console import Interrupt, debugging, prepare_streams, print_error, rank
from llmtrain.errors import (
    FailedElsewhereError,
    ReportedElsewhereError,
    UserError,
    explain,
    print_traceback_with_causes,
)
from llmtrain.launching.launch_request import check_launch, has_launcher, parent_launcher
from llmtrain.model_folders import limit_hub_waits

# The other ranks wait this long before they print an error. If rank 0 fails for the same reason, it
# prints the error first, and the launcher ends the others.
_GRACE_SECONDS = 5.0

# When Python searches for garbage: its own thresholds, and the one that applies during the start.
_USUAL_THRESHOLDS = gc.get_threshold()
_START_THRESHOLD = 100_000


def launch(main: Callable[[], object]) -> NoReturn:
    """Run a recipe's ``main``, ``show()`` its result, and exit.

    If the recipe succeeds, the process waits for the other ranks, leaves the process group, and
    exits without running destructors, because gloo's threads sometimes abort a process that has
    finished.

    A run that a signal stopped before its end exits with the ``exit_status`` of the result, such
    as 130 after Ctrl-C. Under a launcher it exits with 0, because the launcher would report another
    status as a crash, or start the run again.

    An error that the user can fix, such as :class:`UserError`, becomes one line on stderr and exit
    status 2. All ranks together print it once. With LLMTRAIN_DEBUG=1, its traceback is printed
    above the line.

    Args:
        main: what to run.
    """
    # What the start creates stays. Searching it for garbage takes a fifth of the start.
    gc.set_threshold(_START_THRESHOLD)
    interrupt = Interrupt()
    status = 0
    try:
        signal.signal(signal.SIGINT, interrupt)  # a run has another handler while it is open
        _stop_with_launcher()
        prepare_streams()
        check_launch()
        limit_hub_waits()
        result = main()  # kept until the process exits, so that no destructor runs
        leave_group()
        if hasattr(result, "show") and rank() == 0:
            result.show()
        if not has_launcher():
            status = getattr(result, "exit_status", 0)
    except BaseException as error:
        # A library may have turned the interrupt into an error of its own.
        status = 130 if interrupt.has_come else report(error)

    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status)


def report(error: BaseException) -> int:
    """Print an error that is being handled, and return the exit status."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):  # --help ends like this
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print_error(str(error.code))
        return 1

    line = explain(error)
    if line is None or debugging():
        print_traceback_with_causes(error)
    if line is None:
        return 1
    if not isinstance(error, ReportedElsewhereError):
        if rank() != 0:
            time.sleep(_GRACE_SECONDS)
        print_error(line)
    if isinstance(error, FailedElsewhereError):
        # The launcher ends the rank that failed as soon as this one exits, perhaps in the middle of
        # its traceback.
        time.sleep(_GRACE_SECONDS)
    return 2


def _stop_with_launcher() -> None:
    """Stop this process when its launcher ends, or at once if it has already ended."""
    # Without a launcher, the parent may be a shell, which may end before the run does.
    if parent_launcher() is not None:
        if sys.platform == "linux":
            # Otherwise the workers of a launcher that was killed would keep training.
            launcher = os.getppid()
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, linux/prctl.h
            if os.getppid() != launcher:  # it died before the call
                os._exit(1)
    elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == 1:
        # The launcher died while this process was loading. No other rank is left to meet.
        os._exit(1)


def seconds_since_start() -> float:
    """Return for how many seconds this process has existed; 0 in a notebook.

    The process of a notebook may have started hours before a run.
    """
    if "ipykernel" in sys.modules:
        return 0.0
    return max(0.0, time.time() - psutil.Process().create_time())


def restore_garbage_collection() -> None:
    """Let Python collect garbage as usual again, except in what exists now.

    Searching all of that would delay steps.
    """
    # In a notebook `launch` does not run, and other code owns what exists.
    if gc.get_threshold()[0] == _START_THRESHOLD:
        gc.freeze()
        gc.set_threshold(*_USUAL_THRESHOLDS)


# Process groups that this process has left. They are kept until it exits.
_LEFT_GROUPS: list[object] = []


def check_first_run() -> None:
    """Raise :class:`UserError` if this process has left its group of several, after a run."""
    if _LEFT_GROUPS and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a multi-process launch can do only one run; start a new launch for the next, or make "
            "all runs in one process."
        )


def leave_group() -> None:
    """Wait for all ranks, and leave the process group, if this process is in one.

    Afterwards no rank waits for another.

    The group is kept in memory, because DDP's reducer refers to it too. If the reducer was the last
    to free it, it would hold the interpreter's lock and wait for a thread of gloo, which may wait
    for the same lock.
    """
    torch = sys.modules.get("torch")  # not loaded for --help or a mistake in a flag
    if torch is None or not torch.distributed.is_initialized():
        return
    from accelerate import PartialState

    state = PartialState()
    state.wait_for_everyone()
    _LEFT_GROUPS.append(torch.distributed.group.WORLD)
    state.destroy_process_group()
