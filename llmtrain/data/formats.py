"""Read records of chat and preference data in the usual formats, as chat templates take them."""

import itertools
import json
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

from llmtrain.data.chat_template import REASONING, BadRow, Message
from llmtrain.data.sources import Fields

# The fields that a record of each format must have. If a record fits two formats, the first wins.
_CHAT_FIELDS = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
_PREFERENCE_FIELDS = {
    "pairs": {"chosen", "rejected"},
    "examples": {"prompt", "completion", "label"},
}
FORMATS = tuple(_CHAT_FIELDS)
# All fields that a record may have, in any format; --columns can give each another name.
RECORD_FIELDS = tuple(
    dict.fromkeys(
        [
            "text",
            *itertools.chain.from_iterable(map(sorted, _CHAT_FIELDS.values())),
            *itertools.chain.from_iterable(map(sorted, _PREFERENCE_FIELDS.values())),
            "system",
            "input",
            "tools",
        ]
    )
)

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
    "function": "tool",
    "observation": "tool",
}
_T = TypeVar("_T")


class Conversation(NamedTuple):
    """A conversation, in the form that chat templates take."""

    messages: list[Message]
    tools: list[Fields] | None


class PreferenceRecord(NamedTuple):
    """A prompt and its answers: a chosen and a rejected one, or a single one with a label.

    Attributes:
        prompt: the messages before the answer.
        tools: the tools that the messages may call.
        answers: the messages of [chosen, rejected], or of the single answer.
        desirable: the label of a single answer; True for a pair.
    """

    prompt: list[Message]
    tools: list[Fields] | None
    answers: list[list[Message]]
    desirable: bool = True

    @property
    def messages(self) -> list[Message]:
        """The messages of the prompt and of all answers."""
        return [*self.prompt, *itertools.chain.from_iterable(self.answers)]


def detect_format(fields: Collection[str], preference: bool = False) -> str | None:
    """Detect the format of a record from the names of its fields.

    Args:
        fields: the names of the record's fields.
        preference: look for preference data instead of conversations.

    Returns:
        One of :data:`FORMATS`. If ``preference`` is set, ``pairs`` (two answers) or ``examples``
        (one answer and its label). ``None`` if no format fits.
    """
    formats = _PREFERENCE_FIELDS if preference else _CHAT_FIELDS
    for format, required in formats.items():
        if required <= set(fields):
            return format
    return None


def conversation_of(record: Fields, format: str) -> Conversation:
    """Read a record as a conversation.

    In every format a field that is ``None`` counts as absent.

    Args:
        record: the fields of the record. In ``prompt_completion`` the two fields are texts or lists
            of messages.
        format: one of :data:`FORMATS`.

    Raises:
        BadRow: if the record does not have this format, or if no message comes from the assistant.
    """
    record = _without_none(record)
    if format == "prompt_completion":
        raw_messages = [
            *_raw_messages(record, "prompt", role="user"),
            *_raw_messages(record, "completion", role="assistant"),
        ]
    elif format == "alpaca":
        raw_messages = _system_message(record) + _alpaca_messages(record)
    elif format == "sharegpt":
        raw_messages = _system_message(record) + _field(record, "conversations", list)
    else:
        raw_messages = _field(record, "messages", list)

    if not raw_messages:
        raise BadRow("the record has no messages")
    messages = _parsed(raw_messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("the conversation has no assistant message")
    return Conversation(messages, _tools(record))


def preference_of(record: Fields) -> PreferenceRecord:
    """Read a record of preference data.

    It has the fields ``chosen`` and ``rejected``, or ``completion`` and ``label``. Each answer is a
    text or a list of messages, and may repeat the prompt. Without a ``prompt`` field, ``chosen``
    and ``rejected`` must be complete conversations. Then the prompt is the messages with which both
    begin.

    Raises:
        BadRow: if the record is not preference data, or if its answers cannot be compared.
    """
    record = _without_none(record)
    is_pair = "chosen" in record or "rejected" in record
    names = ["chosen", "rejected"] if is_pair else ["completion"]
    answers = [_messages(record, name, role="assistant") for name in names]
    prompt = _prompt_of(record, names, answers)
    answers = [_without_prompt(answer, prompt) for answer in answers]

    if is_pair and answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same")
    for name, answer in zip(names, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise BadRow(f"{name} has no assistant message right after the prompt")
    if not prompt:
        if "prompt" in record:
            raise BadRow("the prompt is empty")
        raise BadRow("chosen and rejected share no prompt")
    if prompt[-1]["role"] == "assistant":
        raise BadRow("the prompt ends with an assistant message")

    desirable = True if is_pair else _label(record)
    return PreferenceRecord(prompt, _tools(record), answers, desirable)


def _prompt_of(record: Fields, names: list[str], answers: list[list[Message]]) -> list[Message]:
    """Return the prompt of a preference record.

    Args:
        record: the fields of the record.
        names: the names of the fields that hold the answers.
        answers: the messages in these fields.

    Returns:
        The messages in the field ``prompt``. If there is no such field, the messages with which
        both conversations begin.
    """
    if "prompt" in record:
        return _messages(record, "prompt", role="user")
    if len(names) < 2:
        raise BadRow("the record has no prompt")
    if not all(isinstance(record[name], list) for name in names):
        raise BadRow("the record has no prompt, so chosen and rejected must be lists of messages")

    prompt = []
    for chosen, rejected in zip(*answers, strict=False):
        if chosen != rejected:
            break
        prompt.append(chosen)
    return prompt


def _without_prompt(answer: list[Message], prompt: list[Message]) -> list[Message]:
    """Drop the prompt from the beginning of an answer that repeats it."""
    if answer[: len(prompt)] == prompt:
        return answer[len(prompt) :]
    return answer


def _label(record: Fields) -> bool:
    """Return the label of a single answer. CSV files hold it as text."""
    label = record.get("label")
    if isinstance(label, str):
        label = {"true": True, "false": False}.get(label.lower(), label)
    if label not in (True, False):
        raise BadRow(f"field 'label' is {label!r:.40}, not true or false")
    return bool(label)


def _system_message(record: Fields) -> list[object]:
    """Return the system message in the field ``system``, or no message if there is none."""
    system = _field(record, "system", str, default="")
    return [{"role": "system", "content": system}] if system else []


def _alpaca_messages(record: Fields) -> list[object]:
    instruction = _field(record, "instruction", str)
    context = _field(record, "input", str, default="")
    question = "\n\n".join(filter(None, [instruction, context]))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _field(record, "output", str)},
    ]


def _raw_messages(record: Fields, field: str, role: str) -> list[object]:
    """Return the messages in a field, unchecked; a text becomes one message with this ``role``."""
    value = record.get(field)
    if isinstance(value, list):
        return value
    return [{"role": role, "content": _field(record, field, str)}]


def _messages(record: Fields, field: str, role: str) -> list[Message]:
    """Return the messages in a field; a text becomes one message with this ``role``."""
    raw_messages = _raw_messages(record, field, role)
    try:
        return _parsed(raw_messages)
    except BadRow as error:
        raise BadRow(f"{field}: {error}") from None


def _parsed(raw_messages: list[object]) -> list[Message]:
    return [_message(raw, number) for number, raw in enumerate(raw_messages, start=1)]


def _tools(record: Fields) -> list[Fields] | None:
    """Return the tools of a record, or ``None`` if it has none. They may be stored as JSON text."""
    tools = _from_json(record.get("tools") or [])
    return _field({"tools": tools}, "tools", list) or None


def _without_none(value: Any) -> Any:
    """Drop every key whose value is ``None``.

    Parquet gives each object the fields of all objects.
    """
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list):
        return [_without_none(inner) for inner in value]
    return value


def _field(record: Fields, name: str, kind: type[_T], default: _T | None = None) -> _T:
    """Return a field of a record.

    Raises:
        BadRow: if the field has another type than ``kind``, or if it is absent without a default.
    """
    value = record.get(name, default)
    if not isinstance(value, kind):
        expected = "text" if kind is str else "a list"
        raise BadRow(f"field '{name}' is {value!r:.40}, not {expected}")
    return value


def _from_json(value: object) -> object:
    """Parse JSON text. Return other values, and text that is not JSON, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _message(raw: object, number: int) -> Message:
    """Check one message and bring it into the form that chat templates take.

    Args:
        raw: the message, as it is in the data set.
        number: its number in the conversation, from 1, for error messages.
    """
    if not isinstance(raw, dict):
        raise BadRow(f"message {number} is {raw!r:.40}, not an object with a role and content")
    role = raw.get("role", raw.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRow(
            f"message {number} has the role {role!r:.40}; the known roles are {', '.join(_ROLES)}"
        )

    place = f"message {number} ({role})"
    rewritten = ("from", "value", "content", "tool_calls")
    message = {key: value for key, value in raw.items() if key not in rewritten}
    message["role"] = _ROLES[role]

    # Without calls the field must be absent: templates test whether it exists.
    tool_calls = _tool_calls(raw.get("tool_calls"), place)
    if tool_calls:
        message["tool_calls"] = tool_calls

    for field in REASONING:
        if field not in message:
            continue
        message[field] = _joined(message[field])
        if not isinstance(message[field], str):
            raise BadRow(f"{place}: its {field} is not text")

    content = _joined(raw.get("content", raw.get("value")))
    if content is None and tool_calls:
        content = ""  # more templates accept empty content than none
    if not isinstance(content, str):
        raise BadRow(f"{place}: its content is not text")
    message["content"] = content

    if message["role"] == "assistant" and not tool_calls and not content.strip():
        raise BadRow(f"{place} is empty")
    return message


def _tool_calls(raw_calls: object, place: str) -> list[Fields]:
    """Check the tool calls of a message and parse their arguments."""
    if not raw_calls:
        return []
    if not isinstance(raw_calls, list) or not all(isinstance(call, dict) for call in raw_calls):
        raise BadRow(f"{place}: its tool_calls are {raw_calls!r:.40}, not a list of objects")

    calls = [_tool_call(call) for call in raw_calls]
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise BadRow(f"{place} calls a tool without a name")
    return calls


def _tool_call(call: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them.

    In the format of OpenAI they are JSON text.
    """
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments") or {})
    if not isinstance(arguments, dict):
        return call
    return {**call, "arguments": arguments}


def _joined(content: object) -> object:
    """Join a list of text parts into one text. Return other values unchanged."""
    if not isinstance(content, list):
        return content
    if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return content
    return "".join(_field(part, "text", str) for part in content)
