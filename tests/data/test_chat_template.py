"""What a chat template takes and shows is found by trying."""

import json

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation
from llmtrain.data.template_properties import TemplateProperties
from llmtrain.errors import UserError
from tests.data.chats import (
    CALL,
    CALLING,
    END,
    TEMPLATES,
    TEXT,
    TOOL,
    USER,
    chat,
    make,
    marked,
    one,
    said,
    unmarked,
)


def test_chatml_adds_its_tokens_once():
    tokenizer = tok.as_pretrained(
        tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT)), block_size=32
    )
    size = len(tokenizer)
    assert len(set_template(tokenizer, "chatml")) == 2
    assert len(tokenizer) == size + 2
    assert set_template(tokenizer, "chatml") == set_template(tokenizer, None) == []
    assert (tokenizer.bos_token, tokenizer.eos_token) == (tok.END_OF_TEXT,) * 2
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert TemplateProperties(tokenizer).stop_token_ids == {end, tokenizer.eos_token_id}
    assert tokenizer.encode("<|im_end|>") == [end]


def test_the_template_and_its_tokens_outlive_saving_and_loading(tmp_path):
    made = make()
    set_template(made, "chatml")
    made.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert set_template(loaded, None) == []
    assert TemplateProperties(loaded).stop_token_ids == TemplateProperties(made).stop_token_ids
    np.testing.assert_array_equal(one(loaded, chat("a", "b")).ids, one(made, chat("a", "b")).ids)
    assert said(loaded, chat("a", "b")) == ["b<|im_end|>"]


def test_chatml_shows_tools_calls_and_reasoning():
    tokenizer = make()
    set_template(tokenizer, "chatml")
    rendered = one(tokenizer, Conversation(CALLING, [TOOL, TOOL]))
    tool = json.dumps(TOOL)
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
    turns = ["<think>\nI add.\n</think>\n\n" + call + "<|im_end|>", "Five.<|im_end|>"]
    assert tokenizer.decode(rendered.ids) == (
        f"<|im_start|>system\n<tools>\n{tool}\n{tool}\n</tools><|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n"
        f"<|im_start|>assistant\n{turns[0]}\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n{turns[1]}"
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
    ids = one(tokenizer, chat("a", "b")).ids.tolist()
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
        (None, "neither chatml, none nor a readable file .*No such file"),
        ("\udcff", "neither chatml, none nor a readable file .*utf-8"),
        ("{% for m in messages %}", "cannot show .*Unexpected end of template"),
        ("{{ raise_exception('only\nin German') }}", "cannot show .*refuses it: only"),
        ("{{ messages.x.y }}", "cannot show .*has no attribute 'x'"),
        ("Dear assistant,\n", "does not show the content of messages"),
        ("", "does not show the content of messages"),
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


def test_a_template_of_the_tokenizer_s_own_that_cannot_show_a_conversation_is_refused():
    with pytest.raises(UserError, match="the tokenizer's own chat template cannot show"):
        set_template(make("{{ raise_exception('no') }}"), None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_ends_a_turn_is_learnt_from_the_template(name):
    tokenizer = make(unmarked(TEMPLATES[name]))
    assert set(tokenizer.convert_ids_to_tokens(TemplateProperties(tokenizer).stop_token_ids)) == {
        "</s>",
        END[name],
    }


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "\n<|im_end|>", " .<|im_end|></s>", "<▁fin▁>>", "<▁fin▁>"]
)
def test_the_end_of_a_turn_is_the_special_token_behind_the_words_or_the_last_of_several(end):
    tokenizer = make(unmarked(TEMPLATES["chatml"]).replace("<|im_end|>", end.replace("\n", "\\n")))
    tokenizer.add_tokens(["\n", " "])
    wanted = {"</s>", end.strip(" \n.").removeprefix("<|im_end|></s>")} - {""}
    assert (
        set(tokenizer.convert_ids_to_tokens(TemplateProperties(tokenizer).stop_token_ids)) == wanted
    )


def test_a_template_that_ends_no_turn_leaves_eos():
    tokenizer = make("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert TemplateProperties(tokenizer).stop_token_ids == {tokenizer.eos_token_id}
