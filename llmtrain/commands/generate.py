"""Write text with a trained model, streaming."""

import argparse
import json

from llmtrain.commands._sampling import add_sampling_arguments, sampling_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub name")
    parser.add_argument("--prompt", default="", help="text to continue (default: begin a new text)")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.models.generation import TextModel, model_folder

    sampling = sampling_of(arguments)
    model = TextModel(model_folder(arguments.model))
    if arguments.json:
        print(json.dumps({"prompt": arguments.prompt, "text": "".join(model.stream(arguments.prompt, sampling))}))
        return
    print(arguments.prompt, end="", flush=True)
    for piece in model.stream(arguments.prompt, sampling):
        print(piece, end="", flush=True)
    print()
