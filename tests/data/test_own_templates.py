"""Templates of our own keep their tokens and masks, whatever rule finds the turns.

``own_templates`` has each template, and beside it a file with what it gives: a line for each
conversation. LLMTRAIN_WRITE_DOCS=1 writes these files, instead of comparing them.
"""

import itertools
import json
import re
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from llmtrain.data.formats import Conversation
from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.render import Renderer, TokenSequence
from tests.data.chats import chat
from tests.data.published_templates import KINDS, TOOLS, tokenizer_with
from tests.launching import WRITE_DOCS

FOLDER = Path(__file__).parent / "own_templates"
TEMPLATES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.jinja"))}

# A turn of the other templates is all that is shown after its prompt, up to the first stop token.
NEEDS_A_SECOND_RULE = {
    "call_ended_by_result": "a call without its result has no end; models stop where it begins",
    "channels": "an answer hides the reasoning of the calls before it, which its prompt shows",
    "empty_reasoning": "a call hides its reasoning, so its prompt is the one without reasoning",
    "last_end_twice": "an answer ends with all stop tokens that follow each other, not the first",
    "reasoning_opened": "no text shows the reasoning that the prompt has begun",
}

# The conversations that differ most.
RENDERED_KINDS = [
    "several",
    "system",
    "greeting",
    "reasoning, then none",
    "in its content",
    "two at once",
    "one by one, reasoning",
    "the same, several",
]
# The words by which the refusals are known.
REFUSALS = [
    "the chat template shows no calls",
    "makes several calls; the chat template shows one",
    "roles must alternate",
    "no system role",
]

Cell: TypeAlias = list[str] | str  # the sequences, or the words of a refusal


def conversations(eos_token: str) -> dict[str, list[Message]]:
    """Return the conversations, with one that holds special tokens and white space as text."""
    typed = chat(f"q1 {eos_token} ", f" Ans-1 {eos_token} or\n", f"<bos>{eos_token}q2", "Ans-2")
    return {**{kind: KINDS[kind] for kind in RENDERED_KINDS}, "typed": typed.messages}


def cells_of(template: str) -> dict[str, Cell]:
    """Render each kind of conversation. The comment of a template names its stop tokens."""
    comment = re.search(r"Stops: (.*) -#}", template)
    assert comment is not None
    stops = comment[1].split()
    tokenizer = tokenizer_with(template, stops)
    renderer = Renderer(tokenizer, tokenizer.convert_tokens_to_ids(stops))

    cells: dict[str, Cell] = {}
    for kind, messages in conversations(stops[0]).items():
        has_calls = any("tool_calls" in message for message in messages)
        try:
            rendered = renderer(Conversation(messages, TOOLS if has_calls else None))
        except BadRecord as refusal:
            matches = (words for words in REFUSALS if words in str(refusal))
            cells[kind] = next(matches, str(refusal))
        else:
            cells[kind] = [shown(sequence, tokenizer) for sequence in rendered.sequences]
    return cells


def shown(sequence: TokenSequence, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the size and a digest of a sequence, and its text with the targets in quotes."""
    ids = sequence.ids.astype("<i4")
    added = np.isin(ids, list(tokenizer.added_tokens_decoder)).sum()
    digest = zlib.crc32(sequence.loss_mask.tobytes(), zlib.crc32(ids.tobytes()))

    text = ""
    tokens = zip(sequence.loss_mask.tolist(), ids.tolist(), strict=True)
    for is_target, run in itertools.groupby(tokens, key=lambda token: token[0]):
        piece = tokenizer.decode([id for _, id in run])
        text += f"\u2039{piece}\u203a" if is_target else piece
    return f"{len(ids)} tokens, {added} added, crc {digest:08x}: {text}"


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_of_our_own_keeps_its_tokens_and_masks(name: str) -> None:
    cells = cells_of(TEMPLATES[name])

    path = FOLDER / f"{name}.json"
    if WRITE_DOCS:
        lines = [json.dumps({kind: cell}, ensure_ascii=False)[1:-1] for kind, cell in cells.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    assert cells == json.loads(path.read_text())


def test_the_templates_with_a_reason_are_some_of_them() -> None:
    assert len(TEMPLATES) == 20
    assert NEEDS_A_SECOND_RULE.keys() < TEMPLATES.keys()
