"""Records of the usual formats -> conversations, as chat templates take them."""

import json
from collections.abc import Collection
from typing import NamedTuple, TypeVar

from llmtrain.data.sources import Fields
from llmtrain.data.template import REASONING, BadRow, Message

# A format and the fields that it cannot do without; where two fit a record, the first has it.
_NEEDED = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
FORMATS = tuple(_NEEDED)
_ROLES = {
    **{role: role for role in ("system", "developer", "user", "assistant", "tool")},
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
}
_T = TypeVar("_T")


class Conversation(NamedTuple):
    """A conversation as chat templates take it."""

    messages: list[Message]
    tools: list[Fields] | None


def recognise(fields: Collection[str]) -> str | None:
    """Return the one of :data:`FORMATS` that a record with these fields has; ``None`` where it is no conversation."""
    return next((format for format, needed in _NEEDED.items() if needed <= set(fields)), None)


def conversation_of(record: Fields, format: str) -> Conversation:
    """Read a record of one of :data:`FORMATS`; raises :class:`BadRow` where the assistant says nothing in it.

    A prompt and a completion are texts or lists of messages. ``None`` counts as absent, everywhere.
    """
    record = {field: _without_none(value) for field, value in record.items() if value is not None}
    given: list[object] = []
    if format in ("sharegpt", "alpaca") and (system := _field(record, "system", str, "")):
        given.append({"role": "system", "content": system})
    if format == "prompt_completion":
        for field, role in (("prompt", "user"), ("completion", "assistant")):
            said = record.get(field)
            given += said if isinstance(said, list) else [{"role": role, "content": _field(record, field, str)}]
    elif format == "alpaca":
        question = [_field(record, "instruction", str), _field(record, "input", str, "")]
        given.append({"role": "user", "content": "\n\n".join(filter(None, question))})
        given.append({"role": "assistant", "content": _field(record, "output", str)})
    else:
        given += _field(record, "messages" if format == "messages" else "conversations", list)
    if not given:
        raise BadRow("it has no messages")
    messages = [_message(message, number) for number, message in enumerate(given, start=1)]
    if all(message["role"] != "assistant" for message in messages):
        raise BadRow("the assistant has no turn in it")
    tools = {"tools": _from_json(record.get("tools") or [])}
    return Conversation(messages, _field(tools, "tools", list) or None)


def _without_none(value: object) -> object:
    """Drop what is ``None``: Parquet gives every object the fields of all of them."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [*map(_without_none, value)] if isinstance(value, list) else value


def _field(record: Fields, name: str, kind: type[_T], default: _T | None = None) -> _T:
    value = record.get(name, default)
    if not isinstance(value, kind):
        raise BadRow(f"field '{name}' is {value!r:.40}, not {'text' if kind is str else 'a list'}")
    return value


def _from_json(value: object) -> object:
    """Return what a JSON string holds; anything else unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def _message(given: object, number: int) -> Message:
    if not isinstance(given, dict):
        raise BadRow(f"message {number} is {given!r:.40}, not an object with a role and content")
    name = given.get("role", given.get("from"))
    if not isinstance(name, str) or name not in _ROLES:
        raise BadRow(f"message {number} has the role {name!r:.40}; known are {', '.join(_ROLES)}")
    message = {key: value for key, value in given.items() if key not in ("from", "value", "content", "tool_calls")}
    message["role"] = _ROLES[name]

    calls = given.get("tool_calls")
    if calls:  # "no calls" is best said by saying nothing: templates ask whether the field is there
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(f"message {number} ({name}): its tool_calls are {calls!r:.40}, not a list of objects")
        message["tool_calls"] = [*map(_tool_call, calls)]
        for call in message["tool_calls"]:
            function = call["function"] if isinstance(call.get("function"), dict) else call
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise BadRow(f"message {number} ({name}): it calls a tool without a name")

    for field in REASONING:
        if field in message:
            message[field] = _joined(message[field])
            if not isinstance(message[field], str):
                raise BadRow(f"message {number} ({name}): its {field} is not text")
    content = _joined(given.get("content", given.get("value")))
    if content is None and calls:
        content = ""  # which more templates take than a field that is absent
    if not isinstance(content, str):
        raise BadRow(f"message {number} ({name}): its content is not text")
    message["content"] = content
    if message["role"] == "assistant" and not calls and not content.strip():
        raise BadRow(f"message {number} ({name}) is empty")
    return message


def _joined(content: object) -> object:
    """Return the text of a list of parts that are texts; anything else unchanged."""
    if isinstance(content, list) and all(isinstance(one, dict) and one.get("type") == "text" for one in content):
        return "".join(_field(one, "text", str) for one in content)
    return content


def _tool_call(call: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them; OpenAI has the JSON of one."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments") or {})
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
