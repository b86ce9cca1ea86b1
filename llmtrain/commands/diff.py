"""Say why two runs differ: the first update at which rows, losses, gradients or weights part, and possible causes.

Status 0: they are the same run, but for rounding where they were spread otherwise; else 1.
"""

import argparse
import sys
from pathlib import Path

from llmtrain.files import json_text
from llmtrain.record.history import History


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN_A", help="a run's folder")
    parser.add_argument("other", metavar="RUN_B", help="another's")


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.report.difference import compare, lines

    found = compare(*(History.of(Path(name)) for name in (arguments.one, arguments.other)))
    if arguments.json:
        first = found.first._asdict() if found.first else None
        partings = [parting._asdict() for parting in found.all]
        print(json_text(found._asdict() | {"first": first, "all": partings}, indent=1))
    else:
        print("\n".join(lines((arguments.one, arguments.other), found)))
    sys.exit(0 if found.first is None and found.readings else 1)
