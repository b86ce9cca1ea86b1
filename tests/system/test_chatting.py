"""A model that was fine-tuned on conversations answers them, in transformers' own generation, and stops by itself."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from tests.data.test_published_templates import (
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

pytestmark = pytest.mark.skipif(not TEMPLATES, reason="needs trl, which comes with the extra dev")

PLACES = ["Oslo", "Bonn", "Rome", "Kyiv", "Lima", "Cairo", "Quito", "Delhi", "Paris", "Seoul"]
SKIES = ["rain", "sun", "fog", "snow", "hail", "wind", "haze", "storm", "clouds", "frost"]
# Of each template the architecture, its layers and flags. Experts learn by heart more slowly: one family has dense layers.
FAMILIES = {
    "gptoss": ("gpt_oss", "num_hidden_layers=2", "--max_steps 100 --router_aux_loss_coef 0"),
    "deepseekv3": ("deepseek_v3", "num_hidden_layers=2,first_k_dense_replace=3", ""),
    "lfm2_2_5": ("lfm2", "num_hidden_layers=2", ""),
}


def conversations() -> list[dict[str, Any]]:
    """Several turns each, with reasoning and a call."""
    made = []
    for place, sky in zip(PLACES, SKIES, strict=True):
        messages = [
            user(f"Weather in {place}?"),
            answer("", f"I ask for {place}.", place),
            result(sky, place),
            answer(f"There is {sky}.", f"It says {sky}."),
            user("And my dog?"),
            answer(f"It likes {sky} in {place}.", f"A dog of {place}."),
        ]
        made.append({"messages": messages, "tools": TOOLS})
    return made


def base_of(template: str, folder: Path) -> Path:
    """A folder with a tokenizer, the family's template and its stops."""
    text = [json.dumps(conversation) for conversation in conversations()] + [TEMPLATES[template]]
    tokenizer = tokenizer_of(template, "bpe:600", text)
    tokenizer.save_pretrained(folder)
    GenerationConfig(
        eos_token_id=tokenizer.convert_tokens_to_ids(stops_of(template))
    ).save_pretrained(folder)
    return folder


def answered(folder: Path, tokenizer: PreTrainedTokenizerFast, as_text: bool) -> int:
    """Of how many conversations the model gives every turn, and stops by itself."""
    model, right = AutoModelForCausalLM.from_pretrained(folder).eval(), 0
    for conversation in conversations():
        messages, good = conversation["messages"], True
        for message in messages:  # as the template takes them
            for call in message.get("tool_calls", []) if as_text else []:
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            how: dict[str, Any] = {
                "add_generation_prompt": True,
                "return_dict": True,
                "return_tensors": "pt",
            }
            prompt = tokenizer.apply_chat_template(messages[:i], TOOLS, enable_thinking=True, **how)
            with torch.no_grad():
                out = model.generate(**prompt, do_sample=False, max_new_tokens=150)
            new = out[0, prompt["input_ids"].shape[1] :]
            said = tokenizer.decode(new)
            wanted = [
                message["content"],
                *re.findall("|".join(PLACES), json.dumps(message.get("tool_calls", []))),
            ]
            good &= len(new) < 150 and all(word in said for word in wanted)
        right += good
    return right


@long_form
@pytest.mark.parametrize("template", FAMILIES)
def test_a_model_that_learnt_conversations_by_heart_says_them_and_stops(
    template: str, tmp_path: Path
) -> None:
    kind, layers, more = FAMILIES[template]
    base = base_of(template, tmp_path / "base")
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, conversations())))
    flags = [
        "--from_config",
        kind,
        "--tokenizer",
        str(base),
        "--dataset",
        str(tmp_path / "chats.jsonl"),
    ]
    flags += ["--config_overrides", f"hidden_size=96,intermediate_size=192,{layers}"]
    flags += ["--block_size", "640", "--max_steps", "160", "--eval_fraction", "0", "--no_packing"]
    flags += [
        "--global_batch_size",
        "10",
        "--per_device_train_batch_size",
        "10",
        "--save_steps",
        "1000",
    ]
    flags += [
        "--optim",
        "muon",
        "--learning_rate",
        "1e-2",
        "--warmup_steps",
        "5",
        "--report_to",
        "none",
    ]
    flags += more.split()
    run_forked(
        [*PYTHON, FINETUNE, *flags, "--output_dir", str(tmp_path / "run")], timeout=600
    ).assert_ok()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert answered(tmp_path / "run" / "model", tokenizer, template == "deepseekv3") == 10
