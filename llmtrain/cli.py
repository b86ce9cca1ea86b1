"""Inspect, compare, repeat and use the runs that a recipe has made."""

import argparse
import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path

from llmtrain.config.parser import Parser
from llmtrain.console import prepare_streams
from llmtrain.versions import __version__

# The modules of the commands, by their titles in --help, in the order of a user's work.
GROUPS = {
    "Prepare a run": {
        "doctor": "llmtrain.lab.commands.doctor",
        "init": "llmtrain.commands.init",
        "plan": "llmtrain.lab.commands.plan",
        "tokenize": "llmtrain.commands.tokenize",
    },
    "Look at runs": {
        "compare": "llmtrain.lab.commands.compare",
        "diff": "llmtrain.lab.commands.diff",
        "report": "llmtrain.lab.commands.report",
        "rows": "llmtrain.commands.rows",
        "runs": "llmtrain.commands.runs",
    },
    "Use a model": {
        "chat": "llmtrain.commands.chat",
        "eval": "llmtrain.commands.eval",
        "export": "llmtrain.commands.export",
        "generate": "llmtrain.commands.generate",
    },
    "Check and understand": {
        "learn": "llmtrain.lessons.learn",
        "repeat": "llmtrain.lab.commands.repeat",
        "verify": "llmtrain.commands.verify",
        "xray": "llmtrain.lab.commands.xray",
    },
}
COMMANDS: dict[str, str] = {}
for _commands in GROUPS.values():
    COMMANDS |= _commands

_EPILOG = (
    "llmtrain COMMAND --help explains a command.\n\n"
    "To train, start a recipe: accelerate launch recipes/gpt.py --help"
)


def main(argv: list[str] | None = None) -> None:
    """Run a command.

    An error that the user can fix, such as :class:`UserError`, becomes one line on stderr and exit
    status 2. With LLMTRAIN_DEBUG=1, its traceback is printed above the line.

    Args:
        argv: the words of the command line; by default, those of this process.
    """
    prepare_streams()
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = parse_command(argv)
        from llmtrain.model_folders import limit_hub_waits

        limit_hub_waits()
        try:
            arguments.run(arguments)
        finally:
            sys.stdout.flush()  # here, so that a closed pipe is noticed below
    except BrokenPipeError:  # `llmtrain generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except SystemExit:  # --help ends like this, and needs none of the modules below
        raise
    except BaseException as error:
        from llmtrain.launching.process import report

        sys.exit(report(error))


def parse_command(argv: list[str]) -> argparse.Namespace:
    """Return the arguments of a command. What it does not take are the flags of its recipe.

    Raises:
        UserError: if a command that takes no recipe does not know a word.
    """
    # The first word without a dash is the command: no flag before it takes a value.
    words = [word for word in argv if not word.startswith("-")]
    arguments, others = build_parser(words[:1]).parse_known_args(argv)
    if "flags" in arguments:
        arguments.flags = others
    elif others:
        # The command's own parser names the help that lists what the command takes.
        arguments.parser.refuse_unknown(others)
    command: argparse.Namespace = arguments
    return command


def build_parser(commands: Collection[str] = COMMANDS.keys()) -> Parser:
    """Return the parser of the command line.

    Args:
        commands: names of the commands whose arguments it parses. Their modules are imported, and
            import nothing heavy until the command runs. Of all others it knows only the name.
    """
    parser = Parser(
        prog="llmtrain",
        description=f"{__doc__}\n{_list_commands()}",
        epilog=_EPILOG,
    )
    parser.add_argument("--version", action="version", version=f"llmtrain {__version__}")
    subparsers = parser.add_subparsers(
        metavar="COMMAND",
        help="one of the commands above",
        required=True,
    )
    for name, module_name in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        if name in commands:
            module = importlib.import_module(module_name)
            examples = "\n".join(f"  {example}" for example in module.EXAMPLES)
            subparser.description = module.__doc__
            subparser.epilog = f"examples:\n{examples}"
            module.add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print the result as JSON")
            subparser.set_defaults(run=module.run, parser=subparser)
    return parser


def _list_commands() -> str:
    """Return the commands by group, each with the first line of its module's docstring.

    The modules are not imported, because that would take time.
    """
    lines = []
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, module_name in commands.items():
            path = Path(__file__).parents[1] / f"{module_name.replace('.', '/')}.py"
            with path.open(encoding="utf-8") as source:
                summary = source.readline().strip('"\n')
            lines.append(f"  {name:<9} {summary}")
    return "\n".join(lines)
