"""Chat templates of published models: each turn is a target once, after the prompt of a chat.

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
from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import Rendered
from llmtrain.data.template_messages import adapt_messages
from tests.data.chats import TEXT

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "templates-table.md"

# The tokens that end an answer, from the generation_config.json of each family. The first is EOS.
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
# Tokens that these models have in their vocabulary, but not as special tokens.
WORDS = ["think", "tool_call", "tool_response", "arg_key", "arg_value"]
# The forms of special tokens in the templates.
SPECIAL_FORMS = [
    r"<\|?[\w▁\"-]*\|>",
    r"<\|[\w\"-]+\|?>",
    r"<\uff5c[^\uff5c]*\uff5c>",
    r"<(?:start|end)_of_turn>",
    r"<sop>",
    r"\[gMASK\]",
    r"<[a-z_]+\|>",
]
SPECIAL = re.compile("|".join(SPECIAL_FORMS))

PARAMETERS = {
    "type": "object",
    "properties": {
        "place": {"type": "string", "description": "where"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["place"],
}
WEATHER = {"name": "weather", "description": "Say how it is there.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": WEATHER}]


# --- conversations


def call_id(place: str) -> str:
    """Return the id of a call. Mistral's templates want nine characters."""
    return f"call-{place}"[:9].ljust(9, "0")


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, reasoning: str | None = None, *places: str) -> Message:
    """Return an assistant message, which asks for the weather at some places."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if places:
        message["tool_calls"] = [weather_call(place) for place in places]
    return message


def weather_call(place: str) -> dict[str, Any]:
    arguments = {"place": place, "days": [1, 2]}
    return {
        "id": call_id(place),
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def result(text: str, place: str) -> Message:
    """Return the answer of the tool to the call for a place."""
    return {"role": "tool", "name": "weather", "tool_call_id": call_id(place), "content": text}


# The columns of the table. No answer, reasoning or place is twice in a conversation.
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
        system("Be brief."),
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
# These words tell to which turn a target belongs.
DISTINCT_WORDS = ["Ans-1", "Ans-2", "Ans-3", "Oslo", "Bonn"]

# The letters of the table, and the words of the errors that they stand for.
REFUSALS = {
    "c": "calls a tool, and the chat template shows no calls",
    "a": "Conversation roles must alternate",
    "s": "System role not supported",
    "o": "makes several calls; the chat template shows one",
}


# --- templates and tokenizers


def templates() -> dict[str, str]:
    """Return the templates for text in TRL, as their models have them; none without TRL."""
    package = importlib.util.find_spec("trl")
    if package is None or package.origin is None:
        return {}
    result = {}
    for path in sorted((Path(package.origin).parent / "chat_templates").glob("*.jinja")):
        is_for_text = not re.search("training|vl|llava|idefics|smolvlm", path.stem)
        if is_for_text and path.stem.startswith(tuple(STOPS)):
            result[path.stem] = path.read_text()
    return result


TEMPLATES = templates()
pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs trl, which comes with the extra dev")


def stops_of(name: str) -> list[str]:
    """Return the tokens that end an answer, given the name of a template."""
    return next(stops for family, stops in STOPS.items() if name.startswith(family))


def tokenizer_of(name: str, spec: str = "byte", text: list[str] = TEXT) -> PreTrainedTokenizerFast:
    """Return a small tokenizer with a template, and with the tokens of its family."""
    backend = tok.train_tokenizer(spec, iter(text), lambda: iter(text))
    special_tokens = [*SPECIAL.findall(TEMPLATES[name]), *stops_of(name), "<bos>"]
    backend.add_special_tokens([*dict.fromkeys(special_tokens)])
    for word in WORDS:
        backend.add_tokens([f"<{word}>", f"</{word}>"])
    tokenizer = tok.as_pretrained(backend, block_size=4096)
    tokenizer.bos_token = "<bos>"
    tokenizer.eos_token = stops_of(name)[0]
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


# --- the table


def cell_of(name: str, kind: str) -> str:
    """Render a kind of conversation, check its targets, and return its cell in the table."""
    messages = KINDS[kind]
    has_calls = any("tool_calls" in message for message in messages)
    conversation = Conversation(messages, TOOLS if has_calls else None)
    renderer = Renderer(tokenizer_of(name))
    try:
        rendered = renderer(conversation)
    except BadRecord as refusal:
        return next(letter for letter, words in REFUSALS.items() if words in str(refusal))

    check_targets(rendered, conversation, renderer, stops=stops_of(name))
    cell = str(len(rendered.sequences))
    if left_out_turns(rendered):
        cell += f" -{left_out_turns(rendered)}"
    if rendered.counts["hidden_turns"]:
        cell += " r"
    return cell


def left_out_turns(rendered: Rendered) -> int:
    return rendered.counts["mismatched_answers"] + rendered.counts["mismatched_calls"]


def check_targets(
    rendered: Rendered, conversation: Conversation, renderer: Renderer, stops: list[str]
) -> None:
    """Check that each turn is a target once, after the prompt of a chat, up to a stop token."""
    tokenizer = renderer.tokenizer
    messages, reasoning = adapt_messages(conversation.messages, renderer.template)

    def prompt_ids(turn: int, **options: bool) -> list[int]:
        """Return the tokens that a chat sends to get a turn, as transformers makes them."""
        prompt = tokenizer.apply_chat_template(
            messages[:turn],
            conversation.tools,
            add_generation_prompt=True,
            tokenize=False,
            **options,
        )
        ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    # An answer at the very beginning has no prompt.
    roles = [message["role"] for message in messages]
    turns = [i for i, role in enumerate(roles) if role == "assistant" and i > 0]

    trained_turns = []
    for sequence in rendered.sequences:
        for start, stop in target_sections(sequence.loss_mask):
            target = tokenizer.decode(sequence.ids[start:stop])
            (turn,) = [i for i in turns if is_target_of(messages[i], target)]
            trained_turns.append(turn)

            assert tokenizer.decode(sequence.ids[stop - 1]) in stops
            shows_reasoning = bool(reasoning[turn]) and reasoning[turn] in target
            prompts = [prompt_ids(turn, enable_thinking=shows_reasoning)]
            if shows_reasoning:
                prompts.append(prompt_ids(turn))
            assert sequence.ids[:start].tolist() in prompts

    assert len(set(trained_turns)) == len(trained_turns)
    assert len(trained_turns) == len(turns) - left_out_turns(rendered)


def target_sections(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the first index, and the index after the last one, of each run of targets."""
    borders = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False)).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


def is_target_of(message: Message, target: str) -> bool:
    """Return whether a target has the answer and the places of a message, and no others."""
    content = message["content"] + json.dumps(message.get("tool_calls", []))
    return all((word in content) == (word in target) for word in DISTINCT_WORDS)


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_turn_is_a_target_once_and_the_table_has_the_sequences(name: str) -> None:
    cells = [cell_of(name, kind) for kind in KINDS]

    assert f"| {name} | {' | '.join(cells)} |" in PAGE.read_text().splitlines()


if __name__ == "__main__":  # print the table
    print(f"| template | {' | '.join(KINDS)} |")
    print("|---" * (len(KINDS) + 1) + "|")
    for template in TEMPLATES:
        cells = [cell_of(template, kind) for kind in KINDS]
        print(f"| {template} | {' | '.join(cells)} |")
