"""Talk with a model that was fine-tuned on conversations.

It answers line by line, and remembers what was said until an empty line or the end of the input. With --json each
answer is a line.
"""

import argparse
import json
import sys

from llmtrain.commands._sampling import add_sampling_arguments, sampling_of
from llmtrain.console import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="RUN_OR_MODEL", help="a run's folder, a model's folder or a hub name")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    parser.add_argument(
        "--no_thinking", action="store_true", help="ask for answers without reasoning, where the chat template can"
    )
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    from llmtrain.models.generation import TextModel, model_folder

    sampling = sampling_of(arguments)
    model = TextModel(model_folder(arguments.model))
    model.check_chats()
    told = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(told)
    while line := _next_line(len(messages) > len(told), silently=arguments.json):
        messages.append({"role": "user", "content": line})
        length, thinking = sampling.max_new_tokens, not arguments.no_thinking
        dropped, prompt = model.fitting_prompt(messages, len(told), length, thinking)
        if dropped:
            note(f"the first {dropped} messages no longer fit into what the model can look at")
            del messages[len(told) : len(told) + dropped]
        if len(prompt) >= model.context:
            note(f"these are {len(prompt):,} tokens, and the model can look at {model.context:,}: ask for less")
            messages.pop()
            continue
        answer = ""
        for piece in model.stream(prompt, sampling):
            if not arguments.json:
                print(piece, end="", flush=True)
            answer += piece
        messages.append({"role": "assistant", "content": answer})
        print(json.dumps(messages[-1]) if arguments.json else "", flush=True)


def _next_line(again: bool, silently: bool) -> str:
    """Return what the person says; nothing where there is no more. A pipe is read silently."""
    if sys.stdin.isatty() and not silently:
        print("\n> " if again else "> ", end="", flush=True)
    return sys.stdin.readline().rstrip("\n")
