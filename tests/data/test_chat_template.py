"""Chat templates: which ones are accepted, what chatml shows, and which tokens end a turn."""

import json

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import ChatTemplate
from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord
from llmtrain.data.tokenizer import set_template
from llmtrain.errors import UserError
from tests.data.chats import (
    CALL,
    CALLING,
    END,
    TEMPLATES,
    TEXT,
    TOOL,
    chat,
    make,
    marked,
    only_sequence,
    target_texts,
    unmarked,
)

TWO_TURNS = chat("a", "b", "c", "d")


def stop_tokens(tokenizer: PreTrainedTokenizerFast) -> set[str]:
    """Return the tokens at which an answer ends."""
    ids = ChatTemplate(tokenizer).stop_token_ids
    return set(tokenizer.convert_ids_to_tokens(ids))


# --- chatml


def test_chatml_adds_its_two_tokens_once_and_keeps_bos_and_eos():
    backend = tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT))
    tokenizer = tok.as_pretrained(backend, block_size=32)
    size = len(tokenizer)

    new_tokens = set_template(tokenizer, "chatml")
    assert tokenizer.convert_ids_to_tokens(new_tokens) == ["<|im_start|>", "<|im_end|>"]
    assert set_template(tokenizer, "chatml") == []
    assert set_template(tokenizer, None) == []

    assert len(tokenizer) == size + 2
    assert len(tokenizer.encode("<|im_end|>")) == 1
    assert tokenizer.bos_token == tokenizer.eos_token == tok.END_OF_TEXT
    assert stop_tokens(tokenizer) == {"<|im_end|>", tok.END_OF_TEXT}


def test_chatml_shows_tools_calls_and_reasoning():
    tokenizer = make()
    set_template(tokenizer, "chatml")
    question, call, *rest = CALLING
    calls = {**call, "tool_calls": [CALL, CALL["function"]]}
    conversation = Conversation([question, calls, *rest], [TOOL, TOOL])

    sequence = only_sequence(tokenizer, conversation)

    tool = json.dumps(TOOL)
    shown = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": [3]}}\n</tool_call>'
    first_turn = f"<think>\nI add.\n</think>\n\n{shown}\n{shown}<|im_end|>"
    second_turn = "Five.<|im_end|>"
    assert tokenizer.decode(sequence.ids) == (
        f"<|im_start|>system\n<tools>\n{tool}\n{tool}\n</tools><|im_end|>\n"
        "<|im_start|>user\n2 + 3?<|im_end|>\n"
        f"<|im_start|>assistant\n{first_turn}\n"
        "<|im_start|>tool\n5<|im_end|>\n"
        f"<|im_start|>assistant\n{second_turn}"
    )
    assert target_texts(tokenizer, conversation) == [first_turn, second_turn]
    assert (len(sequence.turn_ends), sequence.end.ended) == (2, 2)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_chatml_begins_with_bos_if_the_tokenizer_adds_it_to_every_text(adds_bos):
    tokenizer = make()
    bos = tokenizer.bos_token_id
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", bos)]
        )

    set_template(tokenizer, "chatml")

    ids = only_sequence(tokenizer, chat("a", "b")).ids.tolist()
    assert ids.count(bos) == adds_bos
    assert (ids[0] == bos) == adds_bos


# --- other templates


def test_a_template_can_be_a_file(tmp_path):
    path = tmp_path / "llama.jinja"
    path.write_text(marked(TEMPLATES["llama"]))
    tokenizer = make(TEMPLATES["chatml"])

    assert set_template(tokenizer, str(path)) == []

    assert target_texts(tokenizer, chat("a", "b")) == ["b<|eot_id|>"]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="absent"),
        pytest.param(b"\xff", id="not-utf-8"),
        pytest.param(b"{% for m in messages %}", id="no-jinja"),
        pytest.param(b"{{ raise_exception('only\nin German') }}", id="refuses-everything"),
        pytest.param(b"{{ messages.x.y }}", id="fails"),
        pytest.param(b"Dear assistant,\n", id="letter"),
        pytest.param(b"", id="empty"),
    ],
)
def test_a_file_that_is_no_template_is_an_error_of_one_line(tmp_path, content):
    path = tmp_path / "template.jinja"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UserError) as refused:
        set_template(make(), str(path))

    assert str(refused.value).startswith(f"--chat_template {path} ")
    assert "\n" not in str(refused.value)


def test_an_error_of_the_tokenizers_own_template_says_whose_it_is():
    with pytest.raises(UserError, match="the tokenizer's own chat template"):
        set_template(make("{{ raise_exception('no') }}"), None)


# --- tokens that end a turn


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_that_ends_a_turn_is_found_in_the_template(name):
    tokenizer = make(unmarked(TEMPLATES[name]))

    assert stop_tokens(tokenizer) == {"</s>", END[name]}


@pytest.mark.parametrize(
    ("text", "end_token"),
    [
        pytest.param("\\n<|im_end|>", "<|im_end|>", id="after-a-line-break"),
        pytest.param(" .<|im_end|></s>", "</s>", id="last-of-two"),
        pytest.param("<▁fin▁>>", "<▁fin▁>>", id="longer-of-two"),
        pytest.param("<▁fin▁>", "<▁fin▁>", id="shorter-of-two"),
    ],
)
def test_the_last_special_token_after_the_content_ends_a_turn(text, end_token):
    tokenizer = make(unmarked(TEMPLATES["chatml"]).replace("<|im_end|>", text))
    tokenizer.add_tokens(["\n", " "])

    assert stop_tokens(tokenizer) == {"</s>", end_token}


def test_eos_ends_a_turn_if_the_template_has_no_end_token():
    tokenizer = make("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")

    assert stop_tokens(tokenizer) == {"</s>"}


# --- rendering with Jinja

# A variable that is set inside a block keeps its old value after the block, as in any Jinja block.
# The block can read the variables of the loop.
SCOPED = """
{%- set end = '!' -%}
{%- for m in messages -%}
    {%- generation -%}{%- set end = '?' -%}{{- loop.index ~ m.content ~ end -}}{%- endgeneration %}
    {{- end }}
{%- endfor -%}"""


def test_a_block_has_its_own_variables():
    template = ChatTemplate(make(SCOPED))

    spans: list[tuple[int, int]] = []
    text = template.render(TWO_TURNS.messages, None, marks=spans)

    assert text == template.render(TWO_TURNS.messages, None) == "1a?!2b?!3c?!4d?!"
    assert [text[start:stop] for start, stop in spans] == ["1a?", "2b?", "3c?", "4d?"]


@pytest.mark.parametrize(
    "code",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "raise_exception.__globals__['os'].system('true')",
        "messages.append(messages)",
        "(messages | attr('__class__')).__base__",
    ],
)
def test_a_template_runs_in_a_sandbox(code):
    with pytest.raises(BadRecord, match=r"unsafe|undefined"):
        ChatTemplate(make(f"{TEMPLATES['chatml']}{{{{ {code} }}}}")).render(
            TWO_TURNS.messages, None
        )
