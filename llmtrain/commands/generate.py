"""Generate text with a trained model, and print it as it is generated."""

import argparse

from llmtrain.commands._sampling import add_model_arguments, load
from llmtrain.files import json_text

GROUP = "Use a model"
EXAMPLES = ('llmtrain generate runs/gpt --prompt "Return the"',)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a new text)")
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    model, sampling = load(arguments)
    pieces = model.stream(arguments.prompt, sampling)
    if arguments.json:
        print(json_text({"prompt": arguments.prompt, "text": "".join(pieces)}))
        return

    print(arguments.prompt, end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
