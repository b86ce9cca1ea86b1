"""Make one HTML page of one or more runs: curves, phases, memory, differences, checkpoints and incidents.

It is one file, and opens without a network. With --json what the page says is printed, and none is made.
"""

import argparse
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.record.history import History


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder")
    where = "where the page goes (default: report.html in the run, or here for several)"
    parser.add_argument("--output", metavar="FILE", help=where)


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.report.page import data, html

    runs = [History.of(Path(name)) for name in arguments.runs]
    if arguments.json:
        print(json_text(data(runs), indent=1))
        return
    page = Path(arguments.output or (runs[0].folder if len(runs) == 1 else Path()) / "report.html")
    try:
        page.write_text(html(runs), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{page} could not be written: {error.strerror}.") from None
    print(f"report    {page}")
