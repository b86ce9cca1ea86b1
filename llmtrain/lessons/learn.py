"""Show distributed training on this machine in lessons; without a name, list them.

Each lesson runs real processes, prints what it measures, and asserts what it claims. Some have an
exercise: a file with one function to write. A check runs it with random input, on 2 and then on 3
processes. The exit status is 0 if the answer is right, and 1 if it is wrong.
"""

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import IO

from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.lessons import LESSONS
from llmtrain.lessons.exercise import check_answer, exercises

EXAMPLES = (
    "llmtrain learn",
    "llmtrain learn ring",
    "llmtrain learn ring --exercise",
    "llmtrain learn ring --check ring_exercise.py",
)

_TIMEOUT_MINUTES = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "lesson", nargs="?", choices=[*LESSONS], metavar="LESSON", help="name of the lesson to run"
    )
    parser.add_argument("--exercise", action="store_true", help="write LESSON_exercise.py")
    parser.add_argument("--check", metavar="FILE", help="check the answer to the exercise")
    parser.add_argument("--seed", type=int, metavar="S", help="repeat a check with its input")


def run(arguments: argparse.Namespace) -> None:
    name = arguments.lesson
    if arguments.exercise or arguments.check:
        if name not in exercises():
            raise UserError(f"name a lesson that has an exercise: {', '.join(exercises())}.")
        if arguments.check:
            _check_exercise(name, Path(arguments.check), arguments.seed, as_json=arguments.json)
        else:
            _write_exercise(name, as_json=arguments.json)
        return
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
        "them in order.\nllmtrain learn LESSON --exercise writes an exercise: "
        f"{', '.join(exercises())}."
    )


def _write_exercise(name: str, as_json: bool) -> None:
    """Write the exercise of a lesson to a new file."""
    file = Path(f"{name}_exercise.py")
    if file.exists():
        raise UserError(f"{file} is there, and stays; move it away to begin again.")
    file.write_text(exercises()[name])

    if as_json:
        print(json_text({"lesson": name, "file": str(file)}))
    else:
        print(f"{file}: write its function. Then: llmtrain learn {name} --check {file}")


def _check_exercise(name: str, file: Path, seed: int | None, as_json: bool) -> None:
    """Check the answer in a file, print the result, and exit with its status."""
    if not file.is_file():
        raise UserError(f"{file} is no file; llmtrain learn {name} --exercise writes one.")
    if seed is None:
        seed = random.randrange(1_000_000)
    print(f"input     --seed {seed} repeats it", file=sys.stderr)
    result = check_answer(name, file, seed)

    following = [*LESSONS][[*LESSONS].index(name) + 1 :]
    if as_json:
        print(json_text({"lesson": name, "file": str(file), "seed": seed, **result}))
    elif not result["right"]:
        print(f"wrong, on {result['processes']} processes: {result['hint']}")
    elif following:
        print(f"right, on 2 and on 3 processes. Next: llmtrain learn {following[0]}")
    else:
        print("right, on 2 and on 3 processes")
    sys.exit(0 if result["right"] else 1)


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
