"""Records of the usual formats -> conversations, as chat templates take them."""

import itertools
import json
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

from llmtrain.data.sources import Fields
from llmtrain.data.template import REASONING, BadRow, Message
from llmtrain.errors import require

# A format and the fields that it cannot do without; where two fit a record, the first has it.
_NEEDED = {
    "messages": {"messages"},
    "prompt_completion": {"prompt", "completion"},
    "sharegpt": {"conversations"},
    "alpaca": {"instruction", "output"},
}
FORMATS = tuple(_NEEDED)
_JUDGED = {"pairs": {"chosen", "rejected"}, "examples": {"prompt", "completion", "label"}}
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


class Judged(NamedTuple):
    """A prompt and what was said of its answers."""

    prompt: list[Message]
    tools: list[Fields] | None
    answers: list[list[Message]]  # the chosen and the rejected one, or one alone
    desirable: bool = True  # the first

    @property
    def messages(self) -> list[Message]:
        """All that is said."""
        return [*self.prompt, *(message for answer in self.answers for message in answer)]


def recognise(fields: Collection[str], judged: bool = False) -> str | None:
    """Return the format that a record with these fields has; ``None`` where it is no conversation.

    Of what is ``judged`` that is ``pairs`` of answers, or ``examples`` of one answer and its label.
    """
    formats = _JUDGED if judged else _NEEDED
    return next((format for format, needed in formats.items() if needed <= set(fields)), None)


def conversation_of(record: Fields, format: str) -> Conversation:
    """Read a record of a format that :func:`recognise` knows; raises :class:`BadRow` where no assistant speaks in it.

    A prompt and a completion are texts or lists of messages. ``None`` counts as absent, everywhere.
    """
    record, given = _without_none(record), list[object]()
    if format in ("sharegpt", "alpaca") and (system := _field(record, "system", str, "")):
        given.append({"role": "system", "content": system})
    if format == "prompt_completion":
        given = [*_said(record, "prompt", "user"), *_said(record, "completion", "assistant")]
    elif format == "alpaca":
        question = [_field(record, "instruction", str), _field(record, "input", str, "")]
        given.append({"role": "user", "content": "\n\n".join(filter(None, question))})
        given.append({"role": "assistant", "content": _field(record, "output", str)})
    else:
        given += _field(record, "messages" if format == "messages" else "conversations", list)
    require(given, "it has no messages", BadRow)
    messages = [_message(message, number) for number, message in enumerate(given, start=1)]
    answered = any(message["role"] == "assistant" for message in messages)
    require(answered, "the assistant has no turn in it", BadRow)
    return Conversation(messages, _tools(record))


def judged_of(record: Fields) -> Judged:
    """Read a prompt with ``chosen`` and ``rejected``, or with ``completion`` and ``label``; raises :class:`BadRow`.

    Each is a text or a list of messages. Without a prompt ``chosen`` and ``rejected`` are whole conversations, and it
    is what they share; with one they may begin with it.
    """
    record = _without_none(record)
    pair = "chosen" in record or "rejected" in record
    names = ["chosen", "rejected"] if pair else ["completion"]
    answers = [_messages(record, name, "assistant") for name in names]
    if "prompt" in record:
        prompt = _messages(record, "prompt", "user")
        answers = [
            answer[len(prompt) :] if answer[: len(prompt)] == prompt else answer
            for answer in answers
        ]
    elif pair and all(isinstance(record[name], list) for name in names):
        same = itertools.takewhile(lambda both: both[0] == both[1], zip(*answers, strict=False))
        prompt = answers[0][: len([*same])]
        answers = [answer[len(prompt) :] for answer in answers]
    else:
        raise BadRow(
            "it has no prompt, without which chosen and rejected must be lists of messages"
        )
    require(not pair or answers[0] != answers[1], "chosen and rejected are the same", BadRow)
    for name, answer in zip(names, answers, strict=True):
        goes_on = answer and answer[0]["role"] == "assistant"
        require(
            goes_on, f"{name} does not go on from the prompt with what the assistant says", BadRow
        )
    if not prompt or prompt[-1]["role"] == "assistant":
        raise BadRow(
            "the prompt ends with the assistant's turn"
            if prompt
            else "chosen and rejected share no prompt"
        )
    label = True if pair else record.get("label")
    label = (
        {"true": True, "false": False}.get(label.lower(), label)
        if isinstance(label, str)
        else label
    )  # of CSV
    require(label in (True, False), f"field 'label' is {label!r:.40}, not true or false", BadRow)
    return Judged(prompt, _tools(record), answers, bool(label))


def _said(record: Fields, field: str, role: str) -> list[object]:
    """Return the messages of a field as they are given; of a text the one that ``role`` says."""
    said = record.get(field)
    return (
        said if isinstance(said, list) else [{"role": role, "content": _field(record, field, str)}]
    )


def _messages(record: Fields, field: str, role: str) -> list[Message]:
    """Return the messages of a field; of a text the one that ``role`` says."""
    given = _said(record, field, role)
    try:
        return [_message(message, number) for number, message in enumerate(given, start=1)]
    except BadRow as error:
        raise BadRow(f"{field}: {error}") from None


def _tools(record: Fields) -> list[Fields] | None:
    return _field({"tools": _from_json(record.get("tools") or [])}, "tools", list) or None


def _without_none(value: Any) -> Any:
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
    message = {
        key: value
        for key, value in given.items()
        if key not in ("from", "value", "content", "tool_calls")
    }
    message["role"] = _ROLES[name]

    calls = given.get("tool_calls")
    if calls:  # "no calls" is best said by saying nothing: templates ask whether the field is there
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise BadRow(
                f"message {number} ({name}): its tool_calls are {calls!r:.40}, not a list of objects"
            )
        message["tool_calls"] = [*map(_tool_call, calls)]
        for call in message["tool_calls"]:
            function = call["function"] if isinstance(call.get("function"), dict) else call
            if not isinstance(function.get("name"), str) or not function["name"]:
                raise BadRow(f"message {number} ({name}): it calls a tool without a name")

    for field in REASONING:
        if field in message:
            message[field] = _joined(message[field])
            require(
                isinstance(message[field], str),
                f"message {number} ({name}): its {field} is not text",
                BadRow,
            )
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
    if isinstance(content, list) and all(
        isinstance(one, dict) and one.get("type") == "text" for one in content
    ):
        return "".join(_field(one, "text", str) for one in content)
    return content


def _tool_call(call: Fields) -> Fields:
    """Return a call with its arguments as an object, as templates take them; OpenAI has the JSON of one."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"])}
    arguments = _from_json(call.get("arguments") or {})
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
