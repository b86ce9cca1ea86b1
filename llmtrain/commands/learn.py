"""Show distributed training on this machine, a lesson at a time; without a name, list the lessons.

Each lesson runs real processes, prints what it sees and asserts what it claims.
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

_MINUTES = 2  # in which a lesson ends, or is ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", nargs="?", choices=LESSONS, metavar="LESSON", help="one of them")
    parser.add_argument("--all", action="store_true", help="all of them, one after the other")


def run(arguments: argparse.Namespace) -> None:
    if not arguments.all and arguments.lesson is None:
        _list(arguments.json)
        return

    lessons = [*LESSONS] if arguments.all else [arguments.lesson]
    failed = []
    began = time.monotonic()
    for name in lessons:
        if arguments.all and not arguments.json:
            print(f"===== {name}: {title(name)}", flush=True)
        if not teach(name, sys.stderr if arguments.json else None):
            failed.append(name)

    if arguments.json:
        print(json_text({name: name not in failed for name in lessons}, indent=1))
    elif arguments.all:
        held = len(lessons) - len(failed)
        seconds = time.monotonic() - began
        print(f"===== {held} of {len(lessons)} lessons hold, in {seconds:.0f} s")
    if failed:
        raise UserError(
            f"on this machine something else happened than the lesson says: {', '.join(failed)}."
        )


def _list(as_json: bool) -> None:
    """Print the names and titles of all lessons."""
    if as_json:
        print(json_text([{"lesson": name, "title": title(name)} for name in LESSONS], indent=1))
        return
    for name in LESSONS:
        print(f"  {name:<14}{title(name)}")
    print(
        "\nllmtrain learn LESSON runs one, in less than a minute; docs/ddp.md reads them in order."
    )


def title(name: str) -> str:
    """Return the first line of a lesson."""
    return _said(r'^"""(.*?)(?:""")?$', name)


def teach(name: str, printed_to: IO[str] | None = None) -> bool:
    """Run a lesson's processes; returns whether it held."""
    from llmtrain.launching.children import launcher_command, started

    command = [
        *launcher_command(int(_said(r"^PROCESSES = (\d+)", name)), None),
        "-m",
        "llmtrain.lessons",
        name,
    ]
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    with started(
        command, True, None, printed_to, OMP_NUM_THREADS=threads, HF_HUB_OFFLINE="1"
    ) as process:
        try:
            process.wait(timeout=60 * _MINUTES)
        except subprocess.TimeoutExpired:
            print(f"{name} did not end within {_MINUTES} minutes", file=sys.stderr)
    return process.returncode == 0


def _said(pattern: str, name: str) -> str:
    """Return a part of a lesson's text; it is not imported, so that the list comes at once."""
    lesson = Path(__file__).parent.parent / "lessons" / f"{name}.py"
    found = re.search(pattern, lesson.read_text(), re.MULTILINE)
    assert found is not None, f"{lesson} has no line like {pattern}"
    return found[1]
