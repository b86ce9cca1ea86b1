"""Records of every format become the same conversations."""

import copy
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pyarrow
import pyarrow.parquet
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

DOCS = Path(__file__).parents[2] / "docs"

# The same conversation in every format.
SAME: dict[str, dict[str, Any]] = {
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


def detect(fields: Collection[str]) -> str | None:
    return detect_format(fields, CONVERSATION_FORMATS)


def read_messages(*messages: Any) -> list[dict[str, Any]]:
    """Read a record of the format ``messages``, and return its messages."""
    return conversation_of({"messages": list(messages)}, "messages").messages


def calling(*calls: Any, content: Any = "") -> dict[str, Any]:
    """An assistant message with tool calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


# --- the list of formats


def fields_in_guide(page: str) -> dict[tuple[str, ...], str]:
    """Return the last cell of each row of a page's tables by the names in the first cell."""
    rows = re.findall(r"^\| (`.*?) \|.* \| (.*) \|$", (DOCS / page).read_text(), re.M)
    return {tuple(re.findall("`(.*?)`", first)): last for first, last in rows}


def test_every_format_of_conversations_is_a_choice_of_the_flag_and_in_the_guide():
    names = list(CONVERSATION_FORMATS)
    assert list(get_args(ConversationFormat)) == names
    assert list(get_args(get_type_hints(ChatConfig)["format"])) == ["auto", "text", *names]

    in_guide = fields_in_guide("guides/data.md")
    for name, format in CONVERSATION_FORMATS.items():
        assert in_guide[format.fields] == f"`{name}`"


def test_every_format_of_preference_data_is_in_the_guide():
    guide = (DOCS / "guides/preferences.md").read_text()
    for format in PREFERENCE_FORMATS.values():
        names = ", ".join(f"`{name}`" for name in format.fields)
        assert f"| {names} |" in guide


def test_a_conversation_has_the_same_tokens_in_every_format():
    assert list(SAME) == list(CONVERSATION_FORMATS)
    renderer = Renderer(make(unmarked(TEMPLATES["llama"])))
    expected = renderer(chat("2\n\n3", "five")).sequences[0]
    for format, record in SAME.items():
        assert detect(record) == format
        (sequence,) = renderer(conversation_of(record, format)).sequences
        np.testing.assert_array_equal(sequence.ids, expected.ids)
        np.testing.assert_array_equal(sequence.loss_mask, expected.loss_mask)


# --- detection


@pytest.mark.parametrize(
    ("fields", "format"),
    [
        ("messages", "messages"),
        ("id prompt messages", "messages"),
        ("conversations system", "sharegpt"),
        ("completion prompt", "prompt_completion"),
        ("instruction output", "alpaca"),
        ("instruction input output text", "alpaca"),
        ("text", None),
        ("prompt", None),
        ("instruction input", None),
        ("", None),
    ],
)
def test_a_format_is_detected_by_its_fields(fields, format):
    assert detect(fields.split()) == format


MESSAGES = {"messages": [USER, ASSISTANT]}


@pytest.mark.parametrize(
    ("detected_format", "other_format"),
    [
        ("messages", "sharegpt"),
        ("messages", "prompt_completion"),
        ("prompt_completion", "alpaca"),
    ],
)
def test_a_record_of_two_formats_needs_the_flag(detected_format, other_format):
    record = SAME[detected_format] | SAME[other_format]
    assert detect(record) == detected_format
    advice = f"choose one with --format {detected_format} or --format {other_format}"
    with pytest.raises(BadRecord, match=advice):
        conversation_of(record, detected_format, is_format_detected=True)


@pytest.mark.parametrize("format", ["sharegpt", "prompt_completion", "alpaca"])
def test_the_flag_chooses_one_of_two_formats(format):
    record = MESSAGES | SAME[format]
    assert conversation_of(record, "messages") == conversation_of(MESSAGES, "messages")
    assert conversation_of(record, format) == conversation_of(SAME[format], format)


@pytest.mark.parametrize("format", ["sharegpt", "prompt_completion", "alpaca"])
def test_null_fields_of_another_format_are_no_second_format(format):
    nulls = dict.fromkeys(CONVERSATION_FORMATS[format].fields)
    record = MESSAGES | nulls
    assert conversation_of(record, "messages", is_format_detected=True) == chat("a", "b")


def test_some_fields_of_another_format_are_no_second_format():
    record = {**MESSAGES, "prompt": "a", "instruction": "b"}
    assert conversation_of(record, "messages", is_format_detected=True) == chat("a", "b")


# --- spellings


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"prompt": [USER], "completion": [ASSISTANT]}, id="prompt of messages"),
        pytest.param({"prompt": "a", "completion": "b", "tools": ""}, id="empty tools"),
        pytest.param({"conversations": [USER, ASSISTANT]}, id="sharegpt with roles"),
        pytest.param(
            {
                "conversations": [{"from": "user", "value": "a"}, {"from": "model", "value": "b"}],
                "system": "",
            },
            id="sharegpt with other names",
        ),
        pytest.param({"instruction": "a", "input": "", "output": "b"}, id="alpaca, empty input"),
        pytest.param(
            {"instruction": "a", "input": None, "output": "b", "system": None},
            id="alpaca, null input",
        ),
        pytest.param({"instruction": "", "input": "a", "output": "b"}, id="alpaca, only input"),
        pytest.param(
            {
                "messages": [
                    {"role": "human", "content": "a"},
                    {"role": "chatgpt", "content": "b"},
                ],
                "tools": "[]",
            },
            id="messages with other names",
        ),
    ],
)
def test_other_spellings_of_a_format_are_read(record):
    conversation = conversation_of(record, detect(record))
    assert conversation.messages == [USER, ASSISTANT]
    assert conversation.tools is None


@pytest.mark.parametrize(
    "record",
    [
        pytest.param({"conversations": [human("a"), gpt("b")], "system": "s"}, id="sharegpt"),
        pytest.param({"instruction": "a", "output": "b", "system": "s"}, id="alpaca"),
    ],
)
def test_a_system_prompt_becomes_the_first_message(record):
    system = {"role": "system", "content": "s"}
    conversation = conversation_of(record, detect(record))
    assert conversation.messages == [system, USER, ASSISTANT]


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_the_answer_of_a_tool_is_a_message(name):
    record = {"conversations": [human("a"), gpt("b"), {"from": name, "value": "c"}]}
    messages = conversation_of(record, "sharegpt").messages
    assert messages == [USER, ASSISTANT, {"role": "tool", "content": "c"}]


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_content_in_parts_is_joined():
    parts = [text_part("one "), text_part("two") | {"image": None}]
    messages = read_messages({"role": "user", "content": parts}, ASSISTANT)
    assert messages == chat("one two", "b").messages


def test_reasoning_in_parts_is_joined():
    parts = [text_part("one "), text_part("two")]
    _, answer = read_messages(USER, {**ASSISTANT, "reasoning": parts})
    assert answer["reasoning"] == "one two"


@pytest.mark.parametrize(
    ("record", "is_plain"),
    [
        ({"prompt": "a", "completion": "b"}, True),
        ({"prompt": "", "completion": "b", "tools": None, "other": 1}, True),
        ({"prompt": [USER], "completion": "b"}, False),
        ({"prompt": "a", "completion": [ASSISTANT]}, False),
        ({"prompt": "a", "completion": "b", "tools": [TOOL]}, False),
    ],
)
def test_a_prompt_with_a_plain_text_is_marked(record, is_plain):
    assert is_plain_text(record) == is_plain
    assert conversation_of(record, "prompt_completion").is_plain_text == is_plain


@pytest.mark.parametrize(
    ("record", "is_plain"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, True),
        ({"prompt": "a", "chosen": [ASSISTANT], "rejected": "c"}, False),
        ({"prompt": "a", "completion": "b", "label": True}, True),
    ],
)
def test_preference_data_of_plain_texts_are_marked(record, is_plain):
    assert is_plain_text(record) == is_plain
    assert preference_of(record).is_plain_text == is_plain


# --- tool calls


def call_of(name: str, arguments: object) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


NOW = call_of("now", {"zone": "UTC"})
ADD = CALL["function"]


@pytest.mark.parametrize(
    ("value", "calls"),
    [
        pytest.param(json.dumps(ADD), [ADD], id="JSON of a call"),
        pytest.param(json.dumps([ADD, NOW]), [ADD, NOW], id="JSON of two calls"),
        pytest.param(NOW, [NOW], id="a call"),
        pytest.param([NOW], [NOW], id="a list"),
        pytest.param(
            json.dumps(call_of("now", '{"zone": null}')),
            [call_of("now", {"zone": None})],
            id="arguments as JSON",
        ),
        pytest.param('{"name": "now"}', [call_of("now", {})], id="no arguments"),
    ],
)
def test_a_function_call_of_sharegpt_is_an_assistant_message(value, calls):
    turns = [
        human("a"),
        {"from": "function_call", "value": value},
        {"from": "observation", "value": "5"},
        gpt("b"),
    ]
    record = {"conversations": turns, "tools": json.dumps([TOOL])}
    messages = [USER, calling(*calls), {"role": "tool", "content": "5"}, ASSISTANT]
    assert conversation_of(record, "sharegpt") == Conversation(messages, [TOOL])


def test_tool_calls_of_openai_and_of_templates_are_the_same():
    of_templates = {"messages": CALLING, "tools": [TOOL]}
    of_openai = {"messages": copy.deepcopy(CALLING), "tools": json.dumps([TOOL])}
    del of_openai["messages"][1]["content"]
    function = of_openai["messages"][1]["tool_calls"][0]["function"]
    function["arguments"] = '{"a": 2, "b": [3]}'
    before = copy.deepcopy(of_openai)

    expected = Conversation(CALLING, [TOOL])
    assert conversation_of(of_templates, "messages") == expected
    assert conversation_of(of_openai, "messages") == expected
    assert of_openai == before, "the record is not changed"


@pytest.mark.parametrize("arguments", ["null", None, "", "{}", {}])
def test_null_and_empty_arguments_are_no_arguments(arguments):
    call = {"id": None, "function": {"name": "now", "arguments": arguments, "strict": None}}
    messages = read_messages(USER, calling(call, content=None))
    assert messages == [USER, calling({"function": {"name": "now", "arguments": {}}})]


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    message = calling(call_of("add", arguments))
    assert read_messages(USER, message) == [USER, message]


# --- nulls

SEARCH_ARGUMENTS = {"limit": None, "filters": [{"by": None}]}
SEARCH_TOOL = {"name": "find", "parameters": {"type": "object", "default": None}}


def search_record(arguments: object, tools: object) -> dict[str, Any]:
    messages = [{**USER, "name": None}, calling(call_of("find", arguments), content=None)]
    return {"messages": messages, "tools": tools, "system": None}


@pytest.mark.parametrize("has_artificial_nulls", [True, False])
def test_nulls_in_json_of_arguments_and_schemas_are_kept(has_artificial_nulls):
    record = search_record(json.dumps(SEARCH_ARGUMENTS), json.dumps([SEARCH_TOOL]))
    conversation = conversation_of(record, "messages", has_artificial_nulls)
    messages = [USER, calling(call_of("find", SEARCH_ARGUMENTS))]
    assert conversation == Conversation(messages, [SEARCH_TOOL])


def test_nulls_in_arguments_and_schemas_are_kept_unless_the_file_format_adds_nulls():
    record = search_record(SEARCH_ARGUMENTS, [SEARCH_TOOL])
    conversation = conversation_of(record, "messages", has_artificial_nulls=False)
    messages = [USER, calling(call_of("find", SEARCH_ARGUMENTS))]
    assert conversation == Conversation(messages, [SEARCH_TOOL])


def test_nulls_that_the_file_format_may_have_added_are_removed():
    record = search_record(SEARCH_ARGUMENTS, [SEARCH_TOOL])
    conversation = conversation_of(record, "messages", has_artificial_nulls=True)
    messages = [USER, calling(call_of("find", {"filters": [{}]}))]
    tool = {"name": "find", "parameters": {"type": "object"}}
    assert conversation == Conversation(messages, [tool])


def test_records_come_back_from_parquet_without_the_nulls_that_it_adds(tmp_path):
    now = {"type": "function", "function": NOW}
    question, call, *rest = CALLING
    records = [
        {"messages": [question, {**call, "content": None}, *rest], "tools": [TOOL]},
        {"messages": [USER, calling(now, content="b")]},
        {"messages": [USER, calling(content="b")]},
    ]
    path = tmp_path / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    stored = pyarrow.parquet.read_table(path).to_pylist()
    assert stored[1]["tools"] is None
    assert stored[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["a"] is None

    with_tool, with_call, without_call = (
        conversation_of(record, "messages", has_artificial_nulls=True) for record in stored
    )
    assert with_tool == Conversation(CALLING, [TOOL])
    assert with_call == Conversation(records[1]["messages"], None)
    assert without_call == chat("a", "b")


# --- weights and other fields


@pytest.mark.parametrize("zero", [0, 0.0, False])
@pytest.mark.parametrize("default", [1, 1.0, True, None])
def test_a_weight_of_zero_is_kept_for_an_assistant_message(zero, default):
    messages = read_messages(
        {**USER, "weight": default},
        {**ASSISTANT, "weight": zero},
        {**USER, "weight": zero},
        {**ASSISTANT, "weight": default},
    )
    assert messages == [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]
    assert trained_messages(messages) == [True, False, True, True]
    assert without_weights(messages) == [USER, ASSISTANT, USER, ASSISTANT]


def test_other_fields_of_messages_are_counted_by_name():
    messages = read_messages(
        {**USER, "name": "Ann", "at": 1},
        {**ASSISTANT, "score": 0.5, "at": 2, "reasoning": "hm", "weight": 0},
    )
    assert messages[0]["at"] == 1
    assert other_fields_of(messages) == {"at": 2, "score": 1}
    assert other_fields_of(CALLING) == {}


# --- errors


def complaint(record: dict[str, Any], format: str) -> str:
    with pytest.raises(BadRecord) as error:
        conversation_of(record, format)
    assert "\n" not in str(error.value)
    return str(error.value)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


NOT_TEXT = "message 1 (user): its content is not text"


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([], "no messages"),
        (None, "field 'messages' is None, not a list"),
        ("hello", "field 'messages' is 'hello', not a list"),
        (["hello"], "message 1 is 'hello', not an object"),
        ([USER], "the conversation has no assistant message"),
        # Roles.
        ([USER, {"role": "bot", "content": "b"}], "message 2 has the role 'bot'; the known roles"),
        ([USER, {"role": ["user"], "content": "b"}], "message 2 has the role"),
        ([USER, {"content": "b"}], "message 2 has the role None"),
        # Contents.
        ([{"role": "user"}, ASSISTANT], NOT_TEXT),
        ([user(3), ASSISTANT], NOT_TEXT),
        ([user(["a"]), ASSISTANT], NOT_TEXT),
        (
            [user([{"type": "image"}]), ASSISTANT],
            f"{NOT_TEXT} alone: it has a part of the type 'image'",
        ),
        ([user([{"type": "text", "text": 3}]), ASSISTANT], "field 'text' is 3, not text"),
        ([USER, assistant(None)], "message 2 (assistant): its content is not text"),
        ([USER, assistant("")], "message 2 (assistant) is empty"),
        ([USER, assistant("b", reasoning={"a": 1})], "its reasoning is not text"),
        # Calls.
        ([USER, calling(CALL, content=3)], "message 2 (assistant): its content is not text"),
        ([USER, assistant("b", tool_calls="add")], "tool_calls are 'add', not a list"),
        ([USER, calling({"function": "add"})], "message 2 (assistant) calls a tool without a name"),
        # Weights.
        (
            [USER, assistant("b", weight=0.5)],
            "message 2 (assistant): its weight is 0.5, not 0 or 1",
        ),
        ([USER, assistant("b", weight=-1)], "its weight is -1, not 0 or 1"),
        ([USER, assistant("b", weight=2)], "its weight is 2, not 0 or 1"),
        ([USER, assistant("b", weight="0")], "its weight is '0', not 0 or 1"),
        ([USER, assistant("b", weight=[0])], "its weight is [0], not 0 or 1"),
        (
            [USER, assistant("b", weight=0), ASSISTANT],
            "messages 2 and 3 (assistant) are one turn, but one of them has weight 0",
        ),
    ],
)
def test_bad_messages_are_an_error_of_one_line(messages, error):
    assert error in complaint({"messages": messages}, "messages")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (
            {"images": ["cat.png"]},
            "the record has the field images, and models are trained on text alone",
        ),
        ({"tools": "add"}, "field 'tools' is 'add', not a list"),
        ({"tools": {"a": 1}}, "field 'tools' is {'a': 1}, not a list"),
    ],
)
def test_bad_fields_beside_messages_are_an_error_of_one_line(fields, error):
    assert error in complaint(MESSAGES | fields, "messages")


CALL_ERROR = "message 1 (function_call)"


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        ({"from": "narrator", "value": "b"}, "message 1 has the role 'narrator'"),
        (gpt(" \n"), "message 1 (gpt) is empty"),
        ({"from": "function_call", "value": "add 2 and 3"}, f"{CALL_ERROR}: its value is "),
        ({"from": "function_call", "value": "[]"}, "its value is '[]', not JSON of a call"),
        ({"from": "function_call", "value": "3"}, "its value is '3', not JSON of a call"),
        ({"from": "function_call", "value": None}, "its value is None, not JSON of a call"),
        (
            {"from": "function_call", "value": '{"arguments": {}}'},
            f"{CALL_ERROR} calls a tool without a name",
        ),
        (
            {"from": "function_call", "value": '["add"]'},
            f"{CALL_ERROR}: its tool_calls are ['add'], not a list of objects",
        ),
        (
            {"from": "function_call", "value": NOW, "tool_calls": [CALL]},
            f"{CALL_ERROR} has tool_calls beside the calls in its value",
        ),
    ],
)
def test_a_bad_turn_of_sharegpt_is_an_error_of_one_line(turn, error):
    assert error in complaint({"conversations": [turn]}, "sharegpt")


@pytest.mark.parametrize(
    ("format", "record", "error"),
    [
        ("sharegpt", {"other": 1}, "field 'conversations' is None, not a list"),
        ("prompt_completion", {"prompt": [], "completion": []}, "no messages"),
        ("prompt_completion", {"prompt": 3, "completion": "b"}, "field 'prompt' is 3, not text"),
        ("prompt_completion", {"prompt": "a", "completion": None}, "field 'completion' is None"),
        ("prompt_completion", {"prompt": "a", "completion": " "}, "message 2 (assistant) is empty"),
        ("alpaca", {"instruction": 3, "output": "b"}, "field 'instruction' is 3, not text"),
        (
            "alpaca",
            {"instruction": "a", "input": 0, "output": "b"},
            "field 'input' is 0, not text",
        ),
        ("alpaca", {"instruction": "a", "output": ["b"]}, "field 'output' is ['b'], not text"),
        (
            "alpaca",
            {"instruction": "a", "output": "b", "system": 1},
            "field 'system' is 1, not text",
        ),
    ],
)
def test_a_field_that_is_not_text_is_an_error_of_one_line(format, record, error):
    assert error in complaint(record, format)
