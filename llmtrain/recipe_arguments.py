"""The command line of commands that run a recipe."""

import argparse
from pathlib import Path

from llmtrain.errors import UserError


def add_recipe_arguments(
    parser: argparse.ArgumentParser,
    help_text: str = "path of the recipe; it gets all flags not listed here",
) -> None:
    """Add the arguments for a recipe and its flags to a command.

    The recipe gets all words that the command does not take, in ``arguments.flags``.

    Args:
        parser: the parser of the command.
        help_text: what ``--help`` says about the recipe.
    """
    parser.add_argument("recipe", help=help_text)
    parser.set_defaults(flags=[])


def check_recipe(path: str) -> None:
    """Raise :class:`UserError` if there is no file of this path."""
    if not Path(path).is_file():
        raise UserError(
            f"{path} is not a file; name a recipe before its flags, such as recipes/gpt.py in "
            "a clone of the repository, or a copy made by llmtrain init."
        )
