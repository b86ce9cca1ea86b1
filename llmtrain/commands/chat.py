"""Chat with a model that was fine-tuned on conversations.

Each line of the input is a message to the model, which remembers the conversation. A message of
several lines begins and ends with three double quotes. The end of the input (Ctrl-D) ends the chat.
With --json, each answer is one line of JSON.
"""

import argparse
import sys
from typing import TYPE_CHECKING

from llmtrain.commands.generate import add_model_arguments, load_model
from llmtrain.console import note, show
from llmtrain.errors import as_user_error, first_line
from llmtrain.files import json_text

if TYPE_CHECKING:
    from llmtrain.data.messages import Message
    from llmtrain.data.prompts import Prompts

EXAMPLES = ("llmtrain chat runs/finetune",)

_QUOTES = '"""'  # begin and end a message of several lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--system", metavar="TEXT", help="system message at the start of the conversation"
    )
    add_model_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    model, prompts, sampling = load_model(arguments)
    prompts.chat_renderer()  # or the model cannot chat
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
        with as_user_error("this conversation cannot be sent", describe=first_line):
            fitting, prompt = fitting_prompt(
                prompts,
                messages,
                kept_messages=len(system_messages),
                # With a long answer, half of the context is left for the conversation.
                max_tokens=max(model.context - sampling.max_new_tokens, model.context // 2),
            )
        if len(prompt) >= model.context:
            note(
                f"this message has {len(prompt):,} tokens, and the model's context is "
                f"{model.context:,}; send a shorter one"
            )
            messages.pop()
            continue

        if len(fitting) < len(messages):
            note(
                f"the first {len(messages) - len(fitting)} messages were dropped, because the "
                "conversation is longer than the model's context"
            )
        messages = fitting
        answer = ""
        for piece in model.stream(prompt, sampling, turn=turn):
            if not arguments.json:
                show(piece)
            answer += piece
        turn += 1
        messages.append({"role": "assistant", "content": answer})
        print(json_text(messages[-1]) if arguments.json else "", flush=True)


def fitting_prompt(
    prompts: "Prompts", messages: "list[Message]", kept_messages: int, max_tokens: int
) -> "tuple[list[Message], list[int]]":
    """Make the prompt for the next answer, without the oldest messages if they do not fit.

    Args:
        prompts: makes prompts.
        messages: the conversation, which ends with a question.
        kept_messages: how many messages at its beginning are never dropped.
        max_tokens: the most tokens of the prompt.

    Returns:
        The messages that are left, and the tokens of the prompt. If even the last question does not
        fit, the prompt with only that and the kept messages is returned, although it is too long.
    """
    ids = prompts.of_messages(messages)
    # Each question is dropped with its answer. The last question has no answer yet.
    while len(ids) > max_tokens and len(messages) > kept_messages + 2:
        messages = [*messages[:kept_messages], *messages[kept_messages + 2 :]]
        ids = prompts.of_messages(messages)
    return messages, ids


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
