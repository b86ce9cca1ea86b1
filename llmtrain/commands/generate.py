"""Generate text with a trained model, and print it as it is generated.

Without --prompt, the prompts come from the input if it is not a terminal, such as "< FILE", and
each of them is answered in turn. A prompt is a line of text. A line may also be a JSON object with
a "prompt", which is a text or a list of messages, or with "messages" or "conversations", and with
"tools". The chat template renders messages as in training. With --json, each result is one line of
JSON: the object with the "text" added.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from llmtrain.console import note, show
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import json_text

if TYPE_CHECKING:
    from llmtrain.data.formats import Conversation
    from llmtrain.data.prompts import Prompts
    from llmtrain.files import JsonObject
    from llmtrain.models.generation import Sampling, TextModel

EXAMPLES = (
    'llmtrain generate runs/gpt --prompt "Return the"',
    "llmtrain generate runs/finetune --temperature 0 --json",
)


class _Prompt(NamedTuple):
    """A prompt of the user.

    Attributes:
        source: where it comes from, for messages, such as ``line 3 of the input``.
        content: the text to continue, or the conversation to answer.
        record: the JSON object that the result is added to.
    """

    source: str
    content: "str | Conversation"
    record: "JsonObject"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", help="text to continue (default: begin a new text)")
    add_model_arguments(parser)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the model, how it is asked, how tokens are sampled, and when the text ends."""
    parser.add_argument(
        "model",
        metavar="RUN_OR_MODEL",
        help="folder of a run, a checkpoint or a model, or a hub name",
    )
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument(
        "--thinking",
        action="store_true",
        default=None,
        help="ask for answers with reasoning, if the chat template can (default: as trained)",
    )
    thinking.add_argument(
        "--no_thinking",
        dest="thinking",
        action="store_false",
        help="ask for answers without reasoning",
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
        help="sample from the K most likely tokens; 0: from all tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="the same seed gives the same answers (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> None:
    model, prompts, sampling = load_model(arguments)
    for number, prompt in enumerate(_prompts(arguments.prompt)):
        if number and not arguments.json:
            print()
        with as_user_error(prompt.source, describe=first_line):
            if isinstance(prompt.content, str):
                ids = prompts.of_text(prompt.content)
            else:
                ids = prompts.of_messages(prompt.content.messages, prompt.content.tools)
        if len(ids) >= model.context:
            note(
                f"{prompt.source} has {len(ids):,} tokens, and the model's context is "
                f"{model.context:,}; the beginning is cut off"
            )

        pieces = model.stream(ids, sampling, number)
        if arguments.json:
            print(json_text({**prompt.record, "text": "".join(pieces)}), flush=True)
            continue
        if isinstance(prompt.content, str):
            show(prompt.content)
        for piece in pieces:
            show(piece)
        print()


def load_model(arguments: argparse.Namespace) -> "tuple[TextModel, Prompts, Sampling]":
    """Load the model that the arguments name.

    Returns:
        The model, what makes its prompts, and the sampling settings.

    Raises:
        UserError: if a value is out of range, or if there is no model.
    """
    from llmtrain.data.prompts import Prompts
    from llmtrain.model_folders import model_folder
    from llmtrain.models.generation import Sampling, TextModel

    sampling = Sampling(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        seed=arguments.seed,
    )
    model = TextModel(model_folder(arguments.model))
    prompts = Prompts(model.tokenizer, model.stop_token_ids, arguments.thinking)
    return model, prompts, sampling


def _prompts(prompt: str | None) -> Iterator[_Prompt]:
    """Yield the prompt of the user, or those in the lines of the input as they come.

    Lines without text are left out. If there are no others, the prompt is empty.

    Raises:
        UserError: if a line begins like a JSON object, and is none with a prompt, or if nobody can
            answer it.
    """
    from llmtrain.data.formats import PROMPT_FIELDS, prompt_of
    from llmtrain.data.messages import from_json

    if prompt is not None or sys.stdin.isatty():
        yield _Prompt("--prompt", prompt or "", {"prompt": prompt or ""})
        return

    is_empty = True
    for number, line in enumerate(_lines_of_input(), start=1):
        text = line.strip("\ufeff\r\n")
        if not text.strip():
            continue

        is_empty = False
        source = f"line {number} of the input"
        record = from_json(text)
        if isinstance(record, dict) and not record.keys().isdisjoint(PROMPT_FIELDS):
            with as_user_error(source, describe=first_line):
                content = prompt_of(record)
            yield _Prompt(source, content, record)
        elif re.match(r"\s*[\[{]\s*\"", text):
            raise UserError(
                f'{source} is not a JSON object with "prompt", "messages" or "conversations".'
            )
        else:
            yield _Prompt(source, text, {"prompt": text})
    if is_empty:
        yield _Prompt("the input", "", {"prompt": ""})


def _lines_of_input() -> Iterator[str]:
    try:
        yield from sys.stdin
    except UnicodeDecodeError:
        raise UserError("the input is not UTF-8 text.") from None
