"""llmtrain COMMAND: inspect, compare, repeat and use what a recipe has made."""

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
from llmtrain.errors import UserError, explained

COMMANDS = [
    module.name for module in pkgutil.iter_modules(commands.__path__) if module.name[0] != "_"
]
_EPILOG = "Training is started with a recipe: accelerate launch recipes/gpt.py --help"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help.")


def main(argv: list[str] | None = None) -> None:
    """Run one command; a :class:`UserError`, or what else a person can mend, is one line on stderr and status 2.

    With LLMTRAIN_DEBUG=1 its traceback stands above it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        parser = _Parser(prog="llmtrain", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
        parser.add_argument("--version", action="version", version=f"llmtrain {__version__}")
        added = parser.add_subparsers(
            title="commands", metavar="COMMAND", required=True, parser_class=_Parser
        )
        for name in COMMANDS:
            module = importlib.import_module(f"llmtrain.commands.{name}")
            text = module.__doc__ or name
            command = added.add_parser(
                name, help=text.splitlines()[0], description=text, allow_abbrev=False
            )
            module.add_arguments(command)
            command.add_argument(
                "--json", action="store_true", help="print what it finds as JSON, for a program"
            )
            command.set_defaults(run=module.run)
        arguments = parser.parse_args(argv)
        arguments.run(arguments)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `llmtrain generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except Exception as error:
        line = explained(error)
        if line is None:
            raise
        if debugging():
            traceback.print_exc()
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)
