"""Encoding a conversation in one piece makes the sequences that it makes turn by turn."""

import json
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import any_of
from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord
from llmtrain.data.render import Rendered, Renderer
from llmtrain.data.tokenizer import set_template
from tests.data import published_templates
from tests.data.chats import (
    CONTROLS,
    QWEN3,
    R1,
    TEMPLATES,
    TEXT,
    assert_same_rendering,
    chat,
    make,
    make_sentencepiece,
    marked,
    unmarked,
    with_template,
)
from tests.data.odd_templates import (
    CALL_WITHOUT_END,
    COUNTS,
    ENDED_ONCE,
    ENDED_TWICE,
    GLM,
    JOINED,
    LOOKING_AHEAD,
    PLAIN,
    SWITCHED,
    WITHOUT_FIRST,
)
from tests.data.random_conversations import random_conversation

# --- templates and tokenizers


def with_token_flag(template: str, flag: str) -> PreTrainedTokenizerFast:
    """Set a flag of all control tokens, such as ``lstrip``, which takes in the space before."""
    backend = tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT))
    for text in CONTROLS:
        backend.add_special_tokens([tokenizers.AddedToken(text, special=True, **{flag: True})])
    return with_template(backend, template)


def our_chatml() -> PreTrainedTokenizerFast:
    tokenizer = make(spec="bpe:320")
    set_template(tokenizer, "chatml")
    return tokenizer


def all_tokenizers() -> dict[str, Callable[[], PreTrainedTokenizerFast]]:
    """Return functions that make a tokenizer with a chat template, by name."""
    makers: dict[str, Callable[[], PreTrainedTokenizerFast]] = {"our chatml": our_chatml}
    for name, template in TEMPLATES.items():
        makers[f"{name} marked"] = partial(make, marked(template), "bpe:320")
        makers[f"{name} unmarked"] = partial(make, unmarked(template), "bpe:320")
    for flag in ("lstrip", "rstrip", "single_word", "normalized"):
        makers[f"chatml {flag}"] = partial(with_token_flag, unmarked(TEMPLATES["chatml"]), flag)
    for name in ("chatml", "mistral"):
        makers[f"{name} sentencepiece"] = partial(make_sentencepiece, unmarked(TEMPLATES[name]))

    calls_or_content = "(m.tool_calls | tojson if m.tool_calls else m.content)"
    others = {
        "switched": SWITCHED,
        "glm": GLM,
        "joined": JOINED,
        "plain": unmarked(PLAIN),
        "counts": unmarked(COUNTS),
        "ended once": ENDED_ONCE,
        "ended twice": ENDED_TWICE,
        "call without end": CALL_WITHOUT_END,
        "without first": WITHOUT_FIRST,
        "qwen3": QWEN3.replace("m.content", calls_or_content),
        "r1": R1,
        **{f"looks ahead: {name}": template for name, template in LOOKING_AHEAD.items()},
    }
    for name, template in others.items():
        makers[name] = partial(make, template, "bpe:320")
    for name in published_templates.TEMPLATES:
        makers[f"published {name}"] = partial(published_templates.tokenizer_of, name, "bpe:320")
    return makers


TOKENIZERS = all_tokenizers()


# --- one piece or turn by turn


def turn_by_turn_renderer(
    tokenizer: PreTrainedTokenizerFast, stop_token_ids: list[int]
) -> Renderer:
    """Return a renderer that encodes each prompt and each turn by itself, without the shortcut."""
    renderer = Renderer(tokenizer, stop_token_ids)
    renderer.encoder.borders = any_of([])
    return renderer


def render(renderer: Renderer, conversation: Conversation) -> Rendered | str:
    """Return the sequences of a conversation, or the error if it is bad."""
    try:
        return renderer(conversation)
    except BadRecord as error:
        return str(error)


@pytest.mark.parametrize("name", published_templates.parameters(TOKENIZERS))
def test_conversations_in_one_piece_have_the_sequences_of_turn_by_turn(name: str) -> None:
    generator = random.Random(name)
    tokenizer = TOKENIZERS[name]()
    stop_token_ids = [tokenizer.get_vocab().get(text) for text in ("<|im_end|>", "<|eot_id|>")]
    renderer = Renderer(tokenizer, stop_token_ids)
    turn_by_turn = turn_by_turn_renderer(tokenizer, stop_token_ids)

    for _ in range(12):
        conversation = random_conversation(generator)
        before = json.dumps(conversation)
        assert_same_rendering(render(renderer, conversation), render(turn_by_turn, conversation))
        assert json.dumps(conversation) == before, "the conversation is not changed"


@pytest.mark.parametrize("template", LOOKING_AHEAD.values(), ids=LOOKING_AHEAD)
def test_each_turn_is_trained_on_as_the_last_one_of_a_conversation(template: str) -> None:
    tokenizer = make(template)
    messages = chat("a", "b", "c", "d", "e", "f").messages
    sequences = Renderer(tokenizer)(Conversation(messages, None)).sequences

    targets = [tokenizer.decode(sequence.ids[sequence.loss_mask]) for sequence in sequences]
    assert targets == ["b</s>", "d</s>", "f</s>"]
    prompts = [tokenizer.decode(sequence.ids[~sequence.loss_mask]) for sequence in sequences]
    expected = [
        tokenizer.apply_chat_template(messages[:count], add_generation_prompt=True, tokenize=False)
        for count in (1, 3, 5)
    ]
    assert prompts == expected


@pytest.mark.parametrize("name", ["our chatml", "without first"])
def test_conversations_of_common_templates_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    renderer = Renderer(TOKENIZERS[name]())
    encode = renderer.encoder.encode
    texts = []

    def encode_and_count(text: str, has_escapes: bool = False) -> Any:
        texts.append(text)
        return encode(text, has_escapes)

    monkeypatch.setattr(renderer.encoder, "encode", encode_and_count)
    words = "These are the words of a message."
    messages = chat(*[words] * 20).messages
    (sequence,) = renderer(Conversation(messages, None)).sequences

    assert len(sequence.turn_ends) == 10
    assert sum(text.count(words) for text in texts) == 20


# --- special tokens in messages

# No random text has this word. It begins with a private-use character, as do the texts that stand for
# special tokens.
WORD = "\ue000word"


def with_text(conversation: Conversation, text: str) -> Conversation:
    """Put a text into the content and the reasoning of all messages."""
    messages = []
    for message in conversation.messages:
        texts = {
            key: f"{message[key]} {text} so {text} ."
            for key in ("content", "reasoning_content", "thinking")
            if key in message
        }
        messages.append({**message, **texts})
    return conversation._replace(messages=messages)


# "single_word": a template's own tokens are text if they stand beside letters. "sentencepiece": the
# tokenizer does not have all characters. "lstrip" and "rstrip": a token takes in white space.
COMPARABLE = [name for name in TOKENIZERS if not re.search("single_word|sentencepiece|strip", name)]


@pytest.mark.parametrize("name", published_templates.parameters(COMPARABLE))
def test_special_tokens_in_messages_are_text_for_every_template(name: str) -> None:
    """The sequences are those of a word in their place, apart from the text of the word."""
    generator = random.Random(name)
    renderer = Renderer(TOKENIZERS[name]())
    decode = renderer.tokenizer.decode
    control_ids = [*renderer.template.control_tokens]
    # A quotation mark would be escaped in JSON.
    specials = [text for text in renderer.template.control_tokens.values() if '"' not in text]

    compared = 0
    for _ in range(8):
        conversation = random_conversation(generator)
        special = generator.choice(specials)
        actual = render(renderer, with_text(conversation, special))
        expected = render(renderer, with_text(conversation, WORD))
        if isinstance(actual, str) or isinstance(expected, str):
            assert isinstance(actual, str), expected
            assert isinstance(expected, str), actual
            continue

        assert actual.counts["special_as_text"] > 0
        for sequence, reference in zip(actual.sequences, expected.sequences, strict=True):
            controls = sequence.ids[np.isin(sequence.ids, control_ids)]
            reference_controls = reference.ids[np.isin(reference.ids, control_ids)]
            np.testing.assert_array_equal(controls, reference_controls)
            assert decode(sequence.ids) == decode(reference.ids).replace(WORD, special)

            target = decode(sequence.ids[sequence.loss_mask])
            reference_target = decode(reference.ids[reference.loss_mask])
            assert target == reference_target.replace(WORD, special)
            added_bytes = len(special.encode()) - len(WORD.encode())
            expected_bytes = reference.end.target_bytes + reference_target.count(WORD) * added_bytes
            assert sequence.end.target_bytes == expected_bytes
            compared += 1
    assert compared > 0
