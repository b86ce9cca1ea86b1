"""A Modelfile for Ollama asks for an answer as the chat template of the model does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.data.chat_template import set_template, template_text
from llmtrain.errors import UserError
from llmtrain.models.ollama import turn_format, write_modelfile
from tests.data.chats import QWEN3, R1, TEMPLATES, make, unmarked
from tests.launching import read_json
from tests.models.small_models import byte_tokenizer

# --- chat templates in Go


MESSAGES = ["What is 2 + 2?", "4 {it} is", "And\n\n  3 + 3?", "6 <b>", "Ünïcode 漢字 🙂?"]
REFUSES_SYSTEM = "{%- if messages[0].role == 'system' -%}{{- raise_exception('no') -}}{%- endif -%}"
ADDS_SYSTEM = """
{%- if messages[0].role != 'system' -%}{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' -}}{%- endif -%}
"""
CHATML = unmarked(TEMPLATES["chatml"])


def chats(roles: list[str]) -> list[list[dict[str, str]]]:
    """Return chats of one to five messages, with and without a system message if there is one."""
    conversation = []
    for number, content in enumerate(MESSAGES):
        role = "user" if number % 2 == 0 else "assistant"
        conversation.append({"role": role, "content": content})
    chats = [conversation[:length] for length in (1, 3, 5)]
    if "system" in roles:
        system = {"role": "system", "content": "Be brief."}
        chats += [[system, *chat] for chat in chats]
    return chats


def rendered_by_go(template: str, messages: list[dict[str, str]]) -> str:
    """Evaluate the few actions of Go's text/template that a Modelfile of this package has.

    They are a ``range`` over the messages with a branch for each role. Others stay in the text.
    """
    pattern = r"(.*?)\{\{ range \.Messages \}\}(.*)\{\{ end \}\}\{\{ end \}\}(.*?)"
    match = re.fullmatch(pattern, template, re.DOTALL)
    assert match is not None
    beginning, body, prompt = match.groups()

    _, *branches = re.split(r'\{\{ (?:else )?if eq \.Role "(\w+)" \}\}', body)
    turns = dict(zip(branches[::2], branches[1::2], strict=True))
    text = beginning
    for message in messages:
        turn = turns.get(message["role"], "")
        text += turn.replace("{{ .Content }}", message["content"])
    return text + prompt


@pytest.mark.parametrize(
    ("template", "has_system"),
    [
        pytest.param(template_text("chatml"), True, id="shipped"),
        pytest.param(CHATML, True, id="chatml"),
        pytest.param(unmarked(TEMPLATES["llama"]), True, id="llama"),
        pytest.param(REFUSES_SYSTEM + unmarked(TEMPLATES["gemma"]), False, id="gemma"),
        pytest.param(unmarked(TEMPLATES["zephyr"]), True, id="zephyr"),
    ],
)
def test_go_renders_the_text_that_jinja_renders(template: str, has_system: bool) -> None:
    tokenizer = make(template)
    turns = turn_format(tokenizer)
    assert turns is not None
    assert ("system" in turns.prefixes) == has_system
    for chat in chats([*turns.prefixes]):
        expected = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert rendered_by_go(turns.go_template(), chat) == expected


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(QWEN3, id="Qwen 3, which drops earlier reasoning"),
        pytest.param(R1, id="DeepSeek R1"),
        pytest.param(ADDS_SYSTEM + CHATML, id="adds a system message"),
        pytest.param(
            CHATML.replace("m.role +", "m.role + loop.index0 | string +"), id="numbers the turns"
        ),
        pytest.param("{{ 1 / 0 }}", id="fails"),
    ],
)
def test_a_template_whose_turns_depend_on_others_is_not_translated(template: str) -> None:
    assert turn_format(make(template)) is None


# --- the Modelfile, and the configuration beside it


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a Llama with the shipped template, whose rotary positions are not the default."""
    tokenizer = byte_tokenizer()
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


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(read_json(path) | changes))


def test_a_modelfile_has_the_template_the_stop_tokens_and_the_settings(folder: Path) -> None:
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


def test_the_configuration_gets_the_older_names_that_ollama_reads(folder: Path) -> None:
    before = LlamaConfig.from_pretrained(folder)

    write_modelfile(folder)

    config = read_json(folder / "config.json")
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
    assert LlamaConfig.from_pretrained(folder).rope_parameters == before.rope_parameters


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param(
            {"architectures": ["GPT2LMHeadModel"]},
            "it does not know GPT2LMHeadModel: convert it to GGUF",
            id="class",
        ),
        pytest.param(
            {"architectures": ["Lfm2ForCausalLM"], "tie_word_embeddings": False},
            "a head that is tied to the embeddings",
            id="head",
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
            "how this one scales rotary positions",
            id="rotary positions",
        ),
    ],
)
def test_a_model_that_ollama_cannot_import_gets_a_modelfile_for_its_gguf(
    folder: Path, changes: dict[str, Any], reason: str
) -> None:
    change_json(folder / "config.json", **changes)

    (note,) = write_modelfile(folder)

    assert reason in note
    assert (folder / "Modelfile").read_text().startswith("FROM ./model.gguf\nTEMPLATE")
    assert "rope_theta" not in read_json(folder / "config.json")


def test_gemma_3_has_two_kinds_of_rotary_positions(folder: Path) -> None:
    parameters = {
        "full_attention": {"rope_type": "default", "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
    }
    config = Gemma3TextConfig(rope_parameters=parameters, architectures=["Gemma3ForCausalLM"])
    config.save_pretrained(folder)

    assert write_modelfile(folder) == []

    written = read_json(folder / "config.json")
    assert written["rope_theta"] == 2e6
    assert written["rope_local_base_freq"] == 3e4
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
