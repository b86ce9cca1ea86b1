"""The command line of commands that run a recipe."""

import argparse
from pathlib import Path

from llmtrain.errors import UserError


def add_recipe_arguments(
    parser: argparse.ArgumentParser,
    help_text: str = "path of the recipe; it gets all flags not listed here",
) -> None:
    """Add the arguments for a recipe and its flags to a command.

    The command's own options may come before the recipe or among its flags.
    :func:`separate_recipe_flags` tells them apart.

    Args:
        parser: the parser of the command.
        help_text: what ``--help`` says about the recipe.
    """
    parser.add_argument("recipe", help=help_text)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def separate_recipe_flags(arguments: argparse.Namespace, is_recipe: bool = True) -> None:
    """Leave only the recipe's flags in ``arguments.flags``.

    The command's own options among them are parsed into ``arguments``.

    Args:
        arguments: the arguments of the command.
        is_recipe: whether the user means a recipe. Some commands take a run folder, too.

    Raises:
        UserError: if there is no such recipe.
    """
    if is_recipe and not Path(arguments.recipe).is_file():
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
