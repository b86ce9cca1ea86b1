"""Conversations of every usual format become the tokens of the chat template, and only the assistant's are trained."""

import copy
import datetime
import itertools
import json
from typing import get_args, get_type_hints

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat import (
    FORMATS,
    BadRow,
    Conversation,
    Renderer,
    conversation_of,
    end_of_turn_ids,
    recognise,
    set_template,
)
from llmtrain.data.conversations import ChatConfig
from llmtrain.errors import UserError

CONTROLS = [
    *["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    *["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<▁fin▁>", "<▁fin▁>>"],
]

# Small templates after those of well-known models. «...» is what the assistant says, a {% generation %} block or not.
TEMPLATES = {
    "chatml": """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content + '<|im_end|>' -}}»
    {%- else -%}
        {{- m.content + '<|im_end|>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}""",
    "llama": """
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content | trim + '<|eot_id|>' -}}»
    {%- else -%}
        {{- m.content | trim + '<|eot_id|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}""",
    "mistral": """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}
        {{- raise_exception('user and assistant\\nmust alternate') -}}
    {%- endif -%}
    {%- if m.role == 'user' -%}
        {{- '[INST] ' + m.content | trim + ' [/INST]' -}}
    {%- else -%}
        «{{- ' ' + m.content | trim + eos_token -}}»
    {%- endif -%}
{%- endfor -%}""",
    "gemma": """
{{- bos_token -}}
{%- for m in messages -%}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' -}}
    {%- if m.role == 'assistant' -%}
        «{{- m.content | trim + '<end_of_turn>' -}}»
    {%- else -%}
        {{- m.content | trim + '<end_of_turn>' -}}
    {%- endif -%}
    {{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}""",
    # its block takes in the line break too, as some do
    "zephyr": """
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}
        {{- '<|assistant|>\\n' -}}«{{- m.content + eos_token + '\\n' -}}»
    {%- else -%}
        {{- '<|' + m.role + '|>\\n' + m.content + eos_token + '\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}""",
}
END = {
    "chatml": "<|im_end|>",
    "llama": "<|eot_id|>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
    "zephyr": "</s>",
}
# Reasoning is shown in the turns after the last question alone, and there even where it is empty.
QWEN3 = """
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' -%}{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.index0 > ns.last -%}
        {{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- m.content.split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# The generation prompt begins the reasoning, which no finished turn shows.
R1 = """
{{- bos_token -}}
{%- for m in messages -%}
    {%- if m.role == 'user' -%}{{- '<|user|>' + m.content -}}
    {%- else -%}{{- '<|assistant|>' + m.content.split('</think>')[-1] + eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>\\n' -}}{%- endif -%}"""

TEXT = ["The answer is yes, and the question is: what is the answer? user assistant model system\n\n" * 20]


def unmarked(template: str) -> str:
    return template.replace("«", "").replace("»", "")


def marked(template: str) -> str:
    return template.replace("«", "{%- generation -%}").replace("»", "{%- endgeneration -%}")


def make(template: str | None = None, spec: str = "byte") -> PreTrainedTokenizerFast:
    backend = tok.train_tokenizer(spec, iter(TEXT), lambda: iter(TEXT))
    backend.add_special_tokens(CONTROLS)
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = template
    return tokenizer


def chat(*contents: str) -> Conversation:
    """User and assistant in turn, the user first."""
    roles = ("user", "assistant")
    return Conversation([{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)], None)


def said(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[str]:
    """The trained text, a string for each unbroken run of tokens."""
    rendered = Renderer(tokenizer)(conversation)
    runs = itertools.groupby(range(len(rendered.ids)), key=lambda place: rendered.trained[place])
    return [tokenizer.decode(rendered.ids[list(places)]) for trained, places in runs if trained]


# --- formats ---


SAME = {
    "messages": {"messages": [{"role": "user", "content": "2\n\n3"}, {"role": "assistant", "content": "five"}]},
    "prompt_completion": {"prompt": "2\n\n3", "completion": "five"},
    "sharegpt": {"conversations": [{"from": "human", "value": "2\n\n3"}, {"from": "gpt", "value": "five"}]},
    "alpaca": {"instruction": "2", "input": "3", "output": "five"},
}


def test_the_same_conversation_is_the_same_tokens_in_every_format():
    assert tuple(SAME) == FORMATS
    assert {*get_args(get_type_hints(ChatConfig)["format"])} == {"auto", "text", *FORMATS}, "the choices of --format"
    renderer = Renderer(make(unmarked(TEMPLATES["llama"])))
    rendered = [renderer(conversation_of(record, recognise(record))) for record in SAME.values()]
    for other in rendered:
        np.testing.assert_array_equal(other.ids, rendered[0].ids)
        np.testing.assert_array_equal(other.trained, rendered[0].trained)


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
    assert recognise(fields) == recognise(dict.fromkeys(fields)) == format


@pytest.mark.parametrize(
    ("record", "system"),
    [
        ({"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}, None),
        ({"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, None),
        ({"conversations": [{"from": "user", "value": "a"}, {"from": "model", "value": "b"}], "system": ""}, None),
        ({"instruction": "a", "input": "", "output": "b"}, None),
        ({"instruction": "a", "input": None, "output": "b", "system": None}, None),
        ({"instruction": "", "input": "a", "output": "b"}, None),
        ({"messages": [{"role": "human", "content": "a"}, {"role": "chatgpt", "content": "b"}], "tools": "[]"}, None),
        ({"prompt": "a", "completion": "b", "tools": ""}, None),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"}, "s"),
        ({"instruction": "a", "output": "b", "system": "s"}, "s"),
    ],
)
def test_other_spellings_of_a_format_are_read_too(record, system):
    before = [{"role": "system", "content": system}] if system else []
    assert conversation_of(record, recognise(record)) == (before + chat("a", "b").messages, None)


@pytest.mark.parametrize("name", ["tool", "function", "observation"])
def test_what_a_tool_answers_is_a_message_of_its_own(name):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": name, "value": "c"}]
    assert conversation_of({"conversations": turns}, "sharegpt").messages[2] == {"role": "tool", "content": "c"}


def test_content_in_parts_is_joined():
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two", "image": None}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "b"}]
    assert conversation_of({"messages": messages}, "messages") == chat("one two", "b")


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3]}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLING = [
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [CALL]},
    {"role": "tool", "content": "5", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "Five."},
]


def test_tool_calls_are_read_in_openais_spelling_and_in_templates():
    spelled = copy.deepcopy(CALLING)
    del spelled[1]["content"]
    spelled[1]["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": [3]}'
    record = {"messages": spelled, "tools": json.dumps([TOOL])}
    before = copy.deepcopy(record)
    assert conversation_of(record, "messages") == (CALLING, [TOOL])
    assert record == before
    assert conversation_of({"messages": CALLING, "tools": [TOOL]}, "messages") == (CALLING, [TOOL])


@pytest.mark.parametrize("arguments", ["not JSON", "[1]", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(arguments):
    call = {"name": "add", "arguments": arguments}
    record = {"messages": [*chat("a").messages, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    assert conversation_of(record, "messages").messages[1]["tool_calls"] == [call]


def test_fields_that_parquet_fills_with_none_are_absent(tmp_path):
    other = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    records = [
        {"messages": [CALLING[0], {**CALLING[1], "content": None}, *CALLING[2:]], "tools": [TOOL]},
        {"messages": [*chat("a").messages, {"role": "assistant", "content": "b", "tool_calls": [other]}]},
        {"messages": [*chat("a").messages, {"role": "assistant", "content": "b", "tool_calls": []}]},
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "chats.parquet")
    read = pq.read_table(tmp_path / "chats.parquet").to_pylist()
    assert read[1]["tools"] is None
    assert read[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["a"] is None
    assert conversation_of(read[0], "messages") == (CALLING, [TOOL])
    assert conversation_of(read[1], "messages") == (records[1]["messages"], None)
    assert conversation_of(read[2], "messages") == chat("a", "b")


USER, ASSISTANT = chat("a", "b").messages


@pytest.mark.parametrize(
    ("record", "format", "reason"),
    [
        ({"messages": []}, "messages", "no messages"),
        ({"prompt": [], "completion": []}, "prompt_completion", "no messages"),
        ({"messages": None}, "messages", "field 'messages' is None, not a list"),
        ({"messages": "hello"}, "messages", "field 'messages' is 'hello', not a list"),
        ({"other": 1}, "sharegpt", "field 'conversations' is None, not a list"),
        ({"messages": ["hello"]}, "messages", "message 1 is 'hello', not an object"),
        ({"messages": [USER, {"role": "bot", "content": "b"}]}, "messages", "message 2 has the role 'bot'; known are"),
        ({"messages": [USER, {"role": ["user"], "content": "b"}]}, "messages", "message 2 has the role"),
        ({"messages": [USER, {"content": "b"}]}, "messages", "message 2 has the role None"),
        ({"conversations": [{"from": "narrator", "value": "b"}]}, "sharegpt", "message 1 has the role 'narrator'"),
        ({"messages": [{"role": "user"}, ASSISTANT]}, "messages", r"message 1 \(user\): its content is not text"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages", "message 2 .*content is not text"),
        ({"messages": [{"role": "user", "content": 3}, ASSISTANT]}, "messages", "message 1 .*content is not text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}, ASSISTANT]},
            "messages",
            "message 1 .*content is not text",
        ),
        ({"messages": [{"role": "user", "content": ["a"]}, ASSISTANT]}, "messages", "message 1 .*content is not text"),
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
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages", r"message 2 \(assistant\) is empty"),
        ({"conversations": [{"from": "gpt", "value": " \n"}]}, "sharegpt", r"message 1 \(gpt\) is empty"),
        ({"messages": [USER]}, "messages", "the assistant has no turn"),
        ({"messages": [USER, ASSISTANT], "tools": "add"}, "messages", "field 'tools' is 'add', not a list"),
        ({"messages": [USER, ASSISTANT], "tools": {"a": 1}}, "messages", "field 'tools' is .*, not a list"),
        ({"prompt": "a", "completion": None}, "prompt_completion", "field 'completion' is None, not text"),
        ({"prompt": 3, "completion": "b"}, "prompt_completion", "field 'prompt' is 3, not text"),
        ({"prompt": "a", "completion": " "}, "prompt_completion", "message 2 .*is empty"),
        ({"instruction": 3, "output": "b"}, "alpaca", "field 'instruction' is 3, not text"),
        ({"instruction": "a", "input": 0, "output": "b"}, "alpaca", "field 'input' is 0, not text"),
        ({"instruction": "a", "output": ["b"]}, "alpaca", r"field 'output' is \['b'\], not text"),
        ({"instruction": "a", "output": "b", "system": 1}, "alpaca", "field 'system' is 1, not text"),
    ],
)
def test_what_is_no_conversation_is_said_in_one_line(record, format, reason):
    with pytest.raises(BadRow, match=reason) as caught:
        conversation_of(record, format)
    assert "\n" not in str(caught.value)


# --- templates ---


def test_chatml_adds_its_tokens_once():
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT)), block_size=32)
    size = len(tokenizer)
    assert len(set_template(tokenizer, "chatml")) == 2
    assert len(tokenizer) == size + 2
    assert set_template(tokenizer, "chatml") == set_template(tokenizer, None) == []
    assert (tokenizer.bos_token, tokenizer.eos_token) == (tok.END_OF_TEXT,) * 2
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn_ids(tokenizer) == {end, tokenizer.eos_token_id}
    assert tokenizer.encode("<|im_end|>") == [end]


def test_the_template_and_its_tokens_outlive_saving_and_loading(tmp_path):
    made = make()
    set_template(made, "chatml")
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert set_template(loaded, None) == []
    assert end_of_turn_ids(loaded) == end_of_turn_ids(made)
    np.testing.assert_array_equal(Renderer(loaded)(chat("a", "b")).ids, Renderer(made)(chat("a", "b")).ids)
    assert said(loaded, chat("a", "b")) == ["b<|im_end|>"]


def test_chatml_shows_tools_calls_and_reasoning():
    tokenizer = make()
    set_template(tokenizer, "chatml")
    rendered = Renderer(tokenizer)(Conversation(CALLING, [TOOL, TOOL]))
    tool = json.dumps(TOOL)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
    turns = ["<think>\nI add.\n</think>\n\n" + call + "<|im_end|>", "Five.<|im_end|>"]
    assert tokenizer.decode(rendered.ids) == (
        f"<|im_start|>system\n<tools>\n{tool}\n{tool}\n</tools><|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        f"<|im_start|>assistant\n{turns[0]}\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n{turns[1]}\n"
    )
    assert said(tokenizer, Conversation(CALLING, [TOOL])) == turns
    assert (rendered.turns, rendered.ended) == (2, 2)


def test_chatml_writes_a_call_of_either_form_on_lines_of_its_own():
    tokenizer = make()
    set_template(tokenizer, "chatml")
    calls = {"role": "assistant", "content": "So:", "tool_calls": [CALL["function"], CALL]}
    call = '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
    assert said(tokenizer, Conversation([USER, calls], None)) == [f"So:{call}{call}<|im_end|>"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_chatml_begins_with_bos_where_the_tokenizer_begins_every_text_with_it(adds_bos):
    tokenizer = make()
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    set_template(tokenizer, "chatml")
    ids = Renderer(tokenizer)(chat("a", "b")).ids.tolist()
    assert ids.count(tokenizer.bos_token_id) == adds_bos
    assert (ids[0] == tokenizer.bos_token_id) == adds_bos


def test_a_template_can_be_a_file(tmp_path):
    path = tmp_path / "llama.jinja"
    path.write_text(marked(TEMPLATES["llama"]))
    tokenizer = make(TEMPLATES["chatml"])
    assert set_template(tokenizer, str(path)) == []
    assert said(tokenizer, chat("a", "b")) == ["b<|eot_id|>"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "not chatml, and no file to read .*No such file"),
        ("\udcff", "not chatml, and no file to read .*utf-8"),
        ("{% for m in messages %}", "cannot show .*Unexpected end of template"),
        ("{{ raise_exception('only\nin German') }}", "cannot show .*refuses it: only"),
        ("{{ messages.x.y }}", "cannot show .*has no attribute 'x'"),
        ("Dear assistant,\n", "does not show what is said"),
        ("", "does not show what is said"),
    ],
)
def test_a_file_that_is_no_template_is_an_error_of_one_line(tmp_path, content, reason):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=reason) as caught:
        set_template(make(), str(path))
    assert f"--chat_template {path}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_template_asks_for_one():
    with pytest.raises(UserError, match="no chat template; give --chat_template chatml or a file"):
        set_template(make(), None)
    with pytest.raises(UserError, match="the tokenizer's own chat template cannot show"):
        set_template(make("{{ raise_exception('no') }}"), None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_ends_a_turn_is_learnt_from_the_template(name):
    tokenizer = make(unmarked(TEMPLATES[name]))
    assert set(tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer))) == {"</s>", END[name]}


@pytest.mark.parametrize("end", ["<|im_end|>", "\n<|im_end|>", " .<|im_end|></s>", "<▁fin▁>>", "<▁fin▁>"])
def test_the_end_of_a_turn_is_the_first_token_behind_the_words_that_was_added_and_is_not_blank(end):
    tokenizer = make(unmarked(TEMPLATES["chatml"]).replace("<|im_end|>", end.replace("\n", "\\n")))
    tokenizer.add_tokens(["\n", " "])
    wanted = {"</s>", end.strip(" \n.").removesuffix("</s>")}
    assert set(tokenizer.convert_ids_to_tokens(end_of_turn_ids(tokenizer))) == wanted


def test_a_template_that_ends_no_turn_leaves_eos():
    tokenizer = make("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert end_of_turn_ids(tokenizer) == {tokenizer.eos_token_id}


# --- what is trained ---


@pytest.mark.parametrize("mark", [marked, unmarked])
@pytest.mark.parametrize("spec", ["byte", "bpe:320"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_only_what_the_assistant_says_and_the_end_of_its_turn_is_trained(name, spec, mark):
    tokenizer = make(mark(TEMPLATES[name]), spec)
    conversation = chat("What is the answer?", "The answer", "The answer?", "yes, the answer", "and?")
    conversation = Conversation(conversation.messages[: 4 if name == "mistral" else 5], None)
    space = " " if name == "mistral" else ""
    assert said(tokenizer, conversation) == [space + text + END[name] for text in ("The answer", "yes, the answer")]
    rendered = Renderer(tokenizer)(conversation)
    assert (rendered.turns, rendered.ended) == (2, 2)
    assert rendered.trained_bytes == len("The answer" + "yes, the answer") + 2 * len(space)
    assert (rendered.ids.dtype, rendered.trained.dtype) == (np.int32, np.bool_)


CONVERSATIONS = [
    chat("a", "b"),
    chat("a", "b", "c", "d", "e", "f"),
    chat("  padded\n", "\n padded both ways \n\n", "\t", " x "),
    chat("🙂", "🙂👩‍👩‍👧‍👦", "é", "e\u0301漢字\u00a0", "\u202e", "\u3000wide\u3000"),
    chat("same", "same", "same", "same"),
    chat("assistant\n", "<think>\nhm\n</think>\n\nuser\n", "</s", "<|im_end|"),
]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("spec", ["byte", "bpe:320"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_spans_are_the_same_with_and_without_generation_blocks(name, spec, conversation):
    first, second = (Renderer(make(mark(TEMPLATES[name]), spec))(conversation) for mark in (marked, unmarked))
    np.testing.assert_array_equal(first.ids, second.ids)
    np.testing.assert_array_equal(first.trained, second.trained)
    assert first[2:] == second[2:]
    assert first.trained.any()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_tokens_are_those_that_the_template_gives_to_a_serving_model(name):
    tokenizer = make(marked(TEMPLATES[name]))
    conversation = chat("a", "b", "c", "d")
    served = tokenizer.apply_chat_template(conversation.messages, return_dict=False)
    ids = Renderer(tokenizer)(conversation).ids.tolist()
    assert ids == served
    assert ids.count(tokenizer.bos_token_id) == (1 if "bos_token" in TEMPLATES[name] else 0)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_conversation_has_one_bos_whatever_the_tokenizer_does_with_texts(adds_bos):
    tokenizer = make(unmarked(TEMPLATES["llama"]))
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
        )
    ids = Renderer(tokenizer)(chat("a", "b")).ids.tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


@pytest.mark.parametrize("mark", [marked, unmarked])
def test_what_is_trained_is_a_matter_of_place_and_not_of_tokens(mark):
    tokenizer = make(mark(TEMPLATES["zephyr"]))
    tokenizer.pad_token = tokenizer.eos_token
    rendered = Renderer(tokenizer)(chat("yes", "yes", "yes", "yes"))
    ends = rendered.trained[rendered.ids == tokenizer.eos_token_id]
    assert ends.tolist() == [False, True, False, True]
    assert rendered.ended == 2


def test_a_template_with_reasoning_in_the_last_turn_alone_trains_what_it_shows():
    """Earlier turns are rendered without it, so that they are no beginning of the whole."""
    tokenizer = make(QWEN3)
    conversation = chat("a", "<think>\nhm\n</think>\n\nb", "c", "d", "e", "f")
    assert tokenizer.decode(Renderer(tokenizer)(conversation).ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n"
        "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nf<|im_end|>\n"
    )
    assert said(tokenizer, conversation) == ["b<|im_end|>", "d<|im_end|>", "<think>\n\n</think>\n\nf<|im_end|>"]
    conversation.messages[-1]["reasoning_content"] = "why not"
    assert said(tokenizer, conversation)[-1] == "<think>\nwhy not\n</think>\n\nf<|im_end|>"
    conversation.messages.append({"role": "user", "content": "g"})
    assert said(tokenizer, conversation) == ["b<|im_end|>", "d<|im_end|>", "f<|im_end|>"]


@pytest.mark.parametrize("answers", [["b", "d"], ["<b>b</b>", "<think"], ["<think>\nhm\n</think>b", "d"]])
def test_a_generation_prompt_that_begins_the_reasoning_hides_nothing_of_the_answer(answers):
    tokenizer = make(R1)
    texts = [answer.split("</think>")[-1] + "</s>" for answer in answers]
    assert said(tokenizer, chat("a", answers[0], "c", answers[1])) == texts


def test_a_turn_that_only_calls_a_tool_is_trained_without_generation_blocks_too():
    call = "{{- m.content or m.tool_calls[0].function | tojson -}}{{- '<|im_end|>' -}}"
    tokenizer = make(unmarked(TEMPLATES["chatml"].replace("{{- m.content + '<|im_end|>' -}}", call)))
    turns = ['{"name": "add", "arguments": {"a": 2, "b": [3]}}<|im_end|>', "Five.<|im_end|>"]
    assert said(tokenizer, Conversation(CALLING, [TOOL])) == turns


def test_tools_have_the_template_that_the_tokenizer_keeps_for_them():
    plain = marked(TEMPLATES["chatml"])
    tokenizer = make()
    tokenizer.chat_template = {"default": plain, "tool_use": "{{ tools[0].function.name }}" + plain}
    renderer = Renderer(tokenizer)
    assert tokenizer.decode(renderer(Conversation([USER, ASSISTANT], [TOOL])).ids).startswith("add<|im_start|>user")
    assert tokenizer.decode(renderer(Conversation([USER, ASSISTANT], None)).ids).startswith("<|im_start|>user")


@pytest.mark.parametrize(("mark", "more"), [(unmarked, []), (marked, ["</s>"])])
def test_a_second_end_behind_the_last_turn_is_trained_only_where_it_is_marked(mark, more):
    template = TEMPLATES["chatml"].rpartition("{%- endif -%}")[0] + "{%- else -%}«{{- eos_token -}}»{%- endif -%}"
    tokenizer = make(mark(template))
    rendered = Renderer(tokenizer)(chat("a", "b", "c", "d"))
    assert tokenizer.decode(rendered.ids).endswith("d<|im_end|>\n</s>")
    assert said(tokenizer, chat("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>", *more]
    assert (rendered.turns, rendered.ended) == (2, 2)


def test_a_turn_may_be_marked_in_parts():
    template = TEMPLATES["chatml"].replace("m.content + '<|im_end|>' -}}»", "m.content -}}»«{{- '<|im_end|>\\n' -}}»")
    tokenizer = make(marked(template))
    rendered = Renderer(tokenizer)(chat("a", "b", "c", "d"))
    assert said(tokenizer, chat("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]
    assert (rendered.turns, rendered.ended, rendered.trained_bytes) == (2, 2, 2)


def test_two_ends_side_by_side_are_both_trained():
    tokenizer = make(unmarked(TEMPLATES["chatml"].replace("<|im_end|>' -}}»", "<|im_end|></s>' -}}»")))
    assert said(tokenizer, chat("a", "b", "c", "d")) == ["b<|im_end|></s>", "d<|im_end|></s>"]


@pytest.mark.parametrize("wanted", [["b<|im_end|>", "d<|im_end|>"], ["d<|im_end|>"]])
def test_a_template_may_mark_the_last_turn_alone(wanted):
    template = TEMPLATES["chatml"]
    if len(wanted) == 1:
        template = template.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert said(make(marked(template)), chat("a", "b", "c", "d")) == wanted


def test_several_turns_of_the_assistant_in_a_row_are_trained_each():
    conversation = Conversation([ASSISTANT, USER, ASSISTANT, ASSISTANT], None)
    for mark in (marked, unmarked):
        assert said(make(mark(TEMPLATES["chatml"])), conversation) == ["b<|im_end|>"] * 3


# "Assistant:" and no token at the end
PLAIN = """
{%- for m in messages -%}
    {%- if m.role == 'assistant' -%}{{- 'Assistant: ' -}}«{{- m.content -}}»{{- '\\n' -}}
    {%- else -%}{{- 'User: ' + m.content + '\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant: ' -}}{%- endif -%}"""


def test_a_token_that_begins_before_the_assistant_does_is_not_trained():
    tokenizer = make(marked(PLAIN), "bpe:320")
    assert tokenizer.tokenize(": question?") == [":", "Ġquestion", "?"]
    assert said(tokenizer, chat("a", "question?")) == ["?"]


def test_a_token_that_ends_after_the_assistant_does_is_not_trained():
    tokenizer = make(marked(PLAIN).replace("{{- '\\n' -}}", "{{- 'on' -}}"), "bpe:320")
    rendered = Renderer(tokenizer)(chat("a", "?? questi"))
    assert tokenizer.decode(rendered.ids).endswith("Assistant: ?? question")
    assert said(tokenizer, chat("a", "?? questi")) == ["??"]
    assert (rendered.turns, rendered.ended, rendered.trained_bytes) == (1, 0, 2)


def test_a_turn_without_an_end_is_counted():
    rendered = Renderer(make(marked(TEMPLATES["llama"]).replace("+ '<|eot_id|>' -}}{%- endg", "-}}{%- endg")))(
        chat("a", "b", "c", "d")
    )
    assert (rendered.turns, rendered.ended, rendered.trained_bytes) == (2, 0, 2)
    assert rendered.trained.sum() == 2


def sentencepiece() -> PreTrainedTokenizerFast:
    """Characters that it lacks are bytes, and every text begins with a space."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdefghijklmnopqrstuvwxyz<|>_\n:", "▁b"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("▁", "b")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([*CONTROLS, tok.END_OF_TEXT])
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = unmarked(TEMPLATES["chatml"])
    return tokenizer


@pytest.mark.parametrize("make_tokenizer", [lambda: make(unmarked(TEMPLATES["chatml"])), sentencepiece])
@pytest.mark.parametrize("text", ["🙂", "🙂b🙂", "é", "e\u0301", "👩‍👩‍👧‍👦", "漢字", "b 🙂 b"])
def test_a_character_of_many_tokens_is_trained_whole(make_tokenizer, text):
    tokenizer = make_tokenizer()
    rendered = Renderer(tokenizer)(chat("🙂" + text, text, text, text))
    assert said(tokenizer, chat("🙂" + text, text, text, text)) == [text + "<|im_end|>"] * 2
    assert rendered.trained_bytes == 2 * len(text.encode())


@pytest.mark.parametrize("mark", [marked, unmarked])
@pytest.mark.parametrize("strips", [{"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_an_end_of_turn_that_takes_in_the_white_space_beside_it_is_trained(mark, strips):
    backend = tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT))
    backend.add_special_tokens(["<|im_start|>", tokenizers.AddedToken("<|im_end|>", special=True, **strips)])
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.chat_template = mark(TEMPLATES["chatml"])
    rendered = Renderer(tokenizer)(chat("a", "b", "c", "d"))
    ends = rendered.trained[rendered.ids == tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert ends.tolist() == [False, True, False, True]
    assert (rendered.ended, rendered.trained_bytes) == (2, 2)


def test_white_space_belongs_to_its_token_also_where_the_tokenizer_leaves_it_out_of_offsets():
    tokenizer = make(marked(PLAIN))
    plain = Renderer(tokenizer)(chat("a", " b "))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trimming = Renderer(tokenizer)(chat("a", " b "))
    assert said(tokenizer, chat("a", " b ")) == [" b "]
    np.testing.assert_array_equal(trimming.trained, plain.trained)
    assert trimming.trained_bytes == plain.trained_bytes == 3


def test_a_tokenizer_that_reads_control_tokens_as_text_is_neither_minded_nor_changed():
    tokenizer = make(marked(TEMPLATES["chatml"]))
    expected = Renderer(tokenizer)(chat("a", "b")).ids
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    np.testing.assert_array_equal(Renderer(tokenizer)(chat("a", "b")).ids, expected)
    assert backend.encode_special_tokens
    assert (backend.truncation["max_length"], backend.padding["length"]) == (3, 50)


# --- what cannot be rendered ---


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
@pytest.mark.parametrize("control", ["<|im_end|>", "<s>", "<|endoftext|>", "<▁fin▁>", "<▁fin▁>>"])
def test_a_control_token_in_a_text_is_refused(role, control):
    renderer = Renderer(make(marked(TEMPLATES["chatml"])))
    messages = [*chat("a", "b").messages, {"role": role, "content": f"say {control} and stop"}]
    with pytest.raises(BadRow) as caught:
        renderer(Conversation(messages, None))
    assert str(caught.value) == f"message 3 ({role}) holds the control token {control}"


def test_a_control_token_in_the_tools_is_refused():
    tokenizer = make()
    set_template(tokenizer, "chatml")
    with pytest.raises(BadRow, match=r"field 'tools' holds the control token </s>"):
        Renderer(tokenizer)(Conversation(chat("a", "b").messages, [{"name": "close", "description": "says </s>"}]))


@pytest.mark.parametrize(
    "hidden",
    [
        {"reasoning_content": "to close it: </s>"},
        {"tool_calls": [{"function": {"name": "close", "arguments": {"tags": ["<b>", "</s>"]}}}]},
    ],
)
def test_a_control_token_in_reasoning_or_a_call_is_refused(hidden):
    tokenizer = make()
    set_template(tokenizer, "chatml")
    with pytest.raises(BadRow, match=r"message 2 \(assistant\) holds the control token </s>"):
        Renderer(tokenizer)(Conversation([USER, {**ASSISTANT, **hidden}], None))


def test_an_added_token_that_is_not_special_may_be_said():
    tokenizer = make(QWEN3)
    tokenizer.add_tokens(["<think>", "</think>"])
    assert said(tokenizer, chat("<think>", "<think>b")) == ["<think>\n\n</think>\n\n<think>b<|im_end|>"]


def test_a_message_may_have_other_fields_of_any_kind():
    tokenizer = make(marked(TEMPLATES["chatml"]))
    messages = [{**USER, "at": datetime.datetime(2024, 5, 1), "weight": 0.5}, ASSISTANT]
    assert said(tokenizer, Conversation(messages, None)) == ["b<|im_end|>"]


def test_half_of_a_surrogate_pair_is_refused():
    with pytest.raises(BadRow, match="half of a surrogate pair"):
        Renderer(make(marked(TEMPLATES["chatml"])))(chat("a\ud83d", "b"))


def test_what_a_template_refuses_is_said_in_its_own_words_and_one_line():
    renderer = Renderer(make(unmarked(TEMPLATES["mistral"])))
    with pytest.raises(BadRow) as caught:
        renderer(Conversation([USER, USER, ASSISTANT], None))
    assert str(caught.value) == "the chat template refuses it: user and assistant"


@pytest.mark.parametrize("mark", [marked, unmarked])
@pytest.mark.parametrize("name", ["chatml", "llama"])
def test_a_call_that_the_template_does_not_show_is_not_trained_as_silence(name, mark):
    with pytest.raises(BadRow, match="shows nothing of what the assistant says in one of its turns"):
        Renderer(make(mark(TEMPLATES[name])))(Conversation(CALLING, [TOOL]))


@pytest.mark.parametrize(
    "said_by_bots", ["«{%- if m.role == 'bot' -%}x{%- endif -%}»", "{%- if false -%}«x»{%- endif -%}"]
)
def test_a_template_that_marks_nothing_of_a_conversation_is_refused(said_by_bots):
    template = "{%- for m in messages -%}" + said_by_bots + "{{- m.content -}}{%- endfor -%}"
    with pytest.raises(BadRow, match="shows nothing of what the assistant says"):
        Renderer(make(marked(template)))(chat("a", "b"))


# Its first line holds the number of turns.
COUNTS = "{{- messages | length -}}" + TEMPLATES["chatml"]
# The system's words stand before the last question, wherever that is.
SYSTEM_LAST = """
{%- for m in messages if m.role != 'system' -%}
    {%- if loop.index0 >= loop.length - 2 and m.role == 'user' -%}{{- messages[0].content -}}{%- endif -%}
    {{- '<|im_start|>' + m.content -}}{%- if m.role == 'assistant' -%}{{- '<|im_end|>' -}}{%- endif -%}
{%- endfor -%}"""
# Only the last turn of all is ended, so that the end of the first cannot be found.
ENDED_ONCE = """
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- else -%}{{- eos_token -}}{%- endif -%}"""
# A call is not ended, and an answer has its reasoning in the last turn alone.
CALL_WITHOUT_END = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' -}}
    {%- if m.role == 'assistant' and loop.last -%}{{- '<think></think>' -}}{%- endif -%}
    {{- m.tool_calls | tojson if m.tool_calls else m.content + '<|im_end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (unmarked(COUNTS), chat("a", "b", "c", "d").messages),
        (SYSTEM_LAST, [{"role": "system", "content": "s"}, *chat("a", "b", "c", "d").messages]),
        (ENDED_ONCE, chat("a", "b", "c", "d").messages),
        (ENDED_ONCE, chat("a", "b", "c").messages),
        (CALL_WITHOUT_END, CALLING),
    ],
)
def test_a_template_that_rewrites_what_came_before_is_refused_and_says_what_helps(template, messages):
    with pytest.raises(BadRow, match=r"rewrites what came before message \d.*--chat_template with {% generation %}"):
        Renderer(make(template))(Conversation(messages, None))


def test_the_same_template_with_generation_blocks_is_not():
    assert said(make(marked(COUNTS)), chat("a", "b", "c", "d")) == ["b<|im_end|>", "d<|im_end|>"]


def is_said(text: str) -> bool:
    return bool(text.strip()) and not any(control in text for control in (*CONTROLS, tok.END_OF_TEXT))


@given(st.lists(st.tuples(st.text(), st.text()).filter(lambda turn: all(map(is_said, turn))), min_size=1, max_size=4))
def test_what_is_trained_reads_as_the_assistants_words_and_the_ends_of_its_turns(turns):
    answers = [answer for _, answer in turns]
    for mark in (marked, unmarked):
        tokenizer = RENDERERS[mark].tokenizer
        rendered = RENDERERS[mark](chat(*itertools.chain(*turns)))
        expected = "".join(answer + "<|im_end|>" for answer in answers)
        assert tokenizer.decode(rendered.ids[rendered.trained]) == expected
        assert rendered.trained_bytes == sum(len(answer.encode()) for answer in answers)
        assert rendered.turns == rendered.ended == len(turns)


RENDERERS = {mark: Renderer(make(mark(TEMPLATES["chatml"]))) for mark in (marked, unmarked)}
