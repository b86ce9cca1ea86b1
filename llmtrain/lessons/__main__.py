"""A process of a lesson: ``torchrun --nproc-per-node N -m llmtrain.lessons NAME``."""

import importlib
import os
import sys

from llmtrain import launch
from llmtrain.errors import UserError
from llmtrain.lessons import LESSONS


def main() -> None:
    """Run the lesson that the command line names.

    Raises:
        UserError: if the lesson needs another number of processes.
    """
    name = sys.argv[1]
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != LESSONS[name]:
        raise UserError(
            f"the lesson {name} needs {LESSONS[name]} processes, and {started} started; "
            f"use: llmtrain learn {name}"
        )
    importlib.import_module(f"llmtrain.lessons.{name}").main()


if __name__ == "__main__":
    launch(main)
