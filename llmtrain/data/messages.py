"""Check the messages or the tokens of a record.

Messages are brought into the form that chat templates take.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np

from llmtrain.data.readers import Fields, shown
from llmtrain.interfaces.batches import IGNORED

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
_REASONING_IN_CONTENT = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
# If the prompt has already begun the reasoning, an answer may leave out the first tag.
_REST_OF_REASONING = re.compile(r"(?:\s*<think>)?(.*?)</think>\s*", re.DOTALL)
# The fields that may say which tokens of a record are trained, besides its labels.
_MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")
_T = TypeVar("_T")


class BadRecord(ValueError):  # noqa: N818 - the record is bad
    """A record that cannot be trained on, with the reason in one line.

    The caller adds the file and the line.
    """


def parse_messages(raw_messages: Sequence[object]) -> list[Message]:
    """Check messages and bring them into the form that chat templates take."""
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
    if role == "function_call" and not raw_calls:  # of ShareGPT: the value is a call, or a list
        raw_calls = raw_content
        raw_content = None

    # Without calls the field must be absent: templates test whether it exists.
    tool_calls = _tool_calls(raw_calls, place) if raw_calls else []
    if tool_calls:
        message["tool_calls"] = tool_calls

    for field in REASONING:
        if field in message:
            message[field] = _text_of(message[field], field, place)
    if raw_content is None and tool_calls:
        raw_content = ""  # more templates accept empty content than none
    content = _text_of(raw_content, "content", place)
    message["content"] = content
    if message["role"] == "assistant" and not tool_calls and not content.strip():
        raise BadRecord(f"{place} is empty")

    # In OpenAI's format, an assistant message of weight 0 is not trained. True and 1.0 are 1.
    weight = fields.get("weight", 1)
    if weight not in (0, 1):
        raise BadRecord(f"{place}: its weight is {weight!r:.40}, not 0 or 1")
    if weight == 0 and message["role"] == "assistant":
        message["weight"] = 0
    return message


def _tool_calls(raw_calls: object, place: str) -> list[Fields]:
    """Return the tool calls of a message in the format of OpenAI.

    The name and the arguments are in a field ``function``. Arguments are an object, as most
    templates take them. In the format of OpenAI they are JSON text. Absent, empty and ``null``
    arguments are an empty object.

    Args:
        raw_calls: a call or a list of calls, which may be JSON text.
        place: for error messages.
    """
    calls = from_json(raw_calls)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadRecord(f"{place}: its calls are {raw_calls!r:.40}, not a list of objects")

    tool_calls = []
    for raw in calls:
        call: Fields = without_none(raw, everywhere=False)
        function = {key: call.pop(key) for key in [*call] if key in ("name", "arguments")}
        if isinstance(call.get("function"), dict):
            function = without_none(call.pop("function"), everywhere=False)
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise BadRecord(f"{place} calls a tool without a name")

        arguments = from_json(function.get("arguments") or {})
        if arguments is None:
            arguments = {}
        elif not isinstance(arguments, dict):
            arguments = function["arguments"]
        # A field that is on both levels, such as an id, stays outside.
        function = {key: value for key, value in function.items() if key not in call}
        function["arguments"] = arguments
        tool_calls.append({**call, "type": "function", "function": function})
    return tool_calls


def _text_of(content: object, field: str, place: str) -> str:
    """Return a text, or a list of text parts as one text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecord(f"{place}: its {field} is {content!r:.40}, not text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadRecord(f"{place}: its {field} has the part {part!r:.40}, which is not text")
    return "".join(field_of(part, "text", str) for part in content)


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
    if name not in record and default is None:
        raise BadRecord(f"field '{name}' is missing")
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


def tokens_of(record: Fields, vocabulary: int) -> np.ndarray:
    """Read a record that is already tokens, without its padding.

    All tokens are targets, except those that ``labels`` or a mask leaves out.

    Args:
        record: the fields of the record.
        vocabulary: the largest token of the tokenizer, plus 1; 0 if it is trained on the data.

    Returns:
        int32 [2, n], the tokens, and a 1 for each that is a target.

    Raises:
        BadRecord: if a field does not fit the tokens, or if the tokens do not fit the tokenizer.
    """
    columns: dict[str, np.ndarray] = {}
    for field in ("input_ids", "labels", *_MASKS):
        values: Any = record.get(field)
        if values is None and field != "input_ids":
            continue
        is_array = isinstance(values, np.ndarray)  # of a file of tokens
        kinds = int | float if field in _MASKS else int  # a mask may hold weights
        are_numbers = isinstance(values, list) and all(isinstance(each, kinds) for each in values)
        if not is_array and not are_numbers:
            raise BadRecord(f"field '{field}' is {shown(values)}, not a list of integers")
        columns[field] = np.array(values, None if field in _MASKS else np.int64)
        if len(values) != len(columns["input_ids"]):
            raise BadRecord(f"field '{field}' has another length than input_ids")

    ids = columns["input_ids"]
    unknown = ids[(ids < 0) | (ids >= vocabulary)]
    if len(unknown):
        raise BadRecord(f"the tokenizer has no token {unknown[0]}; --tokenizer must name another")

    labels = columns.get("labels", ids)
    is_target = labels != IGNORED
    if (is_target & (labels != ids)).any():
        raise BadRecord("labels has another token than input_ids at one place; do not shift labels")
    for field in columns.keys() & _MASKS:
        is_target &= columns[field] != 0

    # Padding has 0 in the attention mask. In some data sets, documents have the numbers 1, 2, ...
    numbers = columns.get("attention_mask", np.ones(len(ids)))
    kept = np.flatnonzero(numbers)
    if (np.diff(kept) != 1).any() or np.diff(numbers[kept]).any():
        raise BadRecord("attention_mask divides the tokens; make a record of each document")
    return np.array([ids, is_target], np.int32)[:, kept]


def separate_reasoning(message: Message, is_begun: bool) -> tuple[Message, str]:
    """Return an assistant's message without its reasoning, and the reasoning.

    Args:
        message: holds reasoning in one of the fields :data:`REASONING`, at the beginning of its
            content, or nowhere.
        is_begun: whether the prompt has already begun the reasoning. The content may then leave out
            the first tag.
    """
    rest = {key: value for key, value in message.items() if key not in REASONING}
    candidates = [message[field].strip() for field in REASONING if field in message]
    pattern = _REST_OF_REASONING if is_begun else _REASONING_IN_CONTENT
    in_content = pattern.match(message["content"])
    if in_content:
        candidates.append(in_content[1].strip())
        rest["content"] = message["content"][in_content.end() :]
    return rest, next(filter(None, candidates), "")
