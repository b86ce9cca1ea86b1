"""Check the messages of a record, and bring them into the form that chat templates take."""

from __future__ import annotations  # so that the flags do not import the sources

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    from llmtrain.data.sources import Fields

# The role, the content and all other fields of a message, as chat templates take them.
Message: TypeAlias = dict[str, Any]

# The fields in which templates look for reasoning.
REASONING = ("reasoning_content", "thinking", "reasoning")
# The role that a chat template expects, for every name that data sets give it.
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
}
# The fields of a message that are read here or by most chat templates.
_MESSAGE_FIELDS = frozenset(
    {
        "role",
        "from",
        "content",
        "value",
        "tool_calls",
        "tool_call_id",
        "name",
        "weight",
        *REASONING,
    }
)
_T = TypeVar("_T")


class BadRecord(ValueError):  # noqa: N818 - the record is bad
    """A record that cannot be trained on, with the reason in one line.

    The caller adds the file and the line.
    """


def parse_messages(raw_messages: Sequence[object]) -> list[Message]:
    return [_message(raw, number) for number, raw in enumerate(raw_messages, start=1)]


def _message(raw: object, number: int) -> Message:
    """Check one message and bring it into the form that chat templates take.

    Args:
        raw: the message, as it is in the data set.
        number: its number in the conversation, from 1, for error messages.
    """
    if not isinstance(raw, dict):
        raise BadRecord(f"message {number} is {raw!r:.40}, not an object with a role and content")
    fields: Fields = without_none(raw, everywhere=False)
    role = fields.get("role", fields.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRecord(
            f"message {number} has the role {role!r:.40}; the known roles are {', '.join(_ROLES)}"
        )

    place = f"message {number} ({role})"
    rewritten = ("from", "value", "content", "tool_calls", "weight")
    message = {key: value for key, value in fields.items() if key not in rewritten}
    message["role"] = _ROLES[role]

    raw_content = fields.get("content", fields.get("value"))
    raw_calls = fields.get("tool_calls")
    if role == "function_call":
        raw_calls = _calls_in_value(raw_content, raw_calls, place)
        raw_content = None

    # Without calls the field must be absent: templates test whether it exists.
    tool_calls = _tool_calls(raw_calls, place)
    if tool_calls:
        message["tool_calls"] = tool_calls

    for field in REASONING:
        if field not in message:
            continue
        message[field] = _joined(message[field])
        if not isinstance(message[field], str):
            raise BadRecord(f"{place}: its {field} is not text")

    content = _joined(raw_content)
    if content is None and tool_calls:
        content = ""  # more templates accept empty content than none
    if not isinstance(content, str):
        raise BadRecord(f"{place}: its content is not text{_other_kind(content)}")
    message["content"] = content

    if message["role"] == "assistant" and not tool_calls and not content.strip():
        raise BadRecord(f"{place} is empty")

    # In OpenAI's format, an assistant message of weight 0 is not trained. True and 1.0 are 1.
    weight = fields.get("weight", 1)
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise BadRecord(f"{place}: its weight is {weight!r:.40}, not 0 or 1")
    if weight == 0 and message["role"] == "assistant":
        message["weight"] = 0
    return message


def _calls_in_value(value: object, tool_calls: object, place: str) -> list[object]:
    """Return the calls in the value of a ShareGPT message with the role ``function_call``.

    Args:
        value: JSON text, or what it stands for: an object with a name and arguments, or a list of
            such objects.
        tool_calls: the field ``tool_calls`` of the message, which must be absent.
        place: the message, for error messages.
    """
    if tool_calls:
        raise BadRecord(f"{place} has tool_calls beside the calls in its value")
    calls = from_json(value)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise BadRecord(
            f"{place}: its value is {value!r:.40}, not JSON of a call or a list of calls"
        )
    return calls


def _tool_calls(raw_calls: object, place: str) -> list[Fields]:
    """Check the tool calls of a message and parse their arguments."""
    if not raw_calls:
        return []
    if not isinstance(raw_calls, list) or not all(isinstance(call, dict) for call in raw_calls):
        raise BadRecord(f"{place}: its tool_calls are {raw_calls!r:.40}, not a list of objects")

    calls = [_tool_call(call) for call in raw_calls]
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadRecord(f"{place} calls a tool without a name")
    return calls


def _tool_call(raw: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them.

    In the format of OpenAI they are JSON text. Absent, empty and ``null`` arguments are an empty
    object.
    """
    call: Fields = without_none(raw, everywhere=False)
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = from_json(call.get("arguments") or {})
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return call
    return {**call, "arguments": arguments}


def _joined(content: object) -> object:
    """Join a list of text parts into one text. Return other values unchanged."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return content
    return "".join(field_of(part, "text", str) for part in content)


def _other_kind(content: object) -> str:
    """Return the kind of the first part of a content that is not text, for a message."""
    parts = content if isinstance(content, list) else []
    for part in parts:
        if isinstance(part, dict) and part.get("type") not in ("text", None):
            return f" alone: it has a part of the type {part['type']!r:.40}"
    return ""


def check_weights_of_turns(messages: list[Message], untrained: int) -> None:
    """Raise :class:`BadRecord` if messages of one assistant turn have different weights.

    The first ``untrained`` messages are not trained, so their weights do not matter.
    """
    for number, (message, following) in enumerate(itertools.pairwise(messages), start=1):
        is_same_turn = message["role"] == following["role"] == "assistant"
        if number > untrained and is_same_turn and is_untrained(message) != is_untrained(following):
            raise BadRecord(
                f"messages {number} and {number + 1} (assistant) are one turn, but one of them has "
                "weight 0; give all messages of a turn the same weight"
            )


def is_untrained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") == 0


def trained_messages(messages: list[Message]) -> list[bool]:
    """Return for each message whether its weight lets it be trained."""
    return [not is_untrained(message) for message in messages]


def without_weights(messages: list[Message]) -> list[Message]:
    """Return messages without their weights, as chat templates get them."""
    if not any("weight" in message for message in messages):
        return messages
    return [
        {key: value for key, value in message.items() if key != "weight"} for message in messages
    ]


def other_fields_of(messages: Iterable[Message]) -> Counter[str]:
    """Count the fields of messages that llmtrain does not read.

    A chat template gets them, and may ignore them.

    Returns:
        The number of messages that have each field.
    """
    counts: Counter[str] = Counter()
    for message in messages:
        if not message.keys() <= _MESSAGE_FIELDS:
            counts.update(message.keys() - _MESSAGE_FIELDS)
    return counts


def common_beginning(chosen: list[Message], rejected: list[Message]) -> list[Message]:
    """Return the messages with which two conversations begin."""
    beginning = []
    for message, other in zip(chosen, rejected, strict=False):
        if message != other:
            break
        beginning.append(message)
    return beginning


def without_prompt(answer: list[Message], prompt: list[Message]) -> list[Message]:
    """Drop the prompt from the beginning of an answer that repeats it."""
    if answer[: len(prompt)] == prompt:
        return answer[len(prompt) :]
    return answer


def without_none(value: Any, everywhere: bool) -> Any:
    """Drop the keys of an object whose value is ``None``.

    Args:
        value: the object.
        everywhere: drop such keys in all objects inside it, too. Parquet gives each object the
            fields of all objects.
    """
    if isinstance(value, dict):
        present = {key: inner for key, inner in value.items() if inner is not None}
        if not everywhere:
            return present
        return {key: without_none(inner, everywhere) for key, inner in present.items()}
    if isinstance(value, list) and everywhere:
        return [without_none(inner, everywhere) for inner in value]
    return value


def field_of(record: Fields, name: str, kind: type[_T], default: _T | None = None) -> _T:
    """Return a field of a record.

    Raises:
        BadRecord: if the field has another type than ``kind``, or if it is absent without a
            default.
    """
    value = record.get(name, default)
    if not isinstance(value, kind):
        expected = "text" if kind is str else "a list"
        raise BadRecord(f"field '{name}' is {value!r:.40}, not {expected}")
    return value


def from_json(value: object) -> object:
    """Parse JSON text. Return other values, and text that is not JSON, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
