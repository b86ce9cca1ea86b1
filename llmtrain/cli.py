"""Inspect, compare, repeat and use the runs that a recipe has made."""

import argparse
import importlib
import os
import sys
from collections.abc import Collection
from typing import NamedTuple

from llmtrain.config.parser import Parser
from llmtrain.console import prepare_streams
from llmtrain.versions import __version__


class Command(NamedTuple):
    """A command, as ``llmtrain --help`` lists it.

    Attributes:
        module: the module that is imported when the command is given.
        summary: the first line of its description.
    """

    module: str
    summary: str


# The commands by their titles in --help, in the order of a user's work.
GROUPS = {
    "Prepare a run": {
        "doctor": Command(
            module="llmtrain.lab.commands.doctor",
            summary="Check whether this machine, or several together, can train.",
        ),
        "init": Command(
            module="llmtrain.commands.init",
            summary="Copy a recipe, and an accelerate config that fits this machine, into a "
            "folder.",
        ),
        "plan": Command(
            module="llmtrain.lab.commands.plan",
            summary="Predict the memory and the time of a run, without training anything.",
        ),
        "tokenize": Command(
            module="llmtrain.commands.tokenize",
            summary="Make the rows that a recipe would train on, as a set for runs on any machine.",
        ),
    },
    "Look at runs": {
        "compare": Command(
            module="llmtrain.lab.commands.compare",
            summary="Tell a gain from noise: compare settings by the eval losses of runs with "
            "several seeds.",
        ),
        "diff": Command(
            module="llmtrain.lab.commands.diff",
            summary="Compare two runs: their final losses, the first step at which they differ, "
            "and the cause.",
        ),
        "report": Command(
            module="llmtrain.lab.commands.report",
            summary="Make an HTML page about one or more runs: metrics, phases, memory, "
            "differences, events.",
        ),
        "rows": Command(
            module="llmtrain.commands.rows",
            summary="Print the rows of a step, of a run or a recipe, as text with marked targets.",
        ),
        "runs": Command(
            module="llmtrain.commands.runs",
            summary="List runs with their state, losses and age; or check the checkpoints of one "
            "run.",
        ),
    },
    "Use a model": {
        "chat": Command(
            module="llmtrain.commands.chat",
            summary="Chat with a model that was fine-tuned on conversations.",
        ),
        "eval": Command(
            module="llmtrain.commands.eval",
            summary="Measure the loss, perplexity and bits per byte of a data set under a model.",
        ),
        "export": Command(
            module="llmtrain.commands.export",
            summary="Write the model of a run to its own folder, or merge a LoRA adapter.",
        ),
        "generate": Command(
            module="llmtrain.commands.generate",
            summary="Generate text with a trained model, and print it as it is generated.",
        ),
    },
    "Check and understand": {
        "learn": Command(
            module="llmtrain.lessons.learn",
            summary="Show distributed training on this machine in lessons; without a name, list "
            "them.",
        ),
        "repeat": Command(
            module="llmtrain.lab.commands.repeat",
            summary="Run a recipe with several seeds, one after the other, to see how much its "
            "loss varies.",
        ),
        "verify": Command(
            module="llmtrain.commands.verify",
            summary="Check that a recipe trains the same on another layout, or after it was "
            "killed.",
        ),
        "xray": Command(
            module="llmtrain.lab.commands.xray",
            summary="Run a few steps of a recipe, and show when each process does what.",
        ),
    },
}
COMMANDS: dict[str, Command] = {}
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
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name)
        if name in commands:
            module = importlib.import_module(command.module)
            examples = "\n".join(f"  {example}" for example in module.EXAMPLES)
            subparser.description = module.__doc__
            subparser.epilog = f"examples:\n{examples}"
            module.add_arguments(subparser)
            subparser.add_argument("--json", action="store_true", help="print the result as JSON")
            subparser.set_defaults(run=module.run, parser=subparser)
    return parser


def _list_commands() -> str:
    """Return the commands with the first line of their descriptions, by group."""
    lines = []
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:"]
        for name, command in commands.items():
            lines.append(f"  {name:<9} {command.summary}")
    return "\n".join(lines)
