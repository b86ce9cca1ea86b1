"""Compare two runs: their final losses, the first step at which they differ, and the cause.

The comparison covers rows, tokens, labels, losses, gradients and weights. The exit status is 0 if
the runs are the same, or differ only by rounding errors on different parallel layouts. It is 1
otherwise.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.console import printable
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.record.history import History

if TYPE_CHECKING:
    from llmtrain.lab.diff import RunDifference

EXAMPLES = ("llmtrain diff runs/gpt runs/gpt-2",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "llmtrain diff RUN_A RUN_B [--json]"
    parser.add_argument("runs", nargs="+", metavar="RUN", help="one of two run folders")


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.diff import diff_lines, diff_runs

    if len(arguments.runs) != 2:
        raise UserError(
            "diff compares two runs: llmtrain diff RUN_A RUN_B. For more of them, llmtrain runs "
            "FOLDER lists their losses, llmtrain report RUN RUN ... draws them on one page, and "
            "llmtrain compare FOLDER tells which settings differ by more than noise."
        )
    name_a, name_b = arguments.runs
    difference = diff_runs(History.of_run(Path(name_a)), History.of_run(Path(name_b)))
    if arguments.json:
        print(json_text(_as_json(difference), indent=1))
    else:
        print(printable("\n".join(diff_lines(difference, name_a, name_b))))

    are_same = difference.first is None and difference.common_entries > 0
    sys.exit(0 if are_same else 1)


def _as_json(difference: "RunDifference") -> dict[str, object]:
    first = difference.first
    return {
        "final_losses": [loss._asdict() for loss in difference.final_losses],
        "first": None if first is None else first._asdict(),
        "all": [divergence._asdict() for divergence in difference.divergences],
        "causes": difference.causes,
        "other_differences": difference.other_differences,
        "largest_loss_difference": difference.largest_loss_difference,
        "common_entries": difference.common_entries,
    }
