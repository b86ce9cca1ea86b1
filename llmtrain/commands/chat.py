"""Chat with a model that was fine-tuned on conversations.

Each line of the input is a message to the model, which remembers the conversation. A message of
several lines begins and ends with three double quotes. The end of the input (Ctrl-D) ends the chat.
With --json, each answer is one line of JSON.
"""

import argparse
import sys

from llmtrain.commands.generate import add_model_arguments, load_model
from llmtrain.console import note
from llmtrain.files import json_text

EXAMPLES = ("llmtrain chat runs/finetune",)

_QUOTES = '"""'  # begin and end a message of several lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="system message at the start of the conversation"
    )
    parser.add_argument(
        "--no_thinking",
        action="store_true",
        help="ask for answers without reasoning, if the chat template supports it",
    )
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    model, sampling = load_model(arguments)
    model.check_chats()
    system_messages = []
    if arguments.system:
        system_messages.append({"role": "system", "content": arguments.system})

    if sys.stdin.isatty() and not arguments.json:
        note(f"{_QUOTES} begins and ends a message of several lines; Ctrl-D ends the chat")

    messages = list(system_messages)
    turn = 0
    while True:
        is_first = len(messages) == len(system_messages)
        question = _next_message(is_first, shows_prompt=not arguments.json)
        if question is None:
            break
        if not question.strip():
            continue

        messages.append({"role": "user", "content": question})
        dropped, prompt = model.fitting_prompt(
            messages,
            kept_messages=len(system_messages),
            answer_tokens=sampling.max_new_tokens,
            thinking=not arguments.no_thinking,
        )
        if dropped:
            messages_were = "message was" if dropped == 1 else f"{dropped} messages were"
            note(
                f"the first {messages_were} dropped, because the conversation is longer than the "
                "model's context"
            )
            start = len(system_messages)
            del messages[start : start + dropped]
        if len(prompt) >= model.context:
            note(
                f"this message has {len(prompt):,} tokens, and the model's context is "
                f"{model.context:,}; send a shorter one"
            )
            messages.pop()
            continue

        answer = ""
        for piece in model.stream(prompt, sampling, turn=turn):
            if not arguments.json:
                print(piece, end="", flush=True)
            answer += piece
        turn += 1
        messages.append({"role": "assistant", "content": answer})
        print(json_text(messages[-1]) if arguments.json else "", flush=True)


def _next_message(is_first: bool, shows_prompt: bool) -> str | None:
    """Return the next message of the input; ``None`` if there is no more.

    Args:
        is_first: whether the conversation has no messages yet.
        shows_prompt: print a prompt if the input is a terminal.
    """
    if sys.stdin.isatty() and shows_prompt:
        print("> " if is_first else "\n> ", end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        return None
    if not line.startswith(_QUOTES):
        return line.rstrip("\n")

    text = line.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        line = sys.stdin.readline()
        if not line:
            break
        text += line
    return text.rstrip().removesuffix(_QUOTES).strip("\n")
