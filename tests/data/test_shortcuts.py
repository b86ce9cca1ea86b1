"""A conversation that is encoded once makes the sequences that it makes turn by turn."""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import Rendered
from tests.data import test_published_templates as published
from tests.data import test_render
from tests.data.chats import (
    CALL,
    CALLING,
    CONTROLS,
    QWEN3,
    R1,
    TEMPLATES,
    TEXT,
    TOOL,
    chat,
    make,
    marked,
    unmarked,
)

WORDS = [
    *("yes", "no ", " the answer", "\n", "\n\n", "  ", "question?", "漢字", "🙂", "e\u0301", "\t"),
    *("<|im_end", "</s", "<think>", "</think>", "[/INST]", "assistant\n", "user", "|>", "<", "▁b"),
]


# Templates that look ahead: the last turn of all ends differently.
LOOKS_AHEAD = {
    "length": "loop.index == messages | length",
    "last": "loop.last",
    "next item": "loop.nextitem is not defined",
    "last message": "messages[-1] is sameas m",
    "rest": "messages[loop.index :] == []",
    "rest in a list": "messages[loop.index :] | list == []",
    "next message": "messages[loop.index] is not defined",
    "reversed": "(messages | reverse | first) is sameas m",
    "as text": '(messages | string).endswith(m.content ~ "\'}]")',
    "a copy": "(messages + [])[-1] is sameas m",
}
LOOKING_AHEAD = """
{%- for m in messages -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content + ('</s>' if m.role == 'assistant' and AHEAD else '<|im_end|>') + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# The end of a turn goes on if nothing follows.
ENDED_TWICE = unmarked(TEMPLATES["llama"]) + "{%- if not add_generation_prompt -%}</s>{%- endif -%}"
# The first message is not in the loop, as in many templates with a system message.
WITHOUT_FIRST = """
{%- if messages[0].role == 'system' -%}
    {{- messages[0].content + '\\n' -}}{%- set rest = messages[1:] -%}
{%- else -%}{%- set rest = messages -%}{%- endif -%}""" + unmarked(TEMPLATES["chatml"]).replace(
    "in messages", "in rest[0:]"
)


class SlowRenderer(Renderer):
    """Encodes each prompt and each turn by itself."""

    def _encode_together(self, run: Any) -> None:
        return None


def random_text(random: random.Random, words: list[str]) -> str:
    text = "".join(random.choice(words) for _ in range(random.randint(1, 8)))
    return text if text.strip() else text + "a"


def random_message(random: random.Random, role: str, words: list[str]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role, "content": random_text(random, words)}
    if role == "assistant":
        if random.random() < 0.2:
            message[random.choice(["reasoning_content", "thinking"])] = random_text(random, words)
        if random.random() < 0.1:
            message["content"] = f"<think>\n{random_text(random, words)}\n</think>\n\nso"
        if random.random() < 0.2:
            message["tool_calls"] = [CALL] * random.randint(1, 2)
            message["content"] = random.choice(["", message["content"]])
    return message


def random_conversation(random: random.Random, words: list[str] = WORDS) -> Conversation:
    """Mostly user and assistant in turn; sometimes with calls, or with roles in any order."""
    roles = ["system"] if random.random() < 0.2 else []
    for _ in range(random.randint(1, 5)):
        roles += ["user", "assistant"]
    if random.random() < 0.2:
        roles = [random.choice(["user", "assistant", "tool"]) for _ in roles]
    messages = []
    for role in roles:
        messages.append(random_message(random, role, words))
        if "tool_calls" in messages[-1] and random.random() < 0.9:
            messages.append(CALLING[2])
            messages.append({"role": "assistant", "content": random_text(random, words)})
    tools = [TOOL] if random.random() < 0.5 else None
    return Conversation(messages, tools)


def sentencepiece(template: str) -> PreTrainedTokenizerFast:
    tokenizer = test_render.sentencepiece()
    tokenizer.chat_template = template
    return tokenizer


def with_white_space(template: str, **flags: bool) -> PreTrainedTokenizerFast:
    """Control tokens that take in the white space beside them, or that must be words."""
    backend = tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT))
    backend.add_special_tokens(
        [tokenizers.AddedToken(text, special=True, **flags) for text in CONTROLS]
    )
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", "</s>"
    tokenizer.chat_template = template
    return tokenizer


def chatml(spec: str) -> PreTrainedTokenizerFast:
    tokenizer = make(spec=spec)
    set_template(tokenizer, "chatml")
    return tokenizer


def all_tokenizers() -> Iterator[tuple[str, Callable[[], PreTrainedTokenizerFast]]]:
    for name, template in TEMPLATES.items():
        for mark in (marked, unmarked):
            yield f"{name} {mark.__name__}", partial(make, mark(template), "bpe:320")
        yield f"{name} sentencepiece", partial(sentencepiece, unmarked(template))
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            tokenizer = partial(with_white_space, unmarked(template), **{flag: True})
            yield f"{name} {flag}", tokenizer
    others = ["SWITCHED", "GLM", "JOINED", "PLAIN", "COUNTS", "ENDED_ONCE", "CALL_WITHOUT_END"]
    for name in others:
        yield name, partial(make, unmarked(getattr(test_render, name)), "bpe:320")
    for name, condition in LOOKS_AHEAD.items():
        yield f"looks ahead: {name}", partial(make, LOOKING_AHEAD.replace("AHEAD", condition))
    yield "ended twice", partial(make, ENDED_TWICE)
    yield "without first", partial(make, WITHOUT_FIRST)
    calling = "(m.tool_calls | tojson if m.tool_calls else m.content)"
    yield "qwen3", partial(make, QWEN3.replace("m.content", calling), "bpe:320")
    yield "r1", partial(make, R1)
    yield "our chatml", partial(chatml, "bpe:320")
    for name in published.TEMPLATES:
        yield f"published {name}", partial(published.tokenizer_of, name, "bpe:320")


TOKENIZERS = dict(all_tokenizers())


def outcome(renderer: Renderer, conversation: Conversation) -> Rendered | str:
    try:
        return renderer(conversation)
    except BadRecord as error:
        return str(error)


def assert_same(first: Rendered | str, second: Rendered | str) -> None:
    if isinstance(first, str) or isinstance(second, str):
        assert first == second
        return
    assert first[1:] == second[1:]
    for one, other in zip(first.sequences, second.sequences, strict=True):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert (one.ids.dtype, one.loss_mask.dtype) == (np.int32, np.bool_)
        assert one[2:] == other[2:]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_documents_are_those_that_are_encoded_turn_by_turn(name: str) -> None:
    generator = random.Random(name)
    tokenizer = TOKENIZERS[name]()
    # So that a turn that ends in either way has ended.
    stops = [tokenizer.get_vocab().get(text) for text in ("<|im_end|>", "<|eot_id|>")]
    renderers = [kind(tokenizer, stops) for kind in (Renderer, SlowRenderer)]
    for _ in range(12):
        conversation = random_conversation(generator)
        before = json.dumps(conversation)
        fast, slow = (outcome(renderer, conversation) for renderer in renderers)
        assert_same(fast, slow)
        assert json.dumps(conversation) == before


@pytest.mark.parametrize("condition", LOOKS_AHEAD.values(), ids=LOOKS_AHEAD)
def test_each_turn_is_trained_as_the_last_one_of_a_conversation(condition: str) -> None:
    """Its prompt shows earlier turns as a chat would send them."""
    tokenizer = make(LOOKING_AHEAD.replace("AHEAD", condition))
    messages = chat("a", "b", "c", "d", "e", "f").messages
    sequences = Renderer(tokenizer)(Conversation(messages, None)).sequences
    targets = [tokenizer.decode(each.ids[each.loss_mask]) for each in sequences]
    assert targets == ["b</s>", "d</s>", "f</s>"]
    prompts = [tokenizer.decode(each.ids[~each.loss_mask]) for each in sequences]
    assert prompts == [
        tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, tokenize=False)
        for i in (1, 3, 5)
    ]


# A special token of a message, with another character in place of its first.
NEUTRAL = 0xE000


def with_specials(value: Any, random: random.Random, controls: list[str]) -> Any:
    """Put special tokens between the words of the messages."""
    if isinstance(value, list):
        return [with_specials(inner, random, controls) for inner in value]
    if not isinstance(value, dict):
        return value
    texts = {}
    for key in ("content", "reasoning_content", "thinking"):
        if key in value and random.random() < 0.5:
            words = [value[key], random.choice(controls), "so", random.choice(controls), "."]
            texts[key] = " ".join(words)
    return {**value, **texts}


def neutral(value: Any, controls: Any) -> Any:
    if isinstance(value, list):
        return [neutral(inner, controls) for inner in value]
    if isinstance(value, dict):
        return {key: neutral(inner, controls) for key, inner in value.items()}
    if isinstance(value, str):
        return controls.sub(lambda match: chr(NEUTRAL + ord(match[0][0])) + match[0][1:], value)
    return value


def plain(text: str) -> str:
    return "".join(
        chr(ord(character) - NEUTRAL) if NEUTRAL <= ord(character) < NEUTRAL + 0x80 else character
        for character in text
    )


NAMES = [
    name
    for name in TOKENIZERS
    # "single_word": a template's own tokens are text beside letters. "sentencepiece": it has not
    # all characters. DeepSeek's tokens begin with a character that is not ASCII, as in the text.
    if not any(word in name for word in ("single_word", "sentencepiece", "strip"))
]


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_of_messages_are_text_for_every_template(name: str) -> None:
    """They are the tokens of the same text with another first character, but for that."""
    generator = random.Random(name)
    renderer = Renderer(TOKENIZERS[name]())
    decode = renderer.tokenizer.decode
    are_controls = renderer.encoder.are_controls
    specials = list(renderer.template.control_tokens.values())
    compared = 0
    for _ in range(8):
        conversation = random_conversation(generator)
        messages = with_specials(conversation.messages, generator, specials)
        outcomes = [
            outcome(renderer, Conversation(each, conversation.tools))
            for each in (messages, neutral(messages, renderer.encoder.controls))
        ]
        if any(isinstance(each, str) for each in outcomes):
            assert [isinstance(each, str) for each in outcomes] == [True, True], outcomes
            continue
        special, other = outcomes
        assert other.counts["special_as_text"] == 0
        for first, second in zip(special.sequences, other.sequences, strict=True):
            is_control = are_controls(first.ids)
            wanted = second.ids[are_controls(second.ids)]
            np.testing.assert_array_equal(first.ids[is_control], wanted)
            assert decode(first.ids) == plain(decode(second.ids))
            target = decode(first.ids[first.loss_mask])
            assert target == plain(decode(second.ids[second.loss_mask]))
            text = decode(first.ids[first.loss_mask & ~is_control])
            assert first.target_bytes == len(text.encode())
            compared += special.counts["special_as_text"] > 0
    assert compared > 0


@pytest.mark.parametrize("name", ["our chatml", "without first", "published qwen2_5"])
def test_conversations_of_usual_templates_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The shortcut is taken: without it, all would be right and slow."""
    if name not in TOKENIZERS:
        pytest.skip("needs trl, which comes with the extra dev")
    renderer = Renderer(TOKENIZERS[name]())
    renderer(chat("a", "b", "c", "d"))  # remembers how prompts end
    texts = []
    encode = renderer.encoder.encode

    def counted(text: str, has_escapes: bool = False) -> Any:
        texts.append(text)
        return encode(text, has_escapes)

    monkeypatch.setattr(renderer.encoder, "encode", counted)
    system = {"role": "system", "content": "Be brief."}
    several = chat("a", "b", "c", "d", "e", "f").messages
    for messages in (several, [system, *several]):
        (sequence,) = renderer(Conversation(messages, None)).sequences
        assert sequence.turns == 3
        assert len(texts) == 1
        texts.clear()
