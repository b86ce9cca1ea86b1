"""Runs recipes/gpt.py many times, each time in a fork of a process that has made a run before.

Such a run takes a quarter of the seconds that a fork by tests/forked.py takes. Started by
test_failing_disk.py with the flags of that run, and with LD_PRELOAD.

Each line on stdin has flags, environment variables, and the files that get stdout and stderr. Each
line on stdout is an exit status.
"""

import json
import os
import runpy
import signal
import sys
import tempfile

from recipes import gpt
from tests.launching import GPT

_LONGEST_SECONDS = 120


def main() -> None:
    _make_run(sys.argv[1:])
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _become_run(*json.loads(line))
        _, status = os.waitpid(process, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    os._exit(0)  # as llmtrain.launch ends


def _make_run(flags: list[str]) -> None:
    """Make a run in this process, so that everything is imported and compiled."""
    output = os.dup(1)
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LLMTRAIN_CACHE"] = f"{folder}/cache"
        gpt.main([*flags, "--output_dir", f"{folder}/run"])
    os.dup2(output, 1)


def _become_run(flags: list[str], variables: dict[str, str], outputs: list[str]) -> None:
    """Become a process that runs the recipe, and never return."""
    signal.alarm(_LONGEST_SECONDS)
    os.environ.update(variables)
    for descriptor, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    sys.argv = [GPT, *flags]
    runpy.run_path(GPT, run_name="__main__")


if __name__ == "__main__":
    main()
