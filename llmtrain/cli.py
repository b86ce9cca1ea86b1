"""Inspect, compare, repeat and use the runs that a recipe has made."""

import argparse
import importlib
import os
import pkgutil
import sys
import traceback
from typing import NoReturn

from llmtrain import commands
from llmtrain._version import __version__
from llmtrain.console import debugging
from llmtrain.errors import UserError, explain

_MODULES = [module.name for module in pkgutil.iter_modules(commands.__path__)]
COMMANDS = [name for name in _MODULES if not name.startswith("_")]
_EPILOG = "To train, start a recipe: accelerate launch recipes/gpt.py --help"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def main(argv: list[str] | None = None) -> None:
    """Run a command.

    An error that the user can fix, such as :class:`UserError`, becomes one line on stderr and exit
    status 2. With LLMTRAIN_DEBUG=1, its traceback is printed above the line.

    Args:
        argv: the words of the command line; by default, those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments, unknown = _parser().parse_known_args(argv)
        if unknown:
            # The command's own parser names the help that lists what the command takes.
            arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        try:
            arguments.run(arguments)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed below
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `llmtrain generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        line = explain(error)
        if line is None:
            raise
        if debugging():
            traceback.print_exc()
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Their modules import nothing heavy until they run."""
    parser = _Parser(prog="llmtrain", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=_Parser
    )
    for name in COMMANDS:
        module = importlib.import_module(f"llmtrain.commands.{name}")
        description = module.__doc__ or name
        command = subparsers.add_parser(
            name,
            help=description.splitlines()[0],
            description=description,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.set_defaults(run=module.run, parser=command)
    return parser
