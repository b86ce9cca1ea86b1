"""Read records of chat and preference data in the usual formats, as chat templates take them."""

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterable
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


class Conversation(NamedTuple):
    """A conversation, in the form that chat templates take.

    Attributes:
        messages: the messages. An assistant message that must not be trained has the field
            ``weight``, which is 0 and which no chat template gets.
        tools: the tools that the messages may call.
    """

    messages: list[Message]
    tools: list[Fields] | None


class PlainConversation(Conversation):
    """A prompt and its completion that are plain texts, so that they need no chat template."""

    __slots__ = ()


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


class PlainPreferenceRecord(PreferenceRecord):
    """A prompt and its answers that are plain texts, so that they need no chat template."""

    __slots__ = ()


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


def is_plain_text(record: Fields) -> bool:
    """Return whether a record is a prompt with completions that are plain texts.

    Such a record needs no chat template.
    """
    texts = [record.get(name) for name in ("prompt", "completion", "chosen", "rejected")]
    present = [text for text in texts if text is not None]
    is_text = all(isinstance(text, str) for text in present)
    has_tools = bool(_from_json(record.get("tools") or []))
    return record.get("prompt") is not None and is_text and not has_tools


def conversation_of(
    record: Fields,
    format: str,
    has_artificial_nulls: bool = False,
    is_format_detected: bool = False,
) -> Conversation:
    """Read a record as a conversation.

    In every format a field of the record or of a message that is ``None`` counts as absent.

    Args:
        record: the fields of the record. In ``prompt_completion`` the two fields are texts or lists
            of messages.
        format: one of :data:`FORMATS`.
        has_artificial_nulls: the record comes from Parquet or Arrow, where an absent key of an
            object is ``None``. Then ``None`` counts as absent inside objects, too.
        is_format_detected: the user did not choose the format. Then a record that fits another
            format as well is refused, because a part of it would be ignored.

    Raises:
        BadRow: if the record does not have this format, or if no message comes from the assistant.
    """
    record = _without_none(record, everywhere=has_artificial_nulls)
    if is_format_detected:
        _check_that_only_fits(record, format)
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
    _check_weights_of_turns(messages)

    tools = _tools(record)
    if format == "prompt_completion" and is_plain_text(record):
        return PlainConversation(messages, tools)
    return Conversation(messages, tools)


def preference_of(record: Fields, has_artificial_nulls: bool = False) -> PreferenceRecord:
    """Read a record of preference data.

    It has the fields ``chosen`` and ``rejected``, or ``completion`` and ``label``. Each answer is a
    text or a list of messages, and may repeat the prompt. Without a ``prompt`` field, ``chosen``
    and ``rejected`` must be complete conversations. Then the prompt is the messages with which both
    begin.

    Args:
        record: the fields of the record.
        has_artificial_nulls: see :func:`conversation_of`.

    Raises:
        BadRow: if the record is not preference data, or if its answers cannot be compared.
    """
    record = _without_none(record, everywhere=has_artificial_nulls)
    is_pair = "chosen" in record or "rejected" in record
    if is_pair and "completion" in record and "label" in record:
        raise BadRow(
            "the record has two answers (chosen, rejected) and a single one (completion, label); "
            "keep one kind"
        )
    names = ["chosen", "rejected"] if is_pair else ["completion"]
    answers = [_messages(record, name, role="assistant") for name in names]
    prompt = _prompt_of(record, names, answers)
    answers = [_without_prompt(answer, prompt) for answer in answers]

    if is_pair and answers[0] == answers[1]:
        raise BadRow("chosen and rejected are the same")
    for name, answer in zip(names, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise BadRow(f"{name} has no assistant message right after the prompt")
        if any(_is_untrained(message) for message in answer):
            raise BadRow(f"{name} has a message with weight 0, but all of an answer is compared")
    if not prompt:
        if "prompt" in record:
            raise BadRow("the prompt is empty")
        raise BadRow("chosen and rejected share no prompt")
    if prompt[-1]["role"] == "assistant":
        raise BadRow("the prompt ends with an assistant message")

    desirable = True if is_pair else _label(record)
    record_type = PlainPreferenceRecord if is_plain_text(record) else PreferenceRecord
    return record_type(prompt, _tools(record), answers, desirable)


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


def without_weights(messages: list[Message]) -> list[Message]:
    """Return messages without their weights, as chat templates get them."""
    if not any("weight" in message for message in messages):
        return messages
    return [
        {key: value for key, value in message.items() if key != "weight"} for message in messages
    ]


def trained_messages(messages: list[Message]) -> list[bool]:
    """Return for each message whether its weight lets it be trained."""
    return [not _is_untrained(message) for message in messages]


def _is_untrained(message: Message) -> bool:
    return message["role"] == "assistant" and message.get("weight") == 0


def _check_that_only_fits(record: Fields, format: str) -> None:
    """Raise :class:`BadRow` if a record has all fields of another format, too."""
    for other, required in _CHAT_FIELDS.items():
        if other != format and required <= record.keys():
            raise BadRow(
                f"the record has the fields of two formats, {format} and {other}; choose one with "
                f"--format {format} or --format {other}"
            )


def _check_weights_of_turns(messages: list[Message]) -> None:
    """Raise :class:`BadRow` if messages of one assistant turn have different weights."""
    for number, (message, following) in enumerate(itertools.pairwise(messages), start=1):
        is_same_turn = message["role"] == following["role"] == "assistant"
        if is_same_turn and _is_untrained(message) != _is_untrained(following):
            raise BadRow(
                f"messages {number} and {number + 1} (assistant) are one turn, but one of them has "
                "weight 0; give all messages of a turn the same weight"
            )


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
        words = {"true": True, "false": False, "1": True, "0": False}
        label = words.get(label.lower(), label)
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


def _without_none(value: Any, everywhere: bool) -> Any:
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
        return {key: _without_none(inner, everywhere) for key, inner in present.items()}
    if isinstance(value, list) and everywhere:
        return [_without_none(inner, everywhere) for inner in value]
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
    fields: Fields = _without_none(raw, everywhere=False)
    role = fields.get("role", fields.get("from"))
    if not isinstance(role, str) or role not in _ROLES:
        raise BadRow(
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
            raise BadRow(f"{place}: its {field} is not text")

    content = _joined(raw_content)
    if content is None and tool_calls:
        content = ""  # more templates accept empty content than none
    if not isinstance(content, str):
        raise BadRow(f"{place}: its content is not text")
    message["content"] = content

    if message["role"] == "assistant" and not tool_calls and not content.strip():
        raise BadRow(f"{place} is empty")
    if _weight(fields, place) == 0 and message["role"] == "assistant":
        message["weight"] = 0
    return message


def _weight(fields: Fields, place: str) -> int:
    """Return the weight of a message in OpenAI's format: 1, or 0 if it must not be trained."""
    weight = fields.get("weight", 1)
    # True and 1.0 are equal to 1.
    if not isinstance(weight, (int, float)) or weight not in (0, 1):
        raise BadRow(f"{place}: its weight is {weight!r:.40}, not 0 or 1")
    return int(weight)


def _calls_in_value(value: object, tool_calls: object, place: str) -> list[object]:
    """Return the calls in the value of a ShareGPT message with the role ``function_call``.

    Args:
        value: JSON text, or what it stands for: an object with a name and arguments, or a list of
            such objects.
        tool_calls: the field ``tool_calls`` of the message, which must be absent.
        place: the message, for error messages.
    """
    if tool_calls:
        raise BadRow(f"{place} has tool_calls beside the calls in its value")
    calls = _from_json(value)
    if isinstance(calls, dict):
        calls = [calls]
    if not isinstance(calls, list) or not calls:
        raise BadRow(f"{place}: its value is {value!r:.40}, not JSON of a call or a list of calls")
    return calls


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


def _tool_call(raw: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them.

    In the format of OpenAI they are JSON text. Absent, empty and ``null`` arguments are an empty
    object.
    """
    call: Fields = _without_none(raw, everywhere=False)
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments") or {})
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
    return "".join(_field(part, "text", str) for part in content)
