"""The command line of commands that run a recipe: their own options, and the recipe's."""

import argparse
from pathlib import Path

from llmtrain.errors import UserError


def take_recipe(parser: argparse.ArgumentParser) -> None:
    """Take a recipe and its flags; a command's own options stand before or among them (:func:`own_and_recipes`)."""
    parser.add_argument("recipe", help="the recipe's file; other flags are the recipe's")
    parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(parser=parser)


def own_and_recipes(arguments: argparse.Namespace) -> None:
    """Leave in ``arguments.flags`` those that are the recipe's. Raises :class:`UserError` where there is no recipe."""
    if not Path(arguments.recipe).is_file():
        raise UserError(f"{arguments.recipe} is not a file; name a recipe, such as recipes/gpt.py.")
    own = type(arguments.parser)(prog=arguments.parser.prog, add_help=False, allow_abbrev=False)
    for action in arguments.parser._actions:
        if action.option_strings and action.dest != "help":
            own._add_action(action)
    _, arguments.flags = own.parse_known_args(arguments.flags, arguments)
