"""Tells the user how to extend a finished run, instead of starting a new one."""

import shlex
import sys
from pathlib import Path

from llmtrain.config import COMMAND_LINE
from llmtrain.console import say
from llmtrain.launching.launcher import user_command
from llmtrain.secrets import redacted
from llmtrain.training.settings import OptimConfig


def say_how_to_extend(folder: Path, optim: OptimConfig) -> None:
    """Print the command that extends a finished run to the steps of this one.

    Args:
        folder: the folder of the finished run, which is shorter.
        optim: the settings of this run, which starts from the beginning.
    """
    flags = ["--resume_from_checkpoint", str(folder)]
    command = user_command() if _is_from_command_line(optim) else []
    if command:
        advice = f"to extend it instead: {shlex.join([*redacted(command), *flags])}"
    else:
        advice = f"to extend it instead, add {shlex.join(flags)}"
    say("finished", f"{folder} is a shorter version of this run; {advice}")


def _is_from_command_line(optim: OptimConfig) -> bool:
    """Return whether the flags of this run are those of the process, and not a list in Python."""
    names = {name for name, origin in optim.origins.items() if origin == COMMAND_LINE}
    words = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in sys.argv[1:]}
    return not names or bool(names & words)
