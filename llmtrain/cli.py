"""Inspect, compare, repeat and use the runs that a recipe has made."""

import argparse
import importlib
import os
import pkgutil
import sys
from types import ModuleType
from typing import Any, NoReturn

from llmtrain import commands
from llmtrain._version import __version__
from llmtrain.config.unknown_names import did_you_mean, hint_for
from llmtrain.console import debugging
from llmtrain.errors import (
    MODEL_MEMORY_REMEDY,
    UserError,
    explain,
    print_traceback_with_causes,
)

_MODULES = [module.name for module in pkgutil.iter_modules(commands.__path__)]
COMMANDS = [name for name in _MODULES if not name.startswith("_")]
# The titles in --help, in the order of a user's work; each command names its own.
GROUPS = ("Prepare a run", "Look at runs", "Use a model", "Check and understand")
_EPILOG = (
    "llmtrain COMMAND --help explains a command.\n\n"
    "To train, start a recipe: accelerate launch recipes/gpt.py --help"
)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are :class:`UserError`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._words = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        # A misspelled flag may be the reason why a required one is missing.
        unknown = self._unknown_flags()
        if unknown and message.startswith("the following arguments are required"):
            self._words = []
            self.refuse_unknown(unknown)
        end = "" if message.endswith("?") else ";"
        raise UserError(f"{message}{end} see {self.prog} --help.")

    def _unknown_flags(self) -> list[str]:
        """Return the flags of the command line that a command does not know.

        Other flags may belong to a recipe, if the command takes one.
        """
        takes_others = any(
            action.nargs in (argparse.REMAINDER, argparse.PARSER) for action in self._actions
        )
        if takes_others:
            return []
        known = self._option_string_actions
        flags = [word for word in self._words if word.startswith("--")]
        return [flag for flag in flags if flag.partition("=")[0] not in known]

    def refuse_unknown(self, words: list[str]) -> NoReturn:
        """Raise :class:`UserError` for words of the command line that this parser does not know."""
        flags = [word.partition("=")[0] for word in words if word.startswith("-")]
        if not flags or not words[0].startswith("-"):
            self.error(f"'{words[0]}' is neither a flag nor the value of one")

        known = [option for option in self._option_string_actions if option.startswith("--")]
        described = []
        for flag in flags:
            hint = hint_for(flag.lstrip("-").replace("-", "_"), known, "commands")
            described.append(
                f"unknown flag {flag}{f': {hint}' if hint else did_you_mean(flag, known)}"
            )
        self.error("; ".join(described))


def main(argv: list[str] | None = None) -> None:
    """Run a command.

    An error that the user can fix, such as :class:`UserError`, becomes one line on stderr and exit
    status 2. With LLMTRAIN_DEBUG=1, its traceback is printed above the line.

    Args:
        argv: the words of the command line; by default, those of this process.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments, unknown = build_parser().parse_known_args(argv)
        if unknown:
            # The command's own parser names the help that lists what the command takes.
            arguments.parser.refuse_unknown(unknown)
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
        line = explain(error, MODEL_MEMORY_REMEDY)
        if line is None:
            raise
        if debugging():
            print_traceback_with_causes(error)
        print(f"error: {line}", file=sys.stderr)
        sys.exit(2)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. Their modules import nothing heavy until they run."""
    modules = {name: importlib.import_module(f"llmtrain.commands.{name}") for name in COMMANDS}
    parser = _Parser(
        prog="llmtrain",
        description=f"{__doc__}\n{_list_commands(modules)}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    subparsers = parser.add_subparsers(
        metavar="COMMAND",
        help="one of the commands above",
        required=True,
        parser_class=_Parser,
    )
    for name, module in modules.items():
        examples = "\n".join(f"  {example}" for example in module.EXAMPLES)
        command = subparsers.add_parser(
            name,
            description=module.__doc__,
            epilog=f"examples:\n{examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        command.set_defaults(run=module.run, parser=command, group=module.GROUP)
    return parser


def _list_commands(modules: dict[str, ModuleType]) -> str:
    """Return the commands with the first line of their descriptions, by group."""
    lines = []
    for group in GROUPS:
        lines += ["", f"{group}:"]
        for name, module in modules.items():
            if group == module.GROUP:
                summary = (module.__doc__ or "").splitlines()[0]
                lines.append(f"  {name:<9} {summary}")
    return "\n".join(lines)
