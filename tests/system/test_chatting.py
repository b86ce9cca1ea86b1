"""A model that has learnt conversations by heart answers in transformers as it was trained to."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.data.published_templates import (
    TEMPLATES,
    TOOLS,
    answer,
    result,
    stops_of,
    tokenizer_of,
    user,
)
from tests.forked import run_forked
from tests.launching import FINETUNE, PYTHON, long_form

pytestmark = [
    long_form,
    pytest.mark.skipif(not TEMPLATES, reason="needs trl, which comes with the extra dev"),
]

PLACES = ["Oslo", "Bonn", "Rome", "Kyiv", "Lima", "Cairo", "Quito", "Delhi", "Paris", "Seoul"]
SKIES = ["rain", "sun", "fog", "snow", "hail", "wind", "haze", "storm", "clouds", "frost"]

# Longer than any turn. A model that makes so many tokens has not stopped by itself.
MAX_NEW_TOKENS = 150


TEMPLATE = "gptoss"
FLAGS = (
    "--from_config gpt_oss --config_overrides hidden_size=96,intermediate_size=192,num_hidden_layers=2 "
    "--router_aux_loss_coef 0 --block_size 640 --eval_fraction 0 --no_packing "
    "--global_batch_size 10 --per_device_train_batch_size 10 --max_steps 100 --optim muon "
    "--learning_rate 1e-2 --warmup_steps 5 --report_to none"
)


def conversation(place: str, sky: str) -> dict[str, Any]:
    """Return a conversation of several turns, with reasoning and a call."""
    messages = [
        user(f"Weather in {place}?"),
        answer("", f"I ask for {place}.", place),
        result(sky, place),
        answer(f"There is {sky}.", f"It says {sky}."),
        user("And my dog?"),
        answer(f"It likes {sky} in {place}.", f"A dog of {place}."),
    ]
    return {"messages": messages, "tools": TOOLS}


CONVERSATIONS = [conversation(place, sky) for place, sky in zip(PLACES, SKIES, strict=True)]


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the published template, and the stop tokens of its family."""
    text = [json.dumps(conversation) for conversation in CONVERSATIONS]
    tokenizer = tokenizer_of(TEMPLATE, "bpe:600", [*text, TEMPLATES[TEMPLATE]])
    tokenizer.save_pretrained(folder)
    stop_token_ids = tokenizer.convert_tokens_to_ids(stops_of(TEMPLATE))
    GenerationConfig(eos_token_id=stop_token_ids).save_pretrained(folder)


def words_of(message: dict[str, Any]) -> list[str]:
    """Return what the turn of a message must hold: its content, and the places of its calls."""
    calls = json.dumps(message.get("tool_calls", []))
    return [message["content"], *re.findall("|".join(PLACES), calls)]


def wrong_answers(folder: Path) -> list[str]:
    """Generate every answer of the conversations, and return the wrong ones.

    An answer is right if it has the words that the model was trained on, and stops by itself.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)

    wrong = []
    for conversation in CONVERSATIONS:
        messages = conversation["messages"]
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                messages[:index],
                TOOLS,
                add_generation_prompt=True,
                enable_thinking=True,
                return_dict=True,
                return_tensors="pt",
            )
            with torch.no_grad():
                output = model.generate(**prompt, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)

            new_tokens = output[0, prompt["input_ids"].shape[1] :]
            text = tokenizer.decode(new_tokens)
            has_stopped = len(new_tokens) < MAX_NEW_TOKENS
            if not has_stopped or any(word not in text for word in words_of(message)):
                wrong.append(text)
    return wrong


def test_a_model_that_learnt_conversations_by_heart_says_them_and_stops(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base")
    chats = tmp_path / "chats.jsonl"
    chats.write_text("\n".join(map(json.dumps, CONVERSATIONS)))

    flags = shlex.split(
        f"{FLAGS} --tokenizer {tmp_path}/base --dataset {chats} --output_dir {tmp_path}/run"
    )
    run_forked([*PYTHON, FINETUNE, *flags], timeout=600).assert_ok()

    assert len(CONVERSATIONS) == 10
    assert wrong_answers(tmp_path / "run" / "model") == []
