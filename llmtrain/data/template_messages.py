"""Bring the calls and the reasoning of messages into the form that a chat template takes."""

import re
from typing import NamedTuple

from llmtrain.data.messages import REASONING, BadRecord, Message
from llmtrain.data.sources import Fields
from llmtrain.data.template_properties import ArgumentsType, TemplateProperties
from llmtrain.files import json_text

_REASONING_IN_CONTENT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# If the prompt has already begun the reasoning, an answer may leave out the first tag.
_REST_OF_REASONING = re.compile(r"(?:\s*<think>)?(.*?)</think>\s*", re.DOTALL)


class AdaptedMessages(NamedTuple):
    """Messages in the form that a template takes.

    Attributes:
        messages: the messages.
        reasoning: the reasoning of each; an empty text if it has none.
    """

    messages: list[Message]
    reasoning: list[str]


def adapt_messages(messages: list[Message], template: TemplateProperties) -> AdaptedMessages:
    """Bring calls and reasoning into the form that a template takes.

    Raises:
        BadRecord: if the template cannot show the calls of a message.
    """
    adapted_messages = []
    all_reasoning = []
    for number, message in enumerate(messages, start=1):
        adapted, reasoning = _adapt_reasoning(message, template)
        calls = adapted.get("tool_calls")
        if calls:
            title = f"message {number} ({adapted['role']})"
            adapted = {**adapted, "tool_calls": _adapt_calls(calls, template, title)}
        adapted_messages.append(adapted)
        all_reasoning.append(reasoning)
    return AdaptedMessages(adapted_messages, all_reasoning)


def _adapt_reasoning(message: Message, template: TemplateProperties) -> tuple[Message, str]:
    """Move the reasoning of a message to the field in which the template looks for it.

    There are four cases:

    - The template has a field, and the message has reasoning: it goes into the field.
    - The template has a field, but the message has no reasoning: the message has no such field and
      no empty tags.
    - The template has no field, and its prompts do not begin the reasoning: the content stays as it
      is. Reasoning at its beginning is shown as a part of it.
    - The template has no field, but its prompts begin the reasoning: the message loses it.

    Returns:
        The message, and its reasoning; an empty text if it has none.
    """
    if message["role"] != "assistant":
        return message, ""

    pattern = _REST_OF_REASONING if template.opens_reasoning else _REASONING_IN_CONTENT
    adapted, reasoning = _separate_reasoning(message, pattern)
    if template.reasoning_field is None and not template.opens_reasoning:
        adapted["content"] = message["content"]
    elif template.reasoning_field is not None and reasoning:
        adapted[template.reasoning_field] = reasoning
    return adapted, reasoning


def _separate_reasoning(message: Message, pattern: re.Pattern[str]) -> tuple[Message, str]:
    """Return an assistant's message without its reasoning, and the reasoning.

    Args:
        message: holds reasoning in one of the fields :data:`REASONING`, or at the beginning of its
            content.
        pattern: matches reasoning at the beginning of the content.
    """
    rest = {key: value for key, value in message.items() if key not in REASONING}
    candidates = [message[field].strip() for field in REASONING if field in message]
    in_content = pattern.match(message["content"])
    if in_content:
        candidates.append(in_content[1].strip())
        rest["content"] = message["content"][in_content.end() :]
    return rest, next(filter(None, candidates), "")


def _adapt_calls(calls: list[Fields], template: TemplateProperties, title: str) -> list[Fields]:
    """Bring the calls of a message into the form that a template takes.

    Args:
        calls: the calls.
        template: the template.
        title: names the message in errors.
    """
    if template.arguments_type is None:
        raise BadRecord(f"{title} calls a tool, and the chat template shows no calls")
    if len(calls) > 1 and not template.shows_several_calls:
        raise BadRecord(f"{title} makes several calls; the chat template shows one")
    return [_adapt_call(call, template.arguments_type) for call in calls]


def _adapt_call(call: Fields, arguments_type: ArgumentsType) -> Fields:
    """Return a call in the format of OpenAI: name and arguments in a field ``function``.

    Args:
        call: a call in this format, or with name and arguments as its own fields.
        arguments_type: ``string`` to make arguments JSON text instead of an object. Arguments that
            are no object stay as they are.
    """
    moved = ("function", "name", "arguments")
    outer_fields = {key: value for key, value in call.items() if key not in moved}
    if isinstance(call.get("function"), dict):
        # The call has this format. A field that is on both levels, such as an id, stays outside.
        function = {
            key: value for key, value in call["function"].items() if key not in outer_fields
        }
    else:
        # Name and arguments are fields of the call, and move into the function.
        function = {key: value for key, value in call.items() if key in moved}

    arguments = function.get("arguments", {})
    if arguments_type == "string" and isinstance(arguments, dict):
        # Parquet has dates, which json cannot write.
        arguments = json_text(arguments, ensure_ascii=False, default=str)
    return {**outer_fields, "type": "function", "function": {**function, "arguments": arguments}}
