"""Distributed training, shown on this machine: each lesson runs real processes, prints what it sees and asserts what it
claims. Without a name: the list."""

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.lessons import LESSONS

_MINUTES = 2.0  # in which a lesson ends, or is ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("lesson", nargs="?", choices=LESSONS, metavar="LESSON", help="one of them")
    parser.add_argument("--all", action="store_true", help="all of them, one after the other")
    parser.add_argument("--json", action="store_true", help="print the list, or which held, for a program")


def run(arguments: argparse.Namespace) -> None:
    if not arguments.all and arguments.lesson is None:
        if arguments.json:
            print(json_text([{"lesson": name, "title": title(name)} for name in LESSONS], indent=1))
            return
        for name in LESSONS:
            print(f"  {name:<14}{title(name)}")
        print("\nllmtrain learn LESSON runs one, in less than a minute; docs/ddp.md reads them in order.")
        return
    asked, failed = LESSONS if arguments.all else [arguments.lesson], []
    began = time.monotonic()
    for name in asked:
        if arguments.all and not arguments.json:
            print(f"===== {name}: {title(name)}", flush=True)
        if not teach(name, sys.stderr if arguments.json else None):
            failed.append(name)
    if arguments.json:
        print(json_text({name: name not in failed for name in asked}, indent=1))
    elif arguments.all:
        print(f"===== {len(LESSONS) - len(failed)} of {len(LESSONS)} lessons hold, in {time.monotonic() - began:.0f} s")
    if failed:
        raise UserError(f"on this machine something else happened than the lesson says: {', '.join(failed)}.")


def title(name: str) -> str:
    return (ast.get_docstring(_tree(name)) or "").splitlines()[0]


def teach(name: str, printed_to: IO[str] | None = None) -> bool:
    """Run a lesson's processes; whether it held."""
    from llmtrain.launch.children import kill, launcher_of

    command = [*launcher_of(_processes(name), None), "-m", "llmtrain.lessons", name]
    env = dict(os.environ) | {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    env.setdefault("OMP_NUM_THREADS", "1")
    process = subprocess.Popen(command, env=env, stdout=printed_to, start_new_session=True)
    try:
        process.wait(timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired:
        print(f"{name} did not end within {_MINUTES:g} minutes", file=sys.stderr)
    finally:
        kill(process)
    return process.returncode == 0


def _processes(name: str) -> int:
    """What the lesson asks for; read, not imported, so that the list comes at once."""
    for node in _tree(name).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "PROCESSES":
            return int(ast.literal_eval(node.value))
    raise AssertionError(name)


def _tree(name: str) -> ast.Module:
    return ast.parse((Path(__file__).parent.parent / "lessons" / f"{name}.py").read_text())
