"""The command line of commands that run a recipe."""

import argparse
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.launching.children import read_accelerate_config


def add_recipe_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a recipe and its flags to a command.

    The command's own options may come before the recipe or among its flags.
    :func:`separate_recipe_flags` tells them apart.
    """
    parser.add_argument("recipe", help="path of the recipe; it gets all flags not listed here")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def separate_recipe_flags(arguments: argparse.Namespace) -> None:
    """Leave only the recipe's flags in ``arguments.flags``.

    The command's own options among them are parsed into ``arguments``.

    Raises:
        UserError: if there is no such recipe.
    """
    if not Path(arguments.recipe).is_file():
        raise UserError(
            f"{arguments.recipe} is not a file; name a recipe, such as recipes/gpt.py in a clone "
            "of the repository, or a copy made by llmtrain init."
        )

    command_parser = arguments.parser
    options_parser = type(command_parser)(
        prog=command_parser.prog, add_help=False, allow_abbrev=False
    )
    for action in command_parser._actions:
        if action.option_strings and action.dest != "help":
            options_parser._add_action(action)
    _, arguments.flags = options_parser.parse_known_args(arguments.flags, arguments)


def process_count(arguments: argparse.Namespace, default: int) -> int:
    """Return how many processes to start: those of ``--processes`` or of the accelerate config.

    Args:
        arguments: with ``processes`` and ``config_file``.
        default: the number if the user has given neither.

    Raises:
        UserError: if the user asked for none.
    """
    if arguments.processes is not None:
        processes: int = arguments.processes
    elif arguments.config_file:
        processes = read_accelerate_config(arguments.config_file)["num_processes"]
    else:
        processes = default

    if processes < 1:
        raise UserError(f"--processes {processes}: start at least one process.")
    return processes
