"""The whole life of a process that runs a recipe, and the one way out of it."""

import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from llmtrain.console import complain, debugging, rank
from llmtrain.errors import ToldElsewhereError, explained
from llmtrain.launching.launcher import Launcher, check_launch

# For rank 0, which may fail alike, to say what went wrong: the launcher then ends the others before they say it.
_GRACE_SECONDS = 5.0

_COLLECTING = gc.get_threshold()  # of Python, for its search for garbage
_SELDOM = 100_000


def launch(main: Callable[[], object]) -> NoReturn:
    """Run a recipe's ``main`` as this process's whole life, and ``show()`` what it returns: the one way out.

    A finished process meets the others, leaves the group and ends without running destructors: gloo's threads
    sometimes abort a process that is already done. :class:`UserError`, and what else a person can mend, becomes one
    line on stderr and status 2, said once over all ranks; with LLMTRAIN_DEBUG=1 its traceback stands above it.
    """
    status = 0
    gc.set_threshold(
        _SELDOM
    )  # a start makes what stays, and to look for garbage in it takes a fifth of the time
    if Launcher.find().words:  # under a launcher, not where a shell may end before the run does
        _die_with_launcher()
    elif "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() == 1:
        os._exit(
            1
        )  # the launcher died while this process was being loaded: nobody is there to meet
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="replace"
            )  # a terminal that cannot show a sign must not end a run
    try:
        check_launch()
        result = main()
        leave_group()
        if hasattr(result, "show") and rank() == 0:
            result.show()
    except KeyboardInterrupt:
        status = 130
    except SystemExit as error:  # --help
        if isinstance(error.code, str):
            complain(error.code)
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        line = explained(error)
        if line is None or debugging():
            traceback.print_exc()
        if line is not None and not isinstance(error, ToldElsewhereError):
            time.sleep(_GRACE_SECONDS if rank() else 0)
            complain(line)
        status = 1 if line is None else 2
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(status)


def _die_with_launcher() -> None:
    """Linux: stop this process when its launcher is killed, which otherwise leaves its workers training alone."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, linux/prctl.h
        if os.getppid() != parent:  # it died before the call
            os._exit(1)


def freeze_start() -> None:
    """Let Python collect garbage as usual again, but no longer in what the start has made.

    Going through all of that would hold steps up.
    """
    if gc.get_threshold()[0] == _SELDOM:  # in a notebook, what was made so far is somebody else's
        gc.freeze()
        gc.set_threshold(*_COLLECTING)


_LEFT: list[object] = []  # groups, kept to the end of the process


def leave_group() -> None:
    """Meet the other processes for the last time: nobody waits for what one of them does after it.

    The group is left, not freed: DDP's reducer holds it too, and were that the last to let go, with the interpreter's
    lock in its hand, it would wait for a thread of gloo's that may wait for this lock.
    """
    torch = sys.modules.get("torch")  # which --help and an error in a flag do without
    if torch is not None and torch.distributed.is_initialized():  # else it was left before
        from accelerate import PartialState

        state = PartialState()
        state.wait_for_everyone()
        _LEFT.append(torch.distributed.group.WORLD)
        state.destroy_process_group()
