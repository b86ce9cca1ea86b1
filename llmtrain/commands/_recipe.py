"""The command line of commands that run a recipe: their own options, and the recipe's."""

import argparse
from collections.abc import Callable
from pathlib import Path

from llmtrain.errors import UserError


def take_recipe(parser: argparse.ArgumentParser, add_options: Callable[[argparse.ArgumentParser], None]) -> None:
    """Take a recipe and its flags; a command's own options stand before or among them (:func:`own_and_recipes`)."""
    parser.add_argument("recipe", help="the recipe's file; other flags are the recipe's")
    add_options(parser)
    options = type(parser)(prog=parser.prog, add_help=False, allow_abbrev=False)
    add_options(options)
    options.add_argument("--json", action="store_true")
    parser.set_defaults(options=options)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def own_and_recipes(arguments: argparse.Namespace) -> None:
    """Leave in ``arguments.flags`` those that are the recipe's. Raises :class:`UserError` where there is no recipe."""
    if not Path(arguments.recipe).is_file():
        raise UserError(f"{arguments.recipe} is not a file; name a recipe, such as recipes/gpt.py.")
    _, arguments.flags = arguments.options.parse_known_args(arguments.flags, arguments)
