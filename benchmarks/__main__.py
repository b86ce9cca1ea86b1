"""Measure all tables, or those that are named. Each writes its figures to benchmarks/results/.

python -m benchmarks [--nanogpt FOLDER] [--text FILE] [TABLE ...]

Every table is a module, whose docstring says what it compares.
"""

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass

from benchmarks.runs import ROOT, flags


@dataclass(frozen=True)
class Table:
    """A module that measures a table, and what it needs.

    Attributes:
        takes_nanogpt: it needs ``--nanogpt``.
        takes_text: it takes ``--text``.
        needs_root: it makes network namespaces.
    """

    takes_nanogpt: bool = False
    takes_text: bool = False
    needs_root: bool = False


TABLES = {
    "overhead": Table(),
    "processes": Table(),
    "trainer": Table(),
    "trl": Table(),
    "distill": Table(),
    "data": Table(),
    "chats": Table(),
    "loss": Table(),
    "scale": Table(),
    "tokenize": Table(),
    "windows": Table(),
    "links": Table(needs_root=True),
    "plan": Table(),
    "steps": Table(takes_nanogpt=True),
    "time_to_loss": Table(takes_nanogpt=True, takes_text=True),
}


def main() -> int:
    """Measure the tables; return 1 if one of them failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=" ".join(TABLES))
    parser.add_argument(
        "--nanogpt", metavar="FOLDER", help="a checkout of github.com/karpathy/nanoGPT"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a text for time_to_loss, such as tinyshakespeare"
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.tables) - set(TABLES))
    if unknown:
        parser.error(f"no table {', '.join(unknown)}: there are {' '.join(TABLES)}")

    failed = []
    for name in arguments.tables or TABLES:
        missing = missing_need(TABLES[name], arguments)
        if missing:
            print(f"{name:<14}skipped: it needs {missing}")
            continue
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if TABLES[name].takes_nanogpt:
            command += flags(nanogpt=arguments.nanogpt)
        if TABLES[name].takes_text:
            command += flags(text=arguments.text)
        if subprocess.run(command, cwd=ROOT, check=False).returncode:
            failed.append(name)

    if failed:
        print(f"failed    {' '.join(failed)}")
    return int(bool(failed))


def missing_need(table: Table, arguments: argparse.Namespace) -> str | None:
    """Return what the table lacks; ``None`` if it can be measured."""
    if table.takes_nanogpt and not arguments.nanogpt:
        return "--nanogpt FOLDER"
    if table.needs_root and os.geteuid() != 0:
        return "root, for network namespaces"
    return None


if __name__ == "__main__":
    sys.exit(main())
