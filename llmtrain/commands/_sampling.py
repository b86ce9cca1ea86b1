"""The arguments of commands that generate text."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmtrain.models.generation import Sampling, TextModel


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, how tokens are sampled, and when the text ends."""
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="folder of a run, a checkpoint or a model, or a hub name",
    )
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=200,
        metavar="N",
        help="stop after N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="divide the logits by T; 0: take the likeliest token (default: %(default)s)",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=50,
        metavar="K",
        help="sample from the K likeliest tokens; 0: from all tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="the same seed gives the same text (default: %(default)s)",
    )


def load(arguments: argparse.Namespace) -> "tuple[TextModel, Sampling]":
    """Load the model that the arguments name, and return it with the sampling settings.

    Raises:
        UserError: if a value is out of range, or if there is no model.
    """
    from llmtrain.model_folders import model_folder
    from llmtrain.models.generation import Sampling, TextModel

    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    return TextModel(model_folder(arguments.model)), sampling
