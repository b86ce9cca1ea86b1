"""The formats of records, and how a record becomes a conversation or preference data.

To add a format of conversations, add its name to :data:`ConversationFormat`, its fields to
:data:`CONVERSATION_FORMATS` and its messages to :func:`conversation_of`.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from llmtrain.data.messages import (
    BadRecord,
    Message,
    field_of,
    from_json,
    parse_messages,
    without_none,
)
from llmtrain.data.readers import Fields, Record, Source
from llmtrain.errors import UserError

ConversationFormat: TypeAlias = Literal["messages", "prompt_completion", "sharegpt", "alpaca"]
# The fields that every record of a format has. They tell the format: the first that fits.
CONVERSATION_FORMATS: dict[str, tuple[str, ...]] = {
    "tokens": ("input_ids",),  # there may also be the messages that they were made from
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
}
# With these, the model that is trained will answer the prompts.
PROMPT_FORMATS: dict[str, tuple[str, ...]] = {"prompts": ("prompt",)}
PREFERENCE_FORMATS: dict[str, tuple[str, ...]] = {
    "pairs": ("chosen", "rejected"),
    "labelled_answers": ("prompt", "completion", "label"),
}
# The fields that may hold a prompt to answer.
PROMPT_FIELDS = ("prompt", "messages", "conversations")
_FIELDS = itertools.chain(*CONVERSATION_FORMATS.values(), *PREFERENCE_FORMATS.values())
# The fields to which --columns can give another name.
RECORD_FIELDS = tuple(dict.fromkeys(["text", *_FIELDS, "labels", "input", "system", "tools"]))
# Other columns, and arguments that a model or an objective gets beside columns.
_NAMES_IN_USE = {
    *("input_ids", "labels", "position_ids", "answers", "lengths", "reference", "dropout_keys"),
    *("documents", "target_positions", "per_target", "compute", "self", *RECORD_FIELDS),
}


class Conversation(NamedTuple):
    """A conversation, in the form that chat templates take.

    Attributes:
        messages: the messages. An assistant message that must not be trained has the field
            ``weight``, which is 0 and which no chat template gets.
        tools: the tools that the messages may call.
        is_plain_text: whether it is a prompt and a completion that are plain texts, so that it
            needs no chat template.
        untrained: the number of messages at the beginning that are not trained: those of a prompt
            that has a completion.
    """

    messages: list[Message]
    tools: list[Fields] | None
    is_plain_text: bool = False
    untrained: int = 0

    @property
    def prompt(self) -> list[Message]:
        """The messages before the first answer."""
        roles = [message["role"] for message in self.messages]
        return self.messages[: roles.index("assistant")]


class PreferenceRecord(NamedTuple):
    """A prompt and its answers: a chosen and a rejected one, or a single one with a label.

    Attributes:
        prompt: the messages before the answer.
        tools: the tools that the messages may call.
        answers: the messages of [chosen, rejected], or of the single answer.
        desirable: the label of a single answer; True for a pair.
        is_plain_text: whether the prompt and the answers are plain texts, so that they need no chat
            template.
    """

    prompt: list[Message]
    tools: list[Fields] | None
    answers: list[list[Message]]
    desirable: bool = True
    is_plain_text: bool = False

    @property
    def messages(self) -> list[Message]:
        """The messages of the prompt and of all answers."""
        return [*self.prompt, *itertools.chain.from_iterable(self.answers)]


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Return the name of each field in the data by its name in a format: ``--columns``.

    Raises:
        UserError: if a word is not ``OURS=THEIRS``, or if a name is used twice.
    """
    columns: dict[str, str] = {}
    for word in words:
        # The name in the data may have equals signs of its own.
        ours, _, theirs = word.partition("=")
        if ours not in RECORD_FIELDS or not theirs:
            raise UserError(
                f"--columns {word}: write OURS=THEIRS, such as prompt=question, with one of "
                f"{', '.join(RECORD_FIELDS)} on the left."
            )
        if ours in columns or theirs in columns.values():
            raise UserError(f"--columns {word}: a name is there twice; remove one of them.")
        columns[ours] = theirs
    return columns


def parse_extra_columns(words: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return the field in the data and the dtype of each column in ``--extra_columns``.

    The field ``loss_mask`` becomes the column ``loss_weight``.

    Raises:
        UserError: if a word is not ``NAME`` or ``NAME:DTYPE``, or if a name is in use.
    """
    columns: dict[str, tuple[str, str]] = {}
    for word in words:
        field, _, dtype = word.partition(":")
        name = "loss_weight" if field == "loss_mask" else field
        dtype = dtype or "float32"
        if name in {"", *columns, *_NAMES_IN_USE} or dtype not in ("float16", "float32", "int32"):
            raise UserError(
                f"--extra_columns {word}: write NAME or NAME:DTYPE, with a name that is not in use "
                "and float16, float32 or int32."
            )
        columns[name] = (field, dtype)
    return columns


def rename_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> list[Source]:
    """Return sources whose fields have our names: ``--columns``.

    A source that has none of the fields stays as it is: it may hold text, or have our names. The
    first record of each source decides.

    Raises:
        UserError: with the place of a record that has only some of the fields, or of the first
            record of all if no source has any.
    """
    theirs = set(columns.values())
    firsts = [source.first for source in sources if source.first]
    to_rename = [record for record in firsts if theirs & record.fields.keys()]
    for place, fields in to_rename or firsts[:1]:
        for name, their_name in columns.items():
            if their_name not in fields:
                raise UserError(
                    f"{place}: no field '{their_name}' for --columns {name}={their_name}; the "
                    f"record has {', '.join(map(str, fields))}."
                )
    return [
        _with_columns(source, columns) if source.first in to_rename else source
        for source in sources
    ]


def _with_columns(source: Source, columns: Mapping[str, str]) -> Source:
    """Rename the fields of a source. A field that has the new name of another one is left out."""
    names = {*columns, *columns.values()}

    def records(_: str | None) -> Iterator[Record]:
        for place, fields in source.records(None):
            others = {name: value for name, value in fields.items() if name not in names}
            renamed = {ours: fields[theirs] for ours, theirs in columns.items() if theirs in fields}
            yield Record(place, others | renamed)

    return replace(source, records=records)


def detect_format(fields: Collection[str], formats: Mapping[str, tuple[str, ...]]) -> str | None:
    """Detect the format of a record from the names of its fields.

    Args:
        fields: the names of the record's fields.
        formats: :data:`CONVERSATION_FORMATS` or :data:`PREFERENCE_FORMATS`.

    Returns:
        The name of the first format that fits; ``None`` if none does.
    """
    for name, needed in formats.items():
        if set(needed).issubset(fields):
            return name
    return None


def is_plain_text(record: Fields) -> bool:
    """Return whether a record is a prompt with completions that are plain texts.

    Such a record needs no chat template.
    """
    texts = [record.get(name) for name in ("prompt", "completion", "chosen", "rejected")]
    is_text = all(text is None or isinstance(text, str) for text in texts)
    needs_template = record.get("system") or from_json(record.get("tools") or [])
    return record.get("prompt") is not None and is_text and not needs_template


def conversation_of(
    record: Fields, format: str, has_artificial_nulls: bool = False
) -> Conversation:
    """Read a record as a conversation.

    In every format a field of the record or of a message that is ``None`` counts as absent.

    Args:
        record: the fields of the record.
        format: one of :data:`CONVERSATION_FORMATS` or :data:`PROMPT_FORMATS`.
        has_artificial_nulls: the record comes from Parquet or Arrow, where an absent key of an
            object is ``None``. Then ``None`` counts as absent inside objects, too.

    Raises:
        BadRecord: if the record does not have this format, or if no message comes from the
            assistant.
    """
    record = without_none(record, everywhere=has_artificial_nulls)
    _check_that_no_image_is_lost(record)
    untrained = 0
    if format == "messages":
        raw_messages = field_of(record, "messages", list)
    elif format == "sharegpt":
        raw_messages = field_of(record, "conversations", list)
    elif format == "alpaca":
        instruction = field_of(record, "instruction", str)
        context = field_of(record, "input", str, default="")
        raw_messages = [
            {"role": "user", "content": "\n\n".join(filter(None, [instruction, context]))},
            {"role": "assistant", "content": field_of(record, "output", str)},
        ]
    else:
        prompt = _raw_messages(record, "prompt", role="user")
        untrained = len(prompt)
        raw_messages = [*prompt]
        if format not in PROMPT_FORMATS:
            raw_messages += _raw_messages(record, "completion", role="assistant")

    messages = _with_system_message(record, parse_messages(raw_messages))
    untrained += len(messages) - len(raw_messages)
    if format in PROMPT_FORMATS:
        _check_prompt(messages)
        # The student's answers take the place of this one. On eval rows, models are compared on it.
        messages.append({"role": "assistant", "content": "."})
    if not any(message["role"] == "assistant" for message in messages[untrained:]):
        part = "completion" if format == "prompt_completion" else "conversation"
        raise BadRecord(f"the {part} has no assistant message")
    return Conversation(
        messages,
        _tools(record),
        is_plain_text=format in ("prompt_completion", "prompts") and is_plain_text(record),
        untrained=untrained,
    )


def preference_of(
    record: Fields, has_artificial_nulls: bool = False, allows_single: bool = True
) -> PreferenceRecord:
    """Read a record of preference data: two answers to compare, or a single one with a label.

    Each answer is a text or a list of messages, and messages may repeat the prompt. Without a
    ``prompt`` field, two answers must be complete conversations. Then the prompt is the messages
    with which both begin.

    Args:
        record: the fields of the record.
        has_artificial_nulls: see :func:`conversation_of`.
        allows_single: the loss takes single answers, too.

    Raises:
        BadRecord: if the record is not preference data, or if its answers cannot be compared.
    """
    record = without_none(record, everywhere=has_artificial_nulls)
    _check_that_no_image_is_lost(record)
    is_pair = not allows_single or "chosen" in record or "rejected" in record
    fields = ["chosen", "rejected"] if is_pair else ["completion"]
    answers = []
    for field in fields:
        try:
            answers.append(parse_messages(_raw_messages(record, field, "assistant")))
        except BadRecord as error:
            raise BadRecord(f"{field}: {error}") from None
    prompt = []
    if "prompt" in record:
        prompt = parse_messages(_raw_messages(record, "prompt", role="user"))
    elif is_pair:
        pairs = zip(*answers, strict=False)
        alike = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        prompt = [message for message, _ in alike]
    for number, answer in enumerate(answers):
        if answer[: len(prompt)] == prompt:
            answers[number] = answer[len(prompt) :]

    prompt = _with_system_message(record, prompt)
    if is_pair and answers[0] == answers[1]:
        raise BadRecord("chosen and rejected are the same")
    _check_prompt(prompt)
    for field, answer in zip(fields, answers, strict=True):
        if not answer or answer[0]["role"] != "assistant":
            raise BadRecord(f"{field} has no assistant message right after the prompt")
        if any(message.get("weight") == 0 for message in answer):
            raise BadRecord(
                f"{field} has a message with weight 0, but all of an answer is compared"
            )
    return PreferenceRecord(
        prompt=prompt,
        answers=answers,
        desirable=is_pair or _label(record),
        tools=_tools(record),
        is_plain_text=is_plain_text(record),
    )


def prompt_of(record: Fields) -> str | Conversation:
    """Read a record with one of :data:`PROMPT_FIELDS`.

    Returns:
        A text to continue, or a conversation that ends with a question. With tools, a text is a
        question, too.

    Raises:
        BadRecord: if the record holds neither.
    """
    record = without_none(record, everywhere=False)
    _check_that_no_image_is_lost(record)
    field = next((field for field in PROMPT_FIELDS if field in record), "prompt")
    raw_messages = _raw_messages(record, field, role="user")
    tools = _tools(record)
    if isinstance(record.get("prompt"), str) and not tools:
        return str(record["prompt"])

    messages = _with_system_message(record, parse_messages(raw_messages))
    _check_prompt(messages)
    return Conversation(messages, tools)


def _check_that_no_image_is_lost(record: Fields) -> None:
    """Raise :class:`BadRecord` if a record has images, in the fields that TRL reads them from."""
    for field in ("image", "images"):
        if record.get(field):
            raise BadRecord(
                f"the record has the field {field}, and models are trained on text alone; leave "
                "such records out, or remove the field to train on their text"
            )


def _check_prompt(prompt: list[Message]) -> None:
    if not prompt:
        raise BadRecord("there is no prompt, nor are there chosen and rejected that begin with one")
    if prompt[-1]["role"] == "assistant":
        raise BadRecord("the prompt ends with an assistant message")


def _label(record: Fields) -> bool:
    """Return the label of a single answer. CSV files hold it as text."""
    values = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
    label = record.get("label")
    if str(label).lower() not in values:
        raise BadRecord(f"field 'label' is {label!r:.40}, not true or false")
    return values[str(label).lower()]


def _with_system_message(record: Fields, messages: list[Message]) -> list[Message]:
    """Return messages that begin with the one in the field ``system``, if they have no other."""
    system = field_of(record, "system", str, default="")
    has_system_message = bool(messages) and messages[0]["role"] == "system"
    if not system or not messages or has_system_message:
        return messages
    return [{"role": "system", "content": system}, *messages]


def _raw_messages(record: Fields, field: str, role: str) -> list[object]:
    """Return the messages in a field, unchecked; a text becomes one message with this ``role``."""
    value = record.get(field)
    if isinstance(value, list):
        return value
    return [{"role": role, "content": field_of(record, field, str)}]


def _tools(record: Fields) -> list[Fields] | None:
    """Return the tools of a record, or ``None`` if it has none. They may be stored as JSON text."""
    tools = from_json(record.get("tools") or [])
    return field_of({"tools": tools}, "tools", list) or None
