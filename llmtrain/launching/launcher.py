"""The launcher that started this process, if there is one."""

import contextlib
import os
from pathlib import Path

import psutil

_LAUNCHERS = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
}


def parent_launcher() -> str | None:
    """Return the program of the parent process if it is ``accelerate launch`` or ``torchrun``."""
    # Psutil fails for another user's process, and for one that has ended.
    with contextlib.suppress(psutil.Error, OSError):
        parent = psutil.Process().parent()
        command = parent.cmdline() if parent is not None else []
        # The command is python, perhaps -m, and the program.
        for word in command[1:3]:
            program = Path(word).name
            if program in _LAUNCHERS:
                return program
    return None


def has_launcher() -> bool:
    """Return whether a launcher started this process, which waits for its exit status."""
    is_in_group = int(os.environ.get("WORLD_SIZE") or 1) > 1
    return is_in_group or "TORCHELASTIC_RUN_ID" in os.environ or parent_launcher() is not None
