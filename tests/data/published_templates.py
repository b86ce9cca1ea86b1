"""Chat templates of published models, tokenizers that have them, and conversations for them.

The templates are those that come with TRL. ``docs/explanation/templates-table.md`` has the table.
"""

import importlib.util
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.messages import Message
from tests.data.chats import TEXT, chat
from tests.launching import long_form

TEMPLATES_PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "templates-table.md"

# The tokens that end an answer, from the generation_config.json of each family. The first is EOS.
_STOPS = {
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "deepseek": ["<\uff5cend▁of▁sentence\uff5c>"],
    "diffusion_gemma": ["<turn|>", "<|tool_response>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "glm4": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "lfm2": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "muse": ["<|eot|>"],
    "nemotron": ["<|im_end|>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "qwen": ["<|im_end|>"],
}
# Tokens that these models have in their vocabulary, but not as special tokens.
_WORDS = ["think", "tool_call", "tool_response", "arg_key", "arg_value"]
# The forms of special tokens in the templates.
_SPECIAL_FORMS = [
    r"<\|?[\w▁\"-]*\|>",
    r"<\|[\w\"-]+\|?>",
    r"<\uff5c[^\uff5c]*\uff5c>",
    r"<(?:start|end)_of_turn>",
    r"<sop>",
    r"\[gMASK\]",
    r"<[a-z_]+\|>",
]
_SPECIAL = re.compile("|".join(_SPECIAL_FORMS))

_PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["place"],
}
_WEATHER = {"name": "weather", "description": "Say how it is there.", "parameters": _PARAMETERS}
TOOLS = [{"type": "function", "function": _WEATHER}]


# --- conversations


def _call_id(place: str) -> str:
    """Return the id of a call. Mistral's templates want nine characters."""
    return f"call-{place}"[:9].ljust(9, "0")


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None, *places: str) -> Message:
    """Return an assistant message, which asks for the weather at some places."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if places:
        message["tool_calls"] = [_weather_call(place) for place in places]
    return message


def _weather_call(place: str) -> dict[str, Any]:
    arguments = {"place": place, "days": [1, 2]}
    return {
        "id": _call_id(place),
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def result(text: str, place: str) -> Message:
    """Return the answer of the tool to the call for a place."""
    return {"role": "tool", "name": "weather", "tool_call_id": _call_id(place), "content": text}


# The kinds of conversations, which are the columns of the table. No answer, reasoning or place is
# twice in a conversation.
KINDS = {
    "one turn": chat("q1", "Ans-1").messages,
    "several": chat("q1", "Ans-1", "q2", "Ans-2", "q3", "Ans-3").messages,
    "system": [_system("Be brief."), *chat("q1", "Ans-1", "q2", "Ans-2").messages],
    "greeting": [answer("Hello"), user("q1"), answer("Ans-1")],
    "reasoning": [user("q1"), answer("Ans-1", "Why-1")],
    "reasoning, several": [
        user("q1"),
        answer("Ans-1", "Why-1"),
        user("q2"),
        answer("Ans-2", "Why-2"),
    ],
    "reasoning, then none": [user("q1"), answer("Ans-1", "Why-1"), user("q2"), answer("Ans-2")],
    "in its content": chat(
        "q1",
        "<think>\nWhy-1\n</think>\n\nAns-1",
        "q2",
        "<think>\nWhy-2\n</think>\n\nAns-2",
    ).messages,
    "a call": [user("q1"), answer("", None, "Oslo"), result("rain", "Oslo"), answer("Ans-1")],
    "two at once": [
        user("q1"),
        answer("", None, "Oslo", "Bonn"),
        result("rain", "Oslo"),
        result("sun", "Bonn"),
        answer("Ans-1"),
        user("q2"),
        answer("Ans-2"),
    ],
    "one by one, reasoning": [
        user("q1"),
        answer("", "Why-1", "Oslo"),
        result("rain", "Oslo"),
        answer("", "Why-2", "Bonn"),
        result("sun", "Bonn"),
        answer("Ans-1", "Why-3"),
    ],
    "the same, several": [
        user("q1"),
        answer("", "Why-1", "Oslo"),
        result("rain", "Oslo"),
        answer("Ans-1", "Why-2"),
        user("q2"),
        answer("", "Why-3", "Bonn"),
        result("sun", "Bonn"),
        answer("Ans-2", "Why-4"),
    ],
}


# --- templates and tokenizers


def _templates() -> dict[str, str]:
    """Return the templates for text in TRL, as their models have them; none without TRL."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        return {}
    result = {}
    for path in sorted((Path(package.origin).parent / "chat_templates").glob("*.jinja")):
        is_for_text = not re.search("training|vl|llava|idefics|smolvlm", path.stem)
        if is_for_text and path.stem.startswith(tuple(_STOPS)):
            result[path.stem] = path.read_text()
    return result


TEMPLATES = _templates()
# `make test` has a template of each family, and `make test-all` has all of them.
_SHORT_FORMS = (
    "cohere2",
    "deepseekv3",
    "gemma3",
    "gemma4",
    "glm4moe",
    "gptoss",
    "lfm2_v2",
    "llama3_1",
    "nemotron_3_super",
    "phi3_5",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
)


def parameters(names: Iterable[str]) -> list[Any]:
    """Mark the templates that `make test` leaves out. A name may begin with "published "."""
    marked = []
    for name in names:
        template = name.removeprefix("published ")
        is_long = template in TEMPLATES and template not in _SHORT_FORMS
        marked.append(pytest.param(name, marks=long_form if is_long else ()))
    return marked


def stops_of(name: str) -> list[str]:
    """Return the tokens that end an answer, given the name of a template."""
    return next(stops for family, stops in _STOPS.items() if name.startswith(family))


def tokenizer_of(name: str, spec: str = "byte", text: list[str] = TEXT) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template, and with the tokens of its family."""
    return tokenizer_with(TEMPLATES[name], stops_of(name), spec, text)


def tokenizer_with(
    template: str, stops: list[str], spec: str = "byte", text: list[str] = TEXT
) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template and the special tokens in it.

    Args:
        template: the template.
        stops: the tokens that end an answer. The first is EOS.
        spec: a value of ``--tokenizer``.
        text: the training text.
    """
    backend = tok.train_tokenizer(spec, iter(text), lambda: iter(text))
    special_tokens = [*_SPECIAL.findall(template), *stops, "<bos>"]
    backend.add_special_tokens([*dict.fromkeys(special_tokens)])
    for word in _WORDS:
        backend.add_tokens([f"<{word}>", f"</{word}>"])
    tokenizer = tok.as_pretrained(backend, block_size=4096)
    tokenizer.bos_token = "<bos>"
    tokenizer.eos_token = stops[0]
    tokenizer.chat_template = template
    return tokenizer
