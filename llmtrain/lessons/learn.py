"""Show distributed training on this machine in lessons; without a name, list them.

Each lesson runs real processes, prints what it measures, and asserts what it claims.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.lessons import LESSONS

EXAMPLES = (
    "llmtrain learn",
    "llmtrain learn ring",
)

_TIMEOUT_MINUTES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lesson", nargs="?", choices=[*LESSONS], metavar="LESSON", help="name of the lesson to run"
    )


def run(arguments: argparse.Namespace) -> None:
    name = arguments.lesson
    if name is None:
        _list(arguments.json)
        return

    # With --json, stdout has only the result.
    has_passed = teach(name, stdout=sys.stderr if arguments.json else None)
    if arguments.json:
        print(json_text({"lesson": name, "passed": has_passed}))
    if not has_passed:
        raise UserError(f"the lesson {name} failed on this machine; see the output above.")


def _list(as_json: bool) -> None:
    """Print the names and titles of all lessons."""
    if as_json:
        print(json_text([{"lesson": name, "title": title(name)} for name in LESSONS], indent=1))
        return
    for name in LESSONS:
        print(f"  {name:<14}{title(name)}")
    print(
        "\nllmtrain learn LESSON runs one, in less than a minute. docs/explanation/ddp.md shows "
        "them in order."
    )


def title(name: str) -> str:
    """Return the first line of a lesson's docstring.

    The lesson is not imported, because that would load torch.
    """
    with Path(__file__).with_name(f"{name}.py").open() as source:
        return source.readline().strip('"\n')


def teach(name: str, stdout: IO[str] | None = None) -> bool:
    """Run a lesson's processes, and return whether it passed.

    Args:
        name: the name of the lesson.
        stdout: where its output goes; by default, to the output of this process.
    """
    from llmtrain.launching.children import launcher_command, start_command

    command = [*launcher_command(LESSONS[name], None), "-m", "llmtrain.lessons", name]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with start_command(
        command,
        True,  # on the CPU
        None,  # stderr of this process
        stdout,
        OMP_NUM_THREADS=threads,
        HF_HUB_OFFLINE="1",
    ) as process:
        try:
            process.wait(timeout=60 * _TIMEOUT_MINUTES)
        except subprocess.TimeoutExpired:
            print(
                f"{name} did not end within {_TIMEOUT_MINUTES} minutes, and was stopped.",
                file=sys.stderr,
            )
    return process.returncode == 0
