"""Plant small bugs in the package, one at a time, and see which tests find them.

``python tools/planted_bugs.py draw BEFORE AFTER SEED`` draws sixteen from the functions that are
equal in two commits, one or two in each package, and writes tools/planted_bugs.json.
``python tools/planted_bugs.py run`` plants each in this tree, runs the tests of its package and
five system files, and restores the module.
"""

import ast
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIST = ROOT / "tools" / "planted_bugs.json"
BUGS = 16
SYSTEM_FILES = ("exit", "faults", "finetune", "resume", "states")
# Packages whose tests are not in a folder of the same name.
ROOT_TESTS = ("commands", "config", "launching", "llmtrain")
OPPOSITES = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


class Bug(NamedTuple):
    """A line of a function, and what it becomes."""

    module: str
    function: str
    line: str
    planted: str


def bugs_of(module: str, function: ast.FunctionDef, source: str) -> Iterator[Bug]:
    """Yield the bugs of a function: comparisons turned, and constants that are another value."""
    lines = source.splitlines()
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            right = node.comparators[0]
            start, end = node.left.end_col_offset, right.col_offset
            is_one_line = node.left.end_lineno == right.lineno
            new = f" {OPPOSITES[type(node.ops[0])]} "
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            start, end = node.col_offset, node.end_col_offset
            is_one_line = True
            new = str(not node.value if isinstance(node.value, bool) else node.value + 1)
        else:
            continue
        line = lines[node.lineno - 1]
        if is_one_line and line.isascii() and lines.count(line) == 1:
            yield Bug(module, function.name, line, line[:start] + new + line[end:])


def functions_of(source: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a module by name and code."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    return {f"{node.name} {ast.unparse(node)}": node for node in nodes}


def draw(before: str, after: str, seed: int) -> list[Bug]:
    """Return bugs of functions that are equal in two commits: one of each package, then more."""
    chance = random.Random(seed)
    by_package: dict[str, list[Bug]] = {}
    for path in _git("ls-tree", "-r", "--name-only", after, "llmtrain").splitlines():
        if not path.endswith(".py") or not _git("ls-tree", before, path):
            continue
        source = _git("show", f"{after}:{path}")
        old_functions = functions_of(_git("show", f"{before}:{path}"))
        package = path.split("/")[1] if path.count("/") > 1 else "llmtrain"
        for name, function in functions_of(source).items():
            if name in old_functions:
                by_package.setdefault(package, []).extend(bugs_of(path, function, source))

    rounds = [chance.sample(sorted(bugs), 2) for _, bugs in sorted(by_package.items())]
    first = [bugs[0] for bugs in rounds]
    return first + chance.sample([bugs[1] for bugs in rounds], BUGS - len(first))


def run(bug: Bug) -> str:
    """Plant a bug, and return the first test that finds it, or what happened instead."""
    path = ROOT / bug.module
    source = path.read_text()
    package = bug.module.split("/")[1] if bug.module.count("/") > 1 else "llmtrain"
    own_tests = [ROOT / "tests" / package]
    if package in ROOT_TESTS or not own_tests[0].is_dir():
        own_tests = sorted((ROOT / "tests").glob("test_*.py"))
    files = [*own_tests, *(ROOT / f"tests/system/test_{name}.py" for name in SYSTEM_FILES)]
    pytest = [sys.executable, "-m", "pytest", "-qx", "-n", "2", "--dist", "loadfile"]
    command = [*pytest, *map(str, files)]
    path.write_text(source.replace(bug.line, bug.planted))
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    finally:
        path.write_text(source)
    found = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return found[0].split(" - ")[0] if found else f"no test finds it (status {done.returncode})"


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    if sys.argv[1] == "draw":
        bugs = draw(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        LIST.write_text(json.dumps([bug._asdict() for bug in bugs], indent=2) + "\n")
    else:
        for bug in [Bug(**bug) for bug in json.loads(LIST.read_text())]:
            start = time.monotonic()
            result = run(bug)
            seconds = time.monotonic() - start
            print(f"{seconds:4.0f} s  {bug.module} {bug.function}: {bug.planted.strip()}")
            print(f"        {result}", flush=True)
