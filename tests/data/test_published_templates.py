"""Chat templates of published models: each turn is a target once, after the prompt of a chat.

``docs/explanation/templates-table.md`` has the table.
"""

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import transformers

from llmtrain.data.formats import Conversation, conversation_of
from llmtrain.data.messages import BadRecord, Message
from llmtrain.data.render import Rendered, Renderer
from llmtrain.data.turns import THINKING_COUNTS
from tests.data.published_templates import (
    KINDS,
    TEMPLATES,
    TEMPLATES_PAGE,
    TOOLS,
    answer,
    parameters,
    stops_of,
    tokenizer_of,
    user,
)

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs trl, which comes with the extra dev")

# These words tell to which turn a target belongs.
DISTINCT_WORDS = ["Ans-1", "Ans-2", "Ans-3", "Oslo", "Bonn"]

# The letters of the table, and the words of the errors that they stand for.
REFUSALS = {
    "c": "calls a tool, and the chat template shows no calls",
    "a": "Conversation roles must alternate",
    "s": "System role not supported",
    "o": "makes several calls; the chat template shows one",
}


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
    return rendered.counts["untrained_turns"]


def check_targets(
    rendered: Rendered, conversation: Conversation, renderer: Renderer, stops: list[str]
) -> None:
    """Check that each turn is a target once, after the prompt of a chat, up to a stop token.

    The prompts of `llmtrain generate` and of samples must be the same.
    """
    tokenizer = renderer.tokenizer
    messages, reasoning = renderer.template.adapt(conversation.messages)

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
            assert sequence.ids[:start].tolist() in [
                renderer.prompt(conversation.messages[:turn], conversation.tools, thinking)
                for thinking in trained_settings(rendered)
            ]

    assert len(set(trained_turns)) == len(trained_turns)
    assert len(trained_turns) == len(turns) - left_out_turns(rendered)


def trained_settings(rendered: Rendered) -> list[bool | None]:
    """Return the thinking settings with which the turns are prompted for."""
    settings = [setting for setting, name in THINKING_COUNTS.items() if rendered.counts[name]]
    return settings or [None]


def target_sections(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the first index, and the index after the last one, of each run of targets."""
    borders = np.flatnonzero(np.diff(loss_mask, prepend=False, append=False)).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


def is_target_of(message: Message, target: str) -> bool:
    """Return whether a target has the answer and the places of a message, and no others."""
    content = message["content"] + json.dumps(message.get("tool_calls", []))
    return all((word in content) == (word in target) for word in DISTINCT_WORDS)


@pytest.mark.parametrize("name", parameters(TEMPLATES))
def test_each_turn_is_a_target_once_and_the_table_has_the_sequences(name: str) -> None:
    cells = [cell_of(name, kind) for kind in KINDS]

    assert f"| {name} | {' | '.join(cells)} |" in TEMPLATES_PAGE.read_text().splitlines()


@pytest.mark.parametrize("name", ["glm4moe", "qwen3_5_nothink"])
def test_no_turn_is_trained_in_place_of_another(name: str) -> None:
    """These templates show a tag in an answer in a way that does not follow from the prompt."""
    messages = [user("q1"), answer("Ans-1"), user("q2"), answer("Why</think>Ans-2")]
    renderer = Renderer(tokenizer_of(name))

    sequences = renderer(Conversation(messages, None)).sequences

    targets = "".join(renderer.tokenizer.decode(each.ids[each.loss_mask]) for each in sequences)
    assert targets.count("Ans-1") == 1


# --- prompts with completions

PROMPTS = {
    "two-questions": [user("q1"), answer("Old"), user("q2")],
    "prefill": [user("q1"), answer("Old"), user("q2"), answer("The answer:")],
    "only-a-prefill": [user("q1"), answer("The answer:")],
}


def trl_rows(tokenizer: Any, records: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the rows that TRL's ``SFTTrainer`` makes of prompts with completions."""
    trl = pytest.importorskip("trl")
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), num_attention_heads=1, **shape)
    tokenizer.pad_token = tokenizer.eos_token
    arguments = trl.SFTConfig(
        output_dir=str(folder),
        report_to="none",
        max_length=None,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
    )
    trainer = trl.SFTTrainer(
        transformers.LlamaForCausalLM(config),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=tokenizer,
    )
    return list(trainer.train_dataset)


# Llama 3 and Qwen begin a new message after a prefill, and Gemma 4 continues it.
@pytest.mark.parametrize("name", ["llama3", "qwen2_5", "gemma4_v5"])
def test_only_the_completion_is_trained_as_in_trl(name: str, tmp_path: Path) -> None:
    completion = [answer("Ans-1")]
    records = [{"prompt": prompt, "completion": completion} for prompt in PROMPTS.values()]
    renderer = Renderer(tokenizer_of(name))

    rows = trl_rows(renderer.tokenizer, records, tmp_path)

    for record, row in zip(records, rows, strict=True):
        (sequence,) = renderer(conversation_of(record, "prompt_completion")).sequences
        labels = np.where(sequence.loss_mask, sequence.ids, -100).tolist()
        # TRL trains the line break after the token at which generation stops.
        length = len(labels)
        assert sequence.ids.tolist() == row["input_ids"][:length]
        assert labels == row["labels"][:length]
        assert not renderer.tokenizer.decode(row["input_ids"][length:]).strip()


def test_every_answer_of_a_completion_is_trained() -> None:
    renderer = Renderer(tokenizer_of("llama3"))
    record = {
        "prompt": [user("q1"), {**answer("Old"), "weight": 0}],
        "completion": [answer("Ans-1"), user("q3"), answer("Ans-2")],
    }

    (sequence,) = renderer(conversation_of(record, "prompt_completion")).sequences

    sections = target_sections(sequence.loss_mask)
    targets = [renderer.tokenizer.decode(sequence.ids[start:stop]) for start, stop in sections]
    assert targets == ["Ans-1<|eot_id|>", "Ans-2<|eot_id|>"]

    with pytest.raises(BadRecord, match="the completion has no assistant message"):
        conversation_of({**record, "completion": [user("q2")]}, "prompt_completion")


if __name__ == "__main__":  # print the table
    print(f"| template | {' | '.join(KINDS)} |")
    print("|---" * (len(KINDS) + 1) + "|")
    for template in TEMPLATES:
        cells = [cell_of(template, kind) for kind in KINDS]
        print(f"| {template} | {' | '.join(cells)} |")
