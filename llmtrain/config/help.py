"""The text of a recipe's ``--help``."""

import shutil
import sys
import textwrap
from pathlib import Path

from llmtrain.config.flag_parser import FlagParser
from llmtrain.config.flag_syntax import HELP, Flag

_TEXT_COLUMN = 38  # of the help of each flag
_MOST_COLUMNS = 120
_FEWEST_TEXT_COLUMNS = 11


def help_text(parser: FlagParser, description: str | None, *, show_hidden: bool) -> str:
    """Return the text of ``--help``, or with ``show_hidden`` that of ``--help_all``."""
    lines = [f"usage: {Path(sys.argv[0]).name} [--config FILE.yaml] [flags]"]
    if description:
        lines += ["", description.strip()]
    for title, flags in parser.groups.items():
        shown = [flag for flag in flags if show_hidden or not flag.is_hidden]
        if shown:
            lines += ["", f"{title}:"]
        for flag in shown:
            lines += _lines_of(flag)
    return "\n".join(lines)


def _lines_of(flag: Flag) -> list[str]:
    """Return the lines about a flag: its name and value, and its help in a column of its own."""
    name = f"  {flag.shown_name} {flag.value_name}".rstrip()
    if flag is HELP:
        name = "  -h, --help"
    text = flag.help
    if flag.default_text:
        text = f"{text} (default: {flag.default_text})".lstrip()

    columns = min(_MOST_COLUMNS, shutil.get_terminal_size((110, 24)).columns)
    width = max(columns - _TEXT_COLUMN, _FEWEST_TEXT_COLUMNS)
    lines = textwrap.wrap(text, width) or [""]  # the flag of a recipe's author may have no help
    indented = [" " * _TEXT_COLUMN + line for line in lines]
    if len(name) > _TEXT_COLUMN - 2:
        return [name, *indented]
    indented[0] = name.ljust(_TEXT_COLUMN) + lines[0]
    return indented
