"""A Modelfile asks for an answer as the chat template of the model does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template, template_text
from llmtrain.errors import UserError
from llmtrain.models.ollama import turn_format, write_modelfile
from tests.data.chats import QWEN3, R1, TEMPLATES, make, unmarked
from tests.launching import read_json

TURNS = ["What is 2 + 2?", "4 {it} is", "And\n\n  3 + 3?", "6 <b>", "Ünïcode 漢字 🙂?"]
REFUSES_SYSTEM = "{%- if messages[0].role == 'system' -%}{{- raise_exception('no') -}}{%- endif -%}"


def template_of(name: str) -> str:
    if name == "shipped":
        return template_text("chatml")
    if name == "gemma":
        return REFUSES_SYSTEM + unmarked(TEMPLATES[name])
    return unmarked(TEMPLATES[name])


def chats(roles: list[str]) -> list[list[dict[str, str]]]:
    """Return chats of one to five turns, with and without a system message."""
    alternating = [
        [{"role": ("user", "assistant")[i % 2], "content": TURNS[i]} for i in range(length)]
        for length in (1, 3, 5)
    ]
    if "system" not in roles:
        return alternating
    rule = {"role": "system", "content": "Be brief."}
    return [*alternating, *([rule, *chat] for chat in alternating)]


def rendered_by_go(template: str, messages: list[dict[str, str]]) -> str:
    """Evaluate the actions that a Modelfile of ours has; any other is left in the text.

    ``range``, ``if eq`` and fields are all of Go's text/template that is needed.
    """
    whole = r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*?)"
    match = re.fullmatch(whole, template, re.DOTALL)
    assert match is not None
    beginning, body, prompt = match.groups()
    _, *branches = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', body)
    turns = dict(zip(branches[::2], branches[1::2], strict=True))
    texts = [
        turns.get(message["role"], "").replace("{{ .Content }}", message["content"])
        for message in messages
    ]
    return "".join([beginning, *texts, prompt])


@pytest.mark.parametrize("name", ["shipped", "chatml", "llama", "gemma", "zephyr"])
def test_go_renders_what_jinja_renders(name: str) -> None:
    tokenizer = make(template_of(name))
    turns = turn_format(tokenizer)
    assert turns is not None
    assert ("system" in turns.prefixes) == (name != "gemma")
    for chat in chats([*turns.prefixes]):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert rendered_by_go(turns.go_template(), chat) == expected


WITH_A_DEFAULT_RULE = """
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}{%- endif -%}
""" + unmarked(TEMPLATES["chatml"])
NAMES_THE_FIRST = unmarked(TEMPLATES["chatml"]).replace(
    "m.role +", "m.role + loop.index0 | string +"
)


@pytest.mark.parametrize(
    "template", [QWEN3, R1, WITH_A_DEFAULT_RULE, NAMES_THE_FIRST, "{{ 1 / 0 }}"]
)
def test_a_template_whose_turns_depend_on_others_is_not_translated(template: str) -> None:
    assert turn_format(make(template)) is None


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished llama with the shipped template, and with rotary positions unlike the default."""
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    set_template(tokenizer, "chatml")
    rope = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5, **LLAMA3}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        rope_parameters=rope,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = {"eos_token_id": [0, len(tokenizer) - 1], "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    return tmp_path


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(read_json(path) | settings))


def test_a_modelfile_has_the_template_the_stops_and_the_settings(folder: Path) -> None:
    before = LlamaConfig.from_pretrained(folder)
    assert write_modelfile(folder) == []
    assert (folder / "Modelfile").read_text() == (
        'FROM .\nTEMPLATE """{{ range .Messages }}'
        '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "assistant" }}<|im_start|>assistant\n{{ .Content }}<|im_end|>\n'
        '{{ else if eq .Role "system" }}<|im_start|>system\n{{ .Content }}<|im_end|>\n'
        '{{ end }}{{ end }}<|im_start|>assistant\n"""\n'
        'PARAMETER stop "<|endoftext|>"\nPARAMETER stop "<|im_end|>"\n'
        "PARAMETER num_ctx 64\nPARAMETER temperature 0.6\n"
    )
    # Ollama reads the older names, and transformers the same model as before.
    config = read_json(folder / "config.json")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
    assert LlamaConfig.from_pretrained(folder).rope_parameters == before.rope_parameters


def test_a_model_that_ollama_cannot_import_gets_a_modelfile_for_its_gguf(folder: Path) -> None:
    change(folder / "config.json", architectures=["GPT2LMHeadModel"])
    (note,) = write_modelfile(folder)
    assert "it does not know GPT2LMHeadModel: convert it to GGUF" in note
    assert (folder / "Modelfile").read_text().startswith("FROM ./model.gguf\nTEMPLATE")
    assert "rope_theta" not in read_json(folder / "config.json")

    change(folder / "config.json", architectures=["Lfm2ForCausalLM"], tie_word_embeddings=False)
    (note,) = write_modelfile(folder)
    assert "a head that is tied to the embeddings" in note

    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    change(folder / "config.json", architectures=["LlamaForCausalLM"], rope_parameters=rope)
    (note,) = write_modelfile(folder)
    assert "how this one scales rotary positions" in note


def test_gemma_3_has_two_kinds_of_rotary_positions(folder: Path) -> None:
    rope = {"full_attention": 2e6, "sliding_attention": 3e4}
    parameters = {key: {"rope_type": "default", "rope_theta": rope[key]} for key in rope}
    config = Gemma3TextConfig(rope_parameters=parameters, architectures=["Gemma3ForCausalLM"])
    config.save_pretrained(folder)
    assert write_modelfile(folder) == []
    written = read_json(folder / "config.json")
    assert (written["rope_theta"], written["rope_local_base_freq"]) == (2e6, 3e4)
    assert Gemma3TextConfig.from_pretrained(folder).rope_parameters == config.rope_parameters


def test_another_template_goes_where_ollama_finds_jinja(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(QWEN3)
    (note,) = write_modelfile(folder)
    assert note.startswith("the Modelfile has no TEMPLATE")
    assert "TEMPLATE" not in (folder / "Modelfile").read_text()
    assert read_json(folder / "tokenizer_config.json")["chat_template"] == QWEN3


def test_an_adapter_must_be_merged_first(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="add --merge"):
        write_modelfile(tmp_path)
