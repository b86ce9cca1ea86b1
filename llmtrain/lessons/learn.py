"""Show distributed training on this machine in lessons; without a name, list them.

Each lesson runs real processes, prints what it measures, and asserts what it claims.
"""

import argparse
import os
import re
import subprocess
import sys
import time
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
        "lesson", nargs="?", choices=LESSONS, metavar="LESSON", help="name of the lesson to run"
    )
    parser.add_argument("--all", action="store_true", help="run all lessons, one after the other")


def run(arguments: argparse.Namespace) -> None:
    if arguments.all and arguments.lesson is not None:
        raise UserError(f"learn {arguments.lesson} --all: name a lesson, or give --all.")
    if not arguments.all and arguments.lesson is None:
        _list(arguments.json)
        return

    lessons = list(LESSONS) if arguments.all else [arguments.lesson]
    failed = []
    start = time.monotonic()
    for name in lessons:
        if arguments.all and not arguments.json:
            print(f"===== {name}: {title(name)}", flush=True)
        # With --json, stdout has only the results.
        has_passed = teach(name, stdout=sys.stderr if arguments.json else None)
        if not has_passed:
            failed.append(name)

    if arguments.json:
        print(json_text({name: name not in failed for name in lessons}, indent=1))
    elif arguments.all:
        passed = len(lessons) - len(failed)
        seconds = time.monotonic() - start
        print(f"===== {passed} of {len(lessons)} lessons passed in {seconds:.0f} s")
    if failed:
        raise UserError(
            f"these lessons failed on this machine: {', '.join(failed)}; see the output above."
        )


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
    """Return the first line of a lesson's docstring."""
    return _search_source(name, r'^"""(.*?)(?:""")?$')


def teach(name: str, stdout: IO[str] | None = None) -> bool:
    """Run a lesson's processes, and return whether it passed.

    Args:
        name: the name of the lesson.
        stdout: where its output goes; by default, to the output of this process.
    """
    from llmtrain.launching.children import launcher_command, start_command

    processes = int(_search_source(name, r"^PROCESSES = (\d+)"))
    command = [*launcher_command(processes, None), "-m", "llmtrain.lessons", name]
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


def _search_source(name: str, pattern: str) -> str:
    """Return the text that the group of a pattern matches in a lesson's source.

    The lesson is not imported, because that would load torch.
    """
    path = Path(__file__).with_name(f"{name}.py")
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    assert match is not None, f"{path} has no line that matches {pattern}"
    return match[1]
