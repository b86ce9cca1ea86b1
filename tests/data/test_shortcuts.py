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
from llmtrain.data.chat_template import set_template
from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord
from llmtrain.data.render import Renderer
from llmtrain.data.rendered import Rendered
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
    controls = [tokenizers.AddedToken(text, special=True, **{flag: True}) for text in CONTROLS]
    backend = tok.train_tokenizer("byte", TEXT, lambda: iter(TEXT))
    backend.add_special_tokens(controls)
    tokenizer = tok.as_pretrained(backend, block_size=32)
    tokenizer.bos_token = "<s>"
    tokenizer.eos_token = "</s>"
    tokenizer.chat_template = template
    return tokenizer


def our_chatml() -> PreTrainedTokenizerFast:
    tokenizer = make(spec="bpe:320")
    set_template(tokenizer, "chatml")
    return tokenizer


OTHER_TEMPLATES = {
    "SWITCHED": SWITCHED,
    "GLM": GLM,
    "JOINED": JOINED,
    "PLAIN": PLAIN,
    "COUNTS": COUNTS,
    "ENDED_ONCE": ENDED_ONCE,
    "CALL_WITHOUT_END": CALL_WITHOUT_END,
}


def all_tokenizers() -> dict[str, Callable[[], PreTrainedTokenizerFast]]:
    """Return functions that make a tokenizer with a chat template, by name."""
    makers: dict[str, Callable[[], PreTrainedTokenizerFast]] = {}
    for name, template in TEMPLATES.items():
        makers[f"{name} marked"] = partial(make, marked(template), "bpe:320")
        makers[f"{name} unmarked"] = partial(make, unmarked(template), "bpe:320")
        makers[f"{name} sentencepiece"] = partial(make_sentencepiece, unmarked(template))
        for flag in ("lstrip", "rstrip", "single_word", "normalized"):
            makers[f"{name} {flag}"] = partial(with_token_flag, unmarked(template), flag)

    for name, template in OTHER_TEMPLATES.items():
        makers[name] = partial(make, unmarked(template), "bpe:320")
    for name, template in LOOKING_AHEAD.items():
        makers[f"looks ahead: {name}"] = partial(make, template)

    makers["ended twice"] = partial(make, ENDED_TWICE)
    makers["without first"] = partial(make, WITHOUT_FIRST)
    calls_or_content = "(m.tool_calls | tojson if m.tool_calls else m.content)"
    makers["qwen3"] = partial(make, QWEN3.replace("m.content", calls_or_content), "bpe:320")
    makers["r1"] = partial(make, R1)
    makers["our chatml"] = our_chatml
    for name in published_templates.TEMPLATES:
        makers[f"published {name}"] = partial(published_templates.tokenizer_of, name, "bpe:320")
    return makers


TOKENIZERS = all_tokenizers()


# --- one piece or turn by turn


class TurnByTurnRenderer(Renderer):
    """Encodes each prompt and each turn by itself, without the shortcut."""

    def _encode_together(self, run: Any) -> None:
        return None


def render(renderer: Renderer, conversation: Conversation) -> Rendered | str:
    """Return the sequences of a conversation, or the error if it is bad."""
    try:
        return renderer(conversation)
    except BadRecord as error:
        return str(error)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_conversations_in_one_piece_have_the_sequences_of_turn_by_turn(name: str) -> None:
    generator = random.Random(name)
    tokenizer = TOKENIZERS[name]()
    stop_token_ids = [tokenizer.get_vocab().get(text) for text in ("<|im_end|>", "<|eot_id|>")]
    renderer = Renderer(tokenizer, stop_token_ids)
    turn_by_turn = TurnByTurnRenderer(tokenizer, stop_token_ids)

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


@pytest.mark.parametrize("has_system_prompt", [False, True])
@pytest.mark.parametrize("name", ["our chatml", "without first", "published qwen2_5"])
def test_conversations_of_common_templates_are_encoded_once(
    monkeypatch: pytest.MonkeyPatch, name: str, has_system_prompt: bool
) -> None:
    if name not in TOKENIZERS:
        pytest.skip("needs trl, which comes with the extra dev")
    renderer = Renderer(TOKENIZERS[name]())
    renderer(chat("a", "b", "c", "d"))  # the renderer remembers how prompts end
    encode = renderer.encoder.encode
    texts = []

    def encode_and_count(text: str, has_escapes: bool = False) -> Any:
        texts.append(text)
        return encode(text, has_escapes)

    monkeypatch.setattr(renderer.encoder, "encode", encode_and_count)
    messages = chat("a", "b", "c", "d", "e", "f").messages
    if has_system_prompt:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    (sequence,) = renderer(Conversation(messages, None)).sequences
    assert sequence.turns == 3
    assert len(texts) == 1


# --- special tokens in messages

# Added to the first character of a special token, it makes another text of the same length.
DISGUISE = 0xE000


def with_specials(
    messages: list[dict[str, Any]], generator: random.Random, specials: list[str]
) -> list[dict[str, Any]]:
    """Put special tokens into some of the texts of messages."""
    changed = []
    for message in messages:
        texts = {}
        for key in ("content", "reasoning_content", "thinking"):
            if key in message and generator.random() < 0.5:
                first = generator.choice(specials)
                second = generator.choice(specials)
                texts[key] = f"{message[key]} {first} so {second} ."
        changed.append({**message, **texts})
    return changed


def disguised(value: Any, specials: re.Pattern[str]) -> Any:
    """Disguise the special tokens in all texts of a JSON value."""
    if isinstance(value, list):
        return [disguised(item, specials) for item in value]
    if isinstance(value, dict):
        return {key: disguised(item, specials) for key, item in value.items()}
    if isinstance(value, str):
        return specials.sub(lambda match: chr(DISGUISE + ord(match[0][0])) + match[0][1:], value)
    return value


def undisguised(text: str) -> str:
    ascii_disguise = re.compile(f"[{chr(DISGUISE)}-{chr(DISGUISE + 0x7F)}]")
    return ascii_disguise.sub(lambda match: chr(ord(match[0]) - DISGUISE), text)


# "single_word": a template's own tokens are text if they stand beside letters. "sentencepiece": the
# tokenizer does not have all characters. "lstrip" and "rstrip": a token takes in white space.
COMPARABLE = [name for name in TOKENIZERS if not re.search("single_word|sentencepiece|strip", name)]


@pytest.mark.parametrize("name", COMPARABLE)
def test_special_tokens_in_messages_are_text_for_every_template(name: str) -> None:
    """The tokens are those of messages in which the special tokens are disguised."""
    generator = random.Random(name)
    renderer = Renderer(TOKENIZERS[name]())
    decode = renderer.tokenizer.decode
    are_controls = renderer.encoder.are_controls
    specials = list(renderer.template.control_tokens.values())

    compared = 0
    for _ in range(8):
        conversation = random_conversation(generator)
        messages = with_specials(conversation.messages, generator, specials)
        disguised_messages = disguised(messages, renderer.encoder.controls)
        actual = render(renderer, Conversation(messages, conversation.tools))
        expected = render(renderer, Conversation(disguised_messages, conversation.tools))
        if isinstance(actual, str) or isinstance(expected, str):
            assert isinstance(actual, str), expected
            assert isinstance(expected, str), actual
            continue

        assert expected.counts["special_as_text"] == 0
        for sequence, reference in zip(actual.sequences, expected.sequences, strict=True):
            is_control = are_controls(sequence.ids)
            controls = reference.ids[are_controls(reference.ids)]
            np.testing.assert_array_equal(sequence.ids[is_control], controls)

            target = decode(sequence.ids[sequence.loss_mask])
            assert target == undisguised(decode(reference.ids[reference.loss_mask]))
            assert decode(sequence.ids) == undisguised(decode(reference.ids))

            target_text = decode(sequence.ids[sequence.loss_mask & ~is_control])
            assert sequence.target_bytes == len(target_text.encode())
            compared += actual.counts["special_as_text"] > 0
    assert compared > 0
