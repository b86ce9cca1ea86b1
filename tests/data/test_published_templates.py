"""Chat templates of published models: each turn is a target once, behind the prompt that a chat would send.

The templates are those that come with TRL. ``docs/explanation/templates-table.md`` has the table.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord
from llmtrain.data.render import Renderer
from llmtrain.data.template_messages import adapt_messages
from tests.data.chats import TEXT

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "templates-table.md"

# What ends an answer, by each family's own generation_config.json; the first is its EOS.
STOPS = {
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
# Tokens that are in the vocabulary of these models, but special to none.
WORDS = ["think", "tool_call", "tool_response", "arg_key", "arg_value"]
SPECIAL = re.compile(
    r"<\|?[\w▁\"-]*\|>|<\|[\w\"-]+\|?>|<\uff5c[^\uff5c]*\uff5c>|<(?:start|end)_of_turn>|<sop>|\[gMASK\]|<[a-z_]+\|>"
)

PLACE, DAYS = (
    {"type": "string", "description": "where"},
    {"type": "array", "items": {"type": "integer"}},
)
PARAMETERS = {"type": "object", "properties": {"place": PLACE, "days": DAYS}, "required": ["place"]}
WEATHER = {"name": "weather", "description": "Say how it is there.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str, thought: str | None = None, *places: str) -> dict[str, Any]:
    """A turn of the assistant's, with calls for the weather at some places."""
    calls = [
        {
            "id": f"call-{place}"[:9].ljust(9, "0"),
            "type": "function",
            "function": {"name": "weather", "arguments": {"place": place, "days": [1, 2]}},
        }
        for place in places
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    return (
        message
        | ({"reasoning_content": thought} if thought else {})
        | ({"tool_calls": calls} if calls else {})
    )


def result(text: str, place: str) -> dict[str, Any]:
    call = f"call-{place}"[:9].ljust(9, "0")
    return {"role": "tool", "name": "weather", "tool_call_id": call, "content": text}


# Each answer, thought and place is there once.
KINDS = {
    "one turn": [user("q1"), answer("Ans-1")],
    "several": [
        user("q1"),
        answer("Ans-1"),
        user("q2"),
        answer("Ans-2"),
        user("q3"),
        answer("Ans-3"),
    ],
    "system": [
        {"role": "system", "content": "Be brief."},
        user("q1"),
        answer("Ans-1"),
        user("q2"),
        answer("Ans-2"),
    ],
    "greeting": [answer("Hello"), user("q1"), answer("Ans-1")],
    "reasoning": [user("q1"), answer("Ans-1", "Why-1")],
    "reasoning, several": [
        user("q1"),
        answer("Ans-1", "Why-1"),
        user("q2"),
        answer("Ans-2", "Why-2"),
    ],
    "reasoning, then none": [user("q1"), answer("Ans-1", "Why-1"), user("q2"), answer("Ans-2")],
    "in its content": [
        user("q1"),
        answer("<think>\nWhy-1\n</think>\n\nAns-1"),
        user("q2"),
        answer("<think>\nWhy-2\n</think>\n\nAns-2"),
    ],
    "a call": [user("q1"), answer("", None, "Oslo"), result("rain", "Oslo"), answer("Ans-1")],
    "two at once": [
        *(
            user("q1"),
            answer("", None, "Oslo", "Bonn"),
            result("rain", "Oslo"),
            result("sun", "Bonn"),
        ),
        *(answer("Ans-1"), user("q2"), answer("Ans-2")),
    ],
    "one by one, reasoning": [
        *(user("q1"), answer("", "Why-1", "Oslo"), result("rain", "Oslo")),
        *(answer("", "Why-2", "Bonn"), result("sun", "Bonn"), answer("Ans-1", "Why-3")),
    ],
    "the same, several": [
        *(
            user("q1"),
            answer("", "Why-1", "Oslo"),
            result("rain", "Oslo"),
            answer("Ans-1", "Why-2"),
        ),
        *(user("q2"), answer("", "Why-3", "Bonn"), result("sun", "Bonn"), answer("Ans-2", "Why-4")),
    ],
}
# The words with which templates refuse a kind, and their letter in the table.
REFUSALS = {
    "c": "calls a tool, and the chat template shows no calls",
    "a": "Conversation roles must alternate",
    "s": "System role not supported",
    "o": "makes several calls; the chat template shows one",
}


def templates() -> dict[str, str]:
    """Those for text, as their models have them."""
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        return {}
    paths = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    text = [path for path in paths if not re.search("training|vl|llava|idefics|smolvlm", path.stem)]
    return {path.stem: path.read_text() for path in text if any(map(path.stem.startswith, STOPS))}


TEMPLATES = templates()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs trl, which comes with the extra dev")


def stops_of(name: str) -> list[str]:
    return next(stops for family, stops in STOPS.items() if name.startswith(family))


def tokenizer_of(name: str, spec: str = "byte", text: list[str] = TEXT) -> PreTrainedTokenizerFast:
    """A small tokenizer with the tokens, the template and the EOS of a family."""
    backend = tok.train_tokenizer(spec, iter(text), lambda: iter(text))
    special = dict.fromkeys([*SPECIAL.findall(TEMPLATES[name]), *stops_of(name), "<bos>"])
    backend.add_special_tokens([*special])
    backend.add_tokens([f"<{slash}{word}>" for word in WORDS for slash in ("", "/")])
    tokenizer = tok.as_pretrained(backend, block_size=4096)
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", stops_of(name)[0]
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def cell_of(name: str, kind: str) -> str:
    """Check one kind of conversation, and return its cell in the table: the number of sequences."""
    tokenizer, messages = tokenizer_of(name), KINDS[kind]
    tools = TOOLS if any("tool_calls" in message for message in messages) else None
    renderer = Renderer(tokenizer)
    try:
        rendered = renderer(Conversation(messages, tools))
    except BadRecord as refused:
        return next(letter for letter, words in REFUSALS.items() if words in str(refused))
    shown, thoughts = adapt_messages(messages, renderer.template)

    def prompt(turn: int, **switch: bool) -> str:
        how: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **switch}
        return str(tokenizer.apply_chat_template(shown[:turn], tools, **how))

    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i]
    targets = []
    for sequence in rendered.sequences:
        for start, end in runs_of(sequence.loss_mask):
            assert tokenizer.decode(sequence.ids[end - 1]) in stops_of(name)
            target = tokenizer.decode(sequence.ids[start:end])
            (turn,) = [i for i in turns if is_said(shown[i], target)]
            targets.append(turn)
            reasons = bool(thoughts[turn]) and thoughts[turn] in target
            sent = {prompt(turn, enable_thinking=reasons), *([prompt(turn)] if reasons else [])}
            ids = sequence.ids[:start].tolist()
            assert any(ids == tokenizer.encode(one, add_special_tokens=False) for one in sent)
    left = rendered.counts["mismatched_answers"] + rendered.counts["mismatched_calls"]
    assert len({*targets}) == len(targets) == len(turns) - left
    return (
        f"{len(rendered.sequences)}"
        + f" -{left}" * bool(left)
        + " r" * bool(rendered.counts["hidden_turns"])
    )


def runs_of(trained: np.ndarray) -> list[tuple[int, int]]:
    """Where each unbroken run of trained tokens begins and ends."""
    borders = np.flatnonzero(np.diff(trained, prepend=False, append=False)).tolist()
    return [*zip(borders[::2], borders[1::2], strict=True)]


def is_said(message: dict[str, Any], target: str) -> bool:
    """Whether a turn says just this: its answer, and the places of its calls."""
    said = message["content"] + json.dumps(message.get("tool_calls", []))
    return [word in said for word in WORDS_SAID] == [word in target for word in WORDS_SAID]


WORDS_SAID = ["Ans-1", "Ans-2", "Ans-3", "Oslo", "Bonn"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_a_target_once_behind_the_prompt_of_a_chat(name: str) -> None:
    cells = [cell_of(name, kind) for kind in KINDS]
    assert f"| {name} | {' | '.join(cells)} |" in PAGE.read_text().splitlines()


if __name__ == "__main__":  # the table
    print(f"| template | {' | '.join(KINDS)} |\n{'|---' * (len(KINDS) + 1)}|")
    for each in TEMPLATES:
        print(f"| {each} | {' | '.join(cell_of(each, kind) for kind in KINDS)} |")
