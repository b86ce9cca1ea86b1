"""Read records of chat and preference data in the usual formats, as chat templates take them."""

import itertools
from collections.abc import Collection
from typing import NamedTuple

from llmtrain.data.messages import (
    BadRecord,
    Message,
    check_weights_of_turns,
    field_of,
    from_json,
    is_untrained,
    parse_messages,
    without_none,
)
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
    has_tools = bool(from_json(record.get("tools") or []))
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
        BadRecord: if the record does not have this format, or if no message comes from the
            assistant.
    """
    record = without_none(record, everywhere=has_artificial_nulls)
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
        raw_messages = _system_message(record) + field_of(record, "conversations", list)
    else:
        raw_messages = field_of(record, "messages", list)

    if not raw_messages:
        raise BadRecord("the record has no messages")
    messages = parse_messages(raw_messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRecord("the conversation has no assistant message")
    check_weights_of_turns(messages)

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
        BadRecord: if the record is not preference data, or if its answers cannot be compared.
    """
    record = without_none(record, everywhere=has_artificial_nulls)
    is_pair = "chosen" in record or "rejected" in record
    if is_pair and "completion" in record and "label" in record:
        raise BadRecord(
            "the record has two answers (chosen, rejected) and a single one (completion, label); "
            "keep one kind"
        )
    names = ["chosen", "rejected"] if is_pair else ["completion"]
    answers = [_messages(record, name, role="assistant") for name in names]
    prompt = _prompt_of(record, names, answers)
    answers = [_without_prompt(answer, prompt) for answer in answers]

    if is_pair and answers[0] == answers[1]:
        raise BadRecord("chosen and rejected are the same")
    for name, answer in zip(names, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise BadRecord(f"{name} has no assistant message right after the prompt")
        if any(is_untrained(message) for message in answer):
            raise BadRecord(f"{name} has a message with weight 0, but all of an answer is compared")
    if not prompt:
        if "prompt" in record:
            raise BadRecord("the prompt is empty")
        raise BadRecord("chosen and rejected share no prompt")
    if prompt[-1]["role"] == "assistant":
        raise BadRecord("the prompt ends with an assistant message")

    desirable = True if is_pair else _label(record)
    record_type = PlainPreferenceRecord if is_plain_text(record) else PreferenceRecord
    return record_type(prompt, _tools(record), answers, desirable)


def _check_that_only_fits(record: Fields, format: str) -> None:
    """Raise :class:`BadRecord` if a record has all fields of another format, too."""
    for other, required in _CHAT_FIELDS.items():
        if other != format and required <= record.keys():
            raise BadRecord(
                f"the record has the fields of two formats, {format} and {other}; choose one with "
                f"--format {format} or --format {other}"
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
        raise BadRecord("the record has no prompt")
    if not all(isinstance(record[name], list) for name in names):
        raise BadRecord(
            "the record has no prompt, so chosen and rejected must be lists of messages"
        )

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
        raise BadRecord(f"field 'label' is {label!r:.40}, not true or false")
    return bool(label)


def _system_message(record: Fields) -> list[object]:
    """Return the system message in the field ``system``, or no message if there is none."""
    system = field_of(record, "system", str, default="")
    return [{"role": "system", "content": system}] if system else []


def _alpaca_messages(record: Fields) -> list[object]:
    instruction = field_of(record, "instruction", str)
    context = field_of(record, "input", str, default="")
    question = "\n\n".join(filter(None, [instruction, context]))
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": field_of(record, "output", str)},
    ]


def _raw_messages(record: Fields, field: str, role: str) -> list[object]:
    """Return the messages in a field, unchecked; a text becomes one message with this ``role``."""
    value = record.get(field)
    if isinstance(value, list):
        return value
    return [{"role": role, "content": field_of(record, field, str)}]


def _messages(record: Fields, field: str, role: str) -> list[Message]:
    """Return the messages in a field; a text becomes one message with this ``role``."""
    raw_messages = _raw_messages(record, field, role)
    try:
        return parse_messages(raw_messages)
    except BadRecord as error:
        raise BadRecord(f"{field}: {error}") from None


def _tools(record: Fields) -> list[Fields] | None:
    """Return the tools of a record, or ``None`` if it has none. They may be stored as JSON text."""
    tools = from_json(record.get("tools") or [])
    return field_of({"tools": tools}, "tools", list) or None
