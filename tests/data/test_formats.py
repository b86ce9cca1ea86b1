"""Records of every usual format become the same conversations."""

import copy
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmtrain.data.config import ChatConfig
from llmtrain.data.formats import (
    CONVERSATION_FORMATS,
    PREFERENCE_FORMATS,
    Conversation,
    ConversationFormat,
    conversation_of,
    detect_format,
    is_plain_text,
    preference_of,
)
from llmtrain.data.messages import BadRecord, other_fields_of, trained_messages, without_weights
from llmtrain.data.render import Renderer
from tests.data.chats import ASSISTANT, CALL, CALLING, TEMPLATES, TOOL, USER, chat, make, unmarked

SAME = {
    "messages": {
        "messages": [
            {"role": "user", "content": "2\n\n3"},
            {"role": "assistant", "content": "five"},
        ]
    },
    "prompt_completion": {"prompt": "2\n\n3", "completion": "five"},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2\n\n3"}, {"from": "gpt", "value": "five"}]
    },
    "alpaca": {"instruction": "2", "input": "3", "output": "five"},
}


DOCS = Path(__file__).parents[2] / "docs"


def fields_in_docs(page: str) -> dict[tuple[str, ...], str]:
    """Return the last cell of each row of a page's tables by the names in the first cell."""
    rows = re.findall(r"^\| (`.*?) \|.* \| (.*) \|$", (DOCS / page).read_text(), re.M)
    return {tuple(re.findall("`(.*?)`", first)): last for first, last in rows}


def test_every_format_of_conversations_is_a_choice_of_the_flag_and_in_the_guide():
    names = [*CONVERSATION_FORMATS]
    assert [*get_args(ConversationFormat)] == names
    assert [*get_args(get_type_hints(ChatConfig)["format"])] == ["auto", "text", *names]
    in_guide = fields_in_docs("guides/data.md")
    for name, format in CONVERSATION_FORMATS.items():
        assert in_guide[format.fields] == f"`{name}`"


def test_every_format_of_preference_data_is_in_the_guide():
    text = (DOCS / "guides/preferences.md").read_text()
    for format in PREFERENCE_FORMATS.values():
        names = ", ".join(f"`{name}`" for name in format.fields)
        assert f"| {names} |" in text


def test_the_same_conversation_is_the_same_tokens_in_every_format():
    assert [*SAME] == [*CONVERSATION_FORMATS]
    renderer = Renderer(make(unmarked(TEMPLATES["llama"])))
    rendered = [
        renderer(conversation_of(record, detected(record))).sequences[0] for record in SAME.values()
    ]
    for other in rendered:
        np.testing.assert_array_equal(other.ids, rendered[0].ids)
        np.testing.assert_array_equal(other.loss_mask, rendered[0].loss_mask)


def detected(fields: Collection[str]) -> str | None:
    return detect_format(fields, CONVERSATION_FORMATS)


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        (["messages"], "messages"),
        (["id", "prompt", "messages"], "messages"),
        (["conversations", "system"], "sharegpt"),
        (["completion", "prompt"], "prompt_completion"),
        (["instruction", "output"], "alpaca"),
        (["instruction", "input", "output", "text"], "alpaca"),
        (["text"], None),
        (["prompt"], None),
        (["instruction", "input"], None),
        ([], None),
    ],
)
def test_a_format_is_recognised_by_its_fields(fields, format):
    assert detected(fields) == detected(dict.fromkeys(fields)) == format


@pytest.mark.parametrize(
    ("record", "system"),
    [
        (
            {
                "prompt": [{"role": "user", "content": "a"}],
                "completion": [{"role": "assistant", "content": "b"}],
            },
            None,
        ),
        (
            {
                "conversations": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                ]
            },
            None,
        ),
        (
            {
                "conversations": [{"from": "user", "value": "a"}, {"from": "model", "value": "b"}],
                "system": "",
            },
            None,
        ),
        ({"instruction": "a", "input": "", "output": "b"}, None),
        ({"instruction": "a", "input": None, "output": "b", "system": None}, None),
        ({"instruction": "", "input": "a", "output": "b"}, None),
        (
            {
                "messages": [
                    {"role": "human", "content": "a"},
                    {"role": "chatgpt", "content": "b"},
                ],
                "tools": "[]",
            },
            None,
        ),
        ({"prompt": "a", "completion": "b", "tools": ""}, None),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "system": "s",
            },
            "s",
        ),
        ({"instruction": "a", "output": "b", "system": "s"}, "s"),
    ],
)
def test_other_spellings_of_a_format_are_read_too(record, system):
    before = [{"role": "system", "content": system}] if system else []
    conversation = conversation_of(record, detected(record))
    assert conversation.messages == before + chat("a", "b").messages
    assert conversation.tools is None


def call_of(name: str, arguments: object) -> dict:
    return {"name": name, "arguments": arguments}


NOW = call_of("now", {"zone": "UTC"})


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        (json.dumps(CALL["function"]), [CALL["function"]]),
        (json.dumps([CALL["function"], NOW]), [CALL["function"], NOW]),
        (NOW, [NOW]),
        ([NOW], [NOW]),
        (json.dumps(call_of("now", '{"zone": null}')), [call_of("now", {"zone": None})]),
        ('{"name": "now"}', [call_of("now", {})]),
    ],
)
def test_a_function_call_of_sharegpt_is_an_assistant_message_that_calls(value, calls):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "5"},
        {"from": "gpt", "value": "b"},
    ]
    record = {"conversations": turns, "tools": json.dumps([TOOL])}
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "5"},
        ASSISTANT,
    ]
    assert conversation_of(record, "sharegpt") == Conversation(messages, [TOOL])


@pytest.mark.parametrize("arguments", ["null", None, "", "{}", {}])
def test_null_and_empty_arguments_are_no_arguments(arguments):
    call = {"id": None, "function": {"name": "now", "arguments": arguments, "strict": None}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert conversation_of({"messages": messages}, "messages").messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "now", "arguments": {}}}],
    }


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("has_artificial_nulls", [True, False])
def test_null_in_arguments_and_schemas_is_kept_unless_the_file_format_made_it(
    has_artificial_nulls, is_text
):
    arguments = {"limit": None, "filters": [{"by": None}]}
    tool = {"name": "find", "parameters": {"type": "object", "default": None}}
    call = call_of("find", json.dumps(arguments) if is_text else arguments)
    record = {
        "messages": [
            {**USER, "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        "tools": json.dumps([tool]) if is_text else [tool],
        "system": None,
    }
    if has_artificial_nulls and not is_text:
        arguments = {"filters": [{}]}
        tool = {"name": "find", "parameters": {"type": "object"}}
    call = call_of("find", arguments)
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    conversation = conversation_of(record, "messages", has_artificial_nulls)
    assert conversation == Conversation(messages, [tool])


@pytest.mark.parametrize("zero", [0, 0.0, False])
@pytest.mark.parametrize("one", [1, 1.0, True, None])
def test_a_weight_of_zero_is_kept_and_a_weight_of_one_is_the_default(zero, one):
    messages = [
        {**USER, "weight": one},
        {**ASSISTANT, "weight": zero},
        {**USER, "weight": zero},
        {**ASSISTANT, "weight": one},
    ]
    read = conversation_of({"messages": messages}, "messages").messages
    assert read == [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]
    assert trained_messages(read) == [True, False, True, True]
    assert without_weights(read) == [USER, ASSISTANT, USER, ASSISTANT]


def test_other_fields_of_messages_are_counted_by_name():
    messages = [
        {**USER, "name": "Ann", "at": 1},
        {**ASSISTANT, "score": 0.5, "at": 2, "reasoning": "hm", "weight": 0},
    ]
    read = conversation_of({"messages": messages}, "messages").messages
    assert read[0]["at"] == 1
    assert other_fields_of(read) == {"at": 2, "score": 1}
    assert other_fields_of(CALLING) == {}


MESSAGES = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("record", "format", "other"),
    [
        (MESSAGES | SAME["sharegpt"], "messages", "sharegpt"),
        (MESSAGES | SAME["prompt_completion"], "messages", "prompt_completion"),
        (SAME["alpaca"] | SAME["prompt_completion"], "prompt_completion", "alpaca"),
    ],
)
def test_a_record_of_two_formats_is_refused_unless_the_format_was_chosen(record, format, other):
    assert detected(record) == format
    with pytest.raises(BadRecord, match=f"choose one with --format {format} or --format {other}"):
        conversation_of(record, format, is_format_detected=True)
    for chosen in (format, other):
        assert conversation_of(record, chosen).messages
        unchosen = other if chosen == format else format
        absent = dict.fromkeys(CONVERSATION_FORMATS[unchosen].fields)
        assert conversation_of(record | absent, chosen, is_format_detected=True).messages
    half = {**MESSAGES, "prompt": "a", "instruction": "b"}
    assert conversation_of(half, "messages", is_format_detected=True) == chat("a", "b")


@pytest.mark.parametrize(
    ("record", "is_plain"),
    [
        ({"prompt": "a", "completion": "b"}, True),
        ({"prompt": "", "completion": "b", "tools": None, "other": 1}, True),
        ({"prompt": [USER], "completion": "b"}, False),
        ({"prompt": "a", "completion": [ASSISTANT]}, False),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, False),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, True),
        ({"prompt": "a", "chosen": [ASSISTANT], "rejected": "c"}, False),
        ({"prompt": "a", "completion": "b", "label": True}, True),
    ],
)
def test_prompts_with_plain_texts_are_told_from_messages(record, is_plain):
    assert is_plain_text(record) == is_plain
    if "chosen" in record or "label" in record:
        assert preference_of(record).is_plain_text == is_plain
    else:
        assert conversation_of(record, "prompt_completion").is_plain_text == is_plain


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_what_a_tool_answers_is_a_message_of_its_own(name):
    turns = [
        {"from": "human", "value": "a"},
        {"from": "gpt", "value": "b"},
        {"from": name, "value": "c"},
    ]
    assert conversation_of({"conversations": turns}, "sharegpt").messages[2] == {
        "role": "tool",
        "content": "c",
    }


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    assert conversation_of({"messages": messages}, "messages") == chat("one two", "b")


def test_tool_calls_are_read_in_openais_spelling_and_in_templates():
    spelled = copy.deepcopy(CALLING)
    del spelled[1]["content"]
    spelled[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": [3]}'
    record = {"messages": spelled, "tools": json.dumps([TOOL])}
    before = copy.deepcopy(record)
    expected = Conversation(CALLING, [TOOL])
    assert conversation_of(record, "messages") == expected
    assert record == before
    assert conversation_of({"messages": CALLING, "tools": [TOOL]}, "messages") == expected


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    call = {"name": "add", "arguments": arguments}
    record = {
        "messages": [
            *chat("a").messages,
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
    }
    assert conversation_of(record, "messages").messages[1]["tool_calls"] == [call]


def test_fields_that_parquet_fills_with_none_are_absent(tmp_path):
    other = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    records = [
        {"messages": [CALLING[0], {**CALLING[1], "content": None}, *CALLING[2:]], "tools": [TOOL]},
        {
            "messages": [
                *chat("a").messages,
                {"role": "assistant", "content": "b", "tool_calls": [other]},
            ]
        },
        {
            "messages": [
                *chat("a").messages,
                {"role": "assistant", "content": "b", "tool_calls": []},
            ]
        },
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "chats.parquet")
    read = pq.read_table(tmp_path / "chats.parquet").to_pylist()
    assert read[1]["tools"] is None
    assert read[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["a"] is None
    conversations = [
        conversation_of(record, "messages", has_artificial_nulls=True) for record in read
    ]
    assert conversations[0] == Conversation(CALLING, [TOOL])
    assert conversations[1] == Conversation(records[1]["messages"], None)
    assert conversations[2] == chat("a", "b")


@pytest.mark.parametrize(
    ("record", "format", "reason"),
    [
        ({"messages": []}, "messages", "no messages"),
        ({"prompt": [], "completion": []}, "prompt_completion", "no messages"),
        ({"messages": None}, "messages", "field 'messages' is None, not a list"),
        ({"messages": "hello"}, "messages", "field 'messages' is 'hello', not a list"),
        ({"other": 1}, "sharegpt", "field 'conversations' is None, not a list"),
        ({"messages": ["hello"]}, "messages", "message 1 is 'hello', not an object"),
        (
            {"messages": [USER, {"role": "bot", "content": "b"}]},
            "messages",
            "message 2 has the role 'bot'; the known roles are",
        ),
        (
            {"messages": [USER, {"role": ["user"], "content": "b"}]},
            "messages",
            "message 2 has the role",
        ),
        ({"messages": [USER, {"content": "b"}]}, "messages", "message 2 has the role None"),
        (
            {"conversations": [{"from": "narrator", "value": "b"}]},
            "sharegpt",
            "message 1 has the role 'narrator'",
        ),
        (
            {"messages": [{"role": "user"}, ASSISTANT]},
            "messages",
            r"message 1 \(user\): its content is not text",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "messages",
            "message 2 .*content is not text",
        ),
        (
            {"messages": [{"role": "user", "content": 3}, ASSISTANT]},
            "messages",
            "message 1 .*content is not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
            "messages",
            r"message 1 \(user\): its content is not text alone: it has a part of the type 'image'",
        ),
        (
            {"messages": [USER, ASSISTANT], "images": ["cat.png"]},
            "messages",
            "the record has the field images, and models are trained on text alone",
        ),
        (
            {"messages": [{"role": "user", "content": ["a"]}, ASSISTANT]},
            "messages",
            "message 1 .*content is not text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}, ASSISTANT]},
            "messages",
            "field 'text' is 3, not text",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": 3, "tool_calls": [CALL]}]},
            "messages",
            "message 2 .*content is not text",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": "b", "tool_calls": "add"}]},
            "messages",
            "tool_calls are 'add', not a list",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": ""}]},
            "messages",
            r"message 2 \(assistant\) is empty",
        ),
        (
            {"conversations": [{"from": "gpt", "value": " \n"}]},
            "sharegpt",
            r"message 1 \(gpt\) is empty",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "content": "", "tool_calls": [{"function": "add"}]},
                ]
            },
            "messages",
            r"message 2 \(assistant\) calls a tool without a name",
        ),
        (
            {"messages": [USER, {**ASSISTANT, "reasoning": {"a": 1}}]},
            "messages",
            "its reasoning is not text",
        ),
        ({"messages": [USER]}, "messages", "the conversation has no assistant message"),
        *[
            (
                {"messages": [USER, {**ASSISTANT, "weight": weight}]},
                "messages",
                r"message 2 \(assistant\): its weight is .*, not 0 or 1",
            )
            for weight in (0.5, -1, 2, "0", [0])
        ],
        (
            {"messages": [USER, {**ASSISTANT, "weight": 0}, ASSISTANT]},
            "messages",
            r"messages 2 and 3 \(assistant\) are one turn, but one of them has weight 0",
        ),
        *[
            (
                {"conversations": [{"from": "function_call", "value": value}]},
                "sharegpt",
                r"message 1 \(function_call\): its value is .*, not JSON of a call",
            )
            for value in ("add 2 and 3", "[]", "3", None)
        ],
        (
            {"conversations": [{"from": "function_call", "value": '{"arguments": {}}'}]},
            "sharegpt",
            r"message 1 \(function_call\) calls a tool without a name",
        ),
        (
            {"conversations": [{"from": "function_call", "value": '["add"]'}]},
            "sharegpt",
            r"message 1 \(function_call\): its tool_calls are .*, not a list of objects",
        ),
        (
            {"conversations": [{"from": "function_call", "value": NOW, "tool_calls": [CALL]}]},
            "sharegpt",
            r"message 1 \(function_call\) has tool_calls beside the calls in its value",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": "add"},
            "messages",
            "field 'tools' is 'add', not a list",
        ),
        (
            {"messages": [USER, ASSISTANT], "tools": {"a": 1}},
            "messages",
            "field 'tools' is .*, not a list",
        ),
        (
            {"prompt": "a", "completion": None},
            "prompt_completion",
            "field 'completion' is None, not text",
        ),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "field 'prompt' is 3, not text"),
        ({"prompt": "a", "completion": " "}, "prompt_completion", "message 2 .*is empty"),
        ({"instruction": 3, "output": "b"}, "alpaca", "field 'instruction' is 3, not text"),
        ({"instruction": "a", "input": 0, "output": "b"}, "alpaca", "field 'input' is 0, not text"),
        ({"instruction": "a", "output": ["b"]}, "alpaca", r"field 'output' is \['b'\], not text"),
        (
            {"instruction": "a", "output": "b", "system": 1},
            "alpaca",
            "field 'system' is 1, not text",
        ),
    ],
)
def test_what_is_no_conversation_is_said_in_one_line(record, format, reason):
    with pytest.raises(BadRecord, match=reason) as caught:
        conversation_of(record, format)
    assert "\n" not in str(caught.value)


def test_reasoning_in_parts_is_joined_and_no_arguments_are_an_empty_object():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    call = {"function": {"name": "now", "arguments": ""}}
    messages = [
        USER,
        {"role": "assistant", "content": "", "reasoning": parts, "tool_calls": [call]},
    ]
    read = conversation_of({"messages": messages}, "messages").messages[1]
    assert read["reasoning"] == "one two"
    assert read["tool_calls"] == [{"function": {"name": "now", "arguments": {}}}]
