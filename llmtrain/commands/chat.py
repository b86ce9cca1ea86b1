"""Talk with a model that was fine-tuned on conversations.

It answers line by line, and remembers what was said until an empty line or the end of the input. With --json each
answer is a line.
"""

import argparse
import json
import sys

from llmtrain.commands._sampling import add_model_arguments, loaded
from llmtrain.console import note


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="what the model is told before the conversation"
    )
    without = "ask for answers without reasoning, where the chat template can"
    parser.add_argument("--no_thinking", action="store_true", help=without)
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    model, sampling = loaded(arguments)
    model.check_chats()
    told = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages = list(told)
    while line := _next_line(len(messages) > len(told), silently=arguments.json):
        messages.append({"role": "user", "content": line})
        room = sampling.max_new_tokens
        dropped, prompt = model.fitting_prompt(
            messages, len(told), room, thinking=not arguments.no_thinking
        )
        if dropped:
            note(f"the first {dropped} messages no longer fit into what the model can look at")
            del messages[len(told) : len(told) + dropped]
        if len(prompt) >= model.context:
            note(
                f"these are {len(prompt):,} tokens, and the model can look at {model.context:,}: ask for less"
            )
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
