"""Make an HTML page about one or more runs: metrics, phases, memory, differences, events.

The page is a single file and opens without a network. With --json, the command prints the content
of the page and writes no file.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from llmtrain.console import labelled
from llmtrain.errors import UserError
from llmtrain.files import json_text, local_path
from llmtrain.record.history import History

EXAMPLES = (
    "llmtrain report runs/gpt",
    "llmtrain report runs/gpt runs/gpt-2 --output both.html",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument(
        "--output",
        type=local_path,
        metavar="FILE",
        help="the file to write (default: report.html in the run folder, or in the current folder "
        "if there are several runs)",
    )


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.lab.report.page import html, summary

    runs = [History.of_run(Path(folder)) for folder in arguments.runs]
    if arguments.json:
        print(json_text(summary(runs), indent=1))
        return

    path = Path(arguments.output) if arguments.output else _default_path(runs)
    try:
        path.write_text(html(runs), encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} could not be written: {error.strerror}.") from None
    print(labelled("report", str(path)))


def _default_path(runs: Sequence[History]) -> Path:
    folder = runs[0].folder if len(runs) == 1 else Path()
    return folder / "report.html"
