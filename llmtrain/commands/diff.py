"""Say why two runs differ: the first step at which rows, losses, gradients or weights differ, and possible causes.

The status is 0 if they are the same run, apart from rounding if their layouts differ; otherwise it is 1.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.files import json_text
from llmtrain.record.history import History

if TYPE_CHECKING:
    from llmtrain.report.difference import Comparison


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("one", metavar="RUN_A", help="a run folder")
    parser.add_argument("other", metavar="RUN_B", help="another run folder")


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.report.difference import compare, lines

    one = History.of(Path(arguments.one))
    other = History.of(Path(arguments.other))
    comparison = compare(one, other)
    if arguments.json:
        print(json_text(_as_json(comparison), indent=1))
    else:
        print("\n".join(lines((arguments.one, arguments.other), comparison)))

    are_same = comparison.first is None and comparison.readings > 0
    sys.exit(0 if are_same else 1)


def _as_json(comparison: "Comparison") -> dict[str, object]:
    first = comparison.first
    return {
        **comparison._asdict(),
        "first": None if first is None else first._asdict(),
        "all": [divergence._asdict() for divergence in comparison.all],
    }
