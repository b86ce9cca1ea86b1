"""Records of every format become the same conversations."""

import copy
import json
from collections.abc import Collection
from typing import Any, get_args, get_type_hints

import pytest

from llmtrain.data.config import ChatConfig
from llmtrain.data.formats import (
    CONVERSATION_FORMATS,
    Conversation,
    conversation_of,
    detect_format,
    preference_of,
)
from llmtrain.data.messages import BadRecord
from tests.data.chats import ASSISTANT, CALL, CALLING, TOOL, USER, chat

MESSAGES = {"messages": [USER, ASSISTANT]}


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


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


# --- detection


def test_every_format_of_conversations_is_a_choice_of_the_flag():
    choices = get_args(get_type_hints(ChatConfig)["format"])
    assert choices == ("auto", "text", *CONVERSATION_FORMATS)


def test_the_first_format_is_read_if_a_record_has_the_fields_of_two():
    record = MESSAGES | {"prompt": "c", "completion": "d"}
    assert conversation_of(record, detect(record)) == chat("a", "b")


# --- spellings


SPELLINGS: dict[str, dict[str, Any]] = {
    "empty-tools": {"prompt": "a", "completion": "b", "tools": ""},
    "sharegpt-with-roles": {"conversations": [USER, ASSISTANT]},
    "sharegpt-with-other-names": {
        "conversations": [{"from": "user", "value": "a"}, {"from": "model", "value": "b"}],
        "system": "",
    },
    "alpaca-with-nulls": {"instruction": "a", "input": None, "output": "b", "system": None},
    "alpaca-with-only-input": {"instruction": "", "input": "a", "output": "b"},
    "messages-with-other-names": {
        "messages": [{"role": "human", "content": "a"}, {"role": "chatgpt", "content": "b"}],
        "tools": "[]",
    },
    "content-in-parts": {
        "messages": [{**USER, "content": [text_part("a"), text_part("")]}, ASSISTANT],
    },
}


@pytest.mark.parametrize("record", SPELLINGS.values(), ids=SPELLINGS)
def test_other_spellings_of_a_format_are_read(record):
    assert conversation_of(record, detect(record))[:2] == ([USER, ASSISTANT], None)


def test_the_input_of_alpaca_follows_the_instruction_after_an_empty_line():
    record = {"instruction": "2", "input": "3", "output": "five"}
    assert conversation_of(record, "alpaca") == chat("2\n\n3", "five")


def test_the_messages_of_a_prompt_are_not_trained():
    record = {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]}
    assert conversation_of(record, "prompt_completion").untrained == 3


@pytest.mark.parametrize("format", ["sharegpt", "alpaca", "prompt_completion", "messages"])
def test_a_system_prompt_becomes_the_first_message(format):
    system_message = {"role": "system", "content": "s"}
    record = {
        "conversations": [human("a"), gpt("b")],
        "instruction": "a",
        "output": "b",
        "prompt": "a",
        "completion": "b",
        "messages": [USER, ASSISTANT],
        "system": "s",
    }
    conversation = conversation_of(record, format)
    assert conversation.messages == [system_message, USER, ASSISTANT]
    assert not conversation.is_plain_text

    pair = preference_of({"prompt": "a", "chosen": "b", "rejected": "c", "system": "s"})
    assert pair.prompt == [system_message, USER]
    own = {"messages": [system_message, USER, ASSISTANT], "system": "another"}
    assert conversation_of(own, "messages").messages == own["messages"]


# --- tool calls


def call_of(name: str, arguments: object) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def openai_call(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


NOW = call_of("now", {"zone": "UTC"})
ADD = CALL["function"]


@pytest.mark.parametrize("tool", ["tool", "function", "observation"])
@pytest.mark.parametrize(
    ("value", "calls"),
    [
        pytest.param(json.dumps([ADD, NOW]), [ADD, NOW], id="JSON of two calls"),
        pytest.param(NOW, [NOW], id="a call"),
        pytest.param(
            json.dumps(call_of("now", '{"zone": null}')),
            [call_of("now", {"zone": None})],
            id="arguments as JSON",
        ),
    ],
)
def test_a_function_call_of_sharegpt_is_an_assistant_message(value, calls, tool):
    turns = [
        human("a"),
        {"from": "function_call", "value": value},
        {"from": tool, "value": "5"},
        gpt("b"),
    ]
    record = {"conversations": turns, "tools": json.dumps([TOOL])}
    openai_calls = map(openai_call, calls)
    messages = [USER, calling(*openai_calls), {"role": "tool", "content": "5"}, ASSISTANT]
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("null", {}), (None, {}), ("", {}), ({}, {}), ("not JSON", "not JSON"), ("[1]", "[1]")],
)
def test_absent_arguments_are_an_empty_object(arguments, expected):
    call = {"id": None, "function": {"name": "now", "arguments": arguments, "strict": None}}
    messages = read_messages(USER, calling(call, content=None))
    assert messages == [USER, calling(openai_call(call_of("now", expected)))]


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
    messages = [USER, calling(openai_call(call_of("find", SEARCH_ARGUMENTS)))]
    assert conversation == Conversation(messages, [SEARCH_TOOL])


# --- weights and other fields


@pytest.mark.parametrize(("zero", "default"), [(0, 1), (0.0, 1.0), (False, True), (0, None)])
def test_a_weight_of_zero_is_kept_for_an_assistant_message(zero, default):
    messages = read_messages(
        {**USER, "weight": default},
        {**ASSISTANT, "weight": zero},
        {**USER, "weight": zero},
        {**ASSISTANT, "weight": default},
    )
    assert messages == [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]


# --- errors


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def function_call(value: Any, **fields: Any) -> dict[str, Any]:
    return {"from": "function_call", "value": value, **fields}


BAD_MESSAGES = [
    [],
    None,
    ["hello"],
    [USER],
    # Roles.
    [USER, {"role": "bot", "content": "b"}],
    # Contents.
    [{"role": "user"}, ASSISTANT],
    [user([{"type": "image"}]), ASSISTANT],
    [user([{"type": "text", "text": 3}]), ASSISTANT],
    [USER, assistant(None)],
    [USER, assistant("b", reasoning={"a": 1})],
    # Calls.
    [USER, calling(CALL, content=3)],
    [USER, assistant("b", tool_calls="add")],
    [USER, calling({"function": "add"})],
    # Weights.
    [USER, assistant("b", weight=0.5)],
    [USER, assistant("b", weight="0")],
]
BAD_TURNS_OF_SHAREGPT = [
    {"from": "narrator", "value": "b"},
    gpt(" \n"),
    function_call("add 2 and 3"),
    function_call('{"arguments": {}}'),
    function_call(NOW, tool_calls=[CALL]),
]


@pytest.mark.parametrize(
    ("format", "record"),
    [
        *[("messages", {"messages": messages}) for messages in BAD_MESSAGES],
        *[("sharegpt", {"conversations": [human("a"), turn]}) for turn in BAD_TURNS_OF_SHAREGPT],
        ("messages", {**MESSAGES, "images": ["cat.png"]}),
        ("messages", {**MESSAGES, "tools": "add"}),
        ("sharegpt", {"other": 1}),
        ("prompt_completion", {"prompt": "a", "completion": " "}),
        ("alpaca", {"instruction": "a", "input": 0, "output": "b"}),
    ],
)
def test_a_bad_record_is_an_error_of_one_line(format, record):
    with pytest.raises(BadRecord) as error:
        conversation_of(record, format)
    assert "\n" not in str(error.value)
