"""Write text with a trained model, streaming."""

import argparse
import json

from llmtrain.commands._sampling import add_model_arguments, loaded


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a new text)")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    model, sampling = loaded(arguments)
    if arguments.json:
        print(
            json.dumps(
                {
                    "prompt": arguments.prompt,
                    "text": "".join(model.stream(arguments.prompt, sampling)),
                }
            )
        )
        return
    print(arguments.prompt, end="", flush=True)
    for piece in model.stream(arguments.prompt, sampling):
        print(piece, end="", flush=True)
    print()
