"""Write text with a trained model, streaming."""

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub name")
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a new text)")
    parser.add_argument(
        "--max_new_tokens", type=int, default=200, metavar="N", help="stop after N tokens (%(default)s)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0 takes the likeliest token (%(default)s)"
    )
    parser.add_argument(
        "--top_k", type=int, default=50, metavar="K", help="draw from the K likeliest; 0: from all (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="same seed, same text (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.models.generation import Sampling, TextModel, model_folder

    sampling = Sampling(arguments.max_new_tokens, arguments.temperature, arguments.top_k, arguments.seed)
    model = TextModel(model_folder(arguments.model))
    print(arguments.prompt, end="", flush=True)
    for piece in model.stream(arguments.prompt, sampling):
        print(piece, end="", flush=True)
    print()
