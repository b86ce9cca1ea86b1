"""The options of commands that write text."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.models.generation import Sampling, TextModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, how a token is drawn, and when the text ends."""
    add = parser.add_argument
    add("model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub name")
    add(
        "--max_new_tokens",
        type=int,
        default=200,
        metavar="N",
        help="stop after N tokens (%(default)s)",
    )
    add(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token (%(default)s)",
    )
    add(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="draw from the K likeliest; 0: from all (%(default)s)",
    )
    add("--seed", type=int, default=0, metavar="S", help="same seed, same text (%(default)s)")


def loaded(arguments: argparse.Namespace) -> "tuple[TextModel, Sampling]":
    """Return what was asked for. Raises :class:`UserError` for a value that is out of range, or where is no model."""
    from llmtrain.models.generation import Sampling, TextModel, model_folder

    sampling = Sampling(
        arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.seed
    )
    return TextModel(model_folder(arguments.model)), sampling
