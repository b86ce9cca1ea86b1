"""llmtrain COMMAND: inspect, compare, repeat and use what a recipe has made."""

import argparse
import importlib
import os
import sys
import traceback
from typing import NoReturn

from llmtrain._version import __version__
from llmtrain.console import debugging
from llmtrain.errors import UserError, explained, require

COMMANDS = {
    "chat": "talk with a model that was fine-tuned on conversations",
    "diff": "say why two runs differ: where they part, and what could be the cause",
    "doctor": "say whether this machine, or all of a launch, can train",
    "eval": "score a model on tasks of lm-evaluation-harness",
    "export": "write a run's model to a folder; merge an adapter into its base",
    "generate": "write text with a trained model",
    "init": "copy a recipe and a config into a folder to start from",
    "learn": "show distributed training on this machine, a lesson at a time",
    "plan": "say what a run would need, on hardware that it would be paid for",
    "replay": "make an update of a run again, bit for bit, and show its rows by their loss",
    "report": "make a page of runs: curves, what differs between them, and what happened on the way",
    "runs": "list runs with their state, losses and age, or check one and its checkpoints",
    "verify": "check that a recipe is the same run on another layout, or when it is killed",
    "xray": "show what each process of a recipe does when, and what of its communication is hidden",
}
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
        require("--debug" not in argv, "--debug is retired: set LLMTRAIN_DEBUG=1 to see where an error arose.")
        parser = _Parser(prog="llmtrain", description=__doc__, epilog=_EPILOG, allow_abbrev=False)
        parser.add_argument("--version", action="version", version=f"llmtrain {__version__}")
        commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
        for name, summary in COMMANDS.items():
            module = importlib.import_module(f"llmtrain.commands.{name}")
            command = commands.add_parser(name, help=summary, description=module.__doc__, allow_abbrev=False)
            module.add_arguments(command)
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
