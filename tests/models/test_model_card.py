"""The model card: its code works in the folder, and it names the training loss."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import llmtrain as lt
from llmtrain.data.loader import LocalBatches
from llmtrain.data.order import Slot
from llmtrain.parallel.placement import move_to_devices
from tests.families import OVERRIDES
from tests.models.small_models import byte_tokenizer, export_model

PROMPT = "What is 6 * 7?"
ANSWERS = ("It is 42, as always.", "I do not know")

# Chat templates, by the end of an answer.
TEMPLATES = {
    "end token and a newline": "chatml",
    "EOS": """
        {%- for message in messages -%}
            {%- if message.role == 'user' -%}{{ '[INST] ' + message.content + ' [/INST]' }}
            {%- else -%}{{ ' ' + message.content + eos_token }}{%- endif -%}
        {%- endfor -%}""",
}


@pytest.fixture
def build(
    accelerator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[lt.ModelBundle, lt.Tokenized]]:
    """Build a small model, and rows with one preference pair."""

    def build(
        template: str, tokenizer: str = "byte", overrides: str = OVERRIDES
    ) -> tuple[lt.ModelBundle, lt.Tokenized]:
        if template not in ("none", "chatml"):
            (tmp_path / "template.jinja").write_text(template)
            template = str(tmp_path / "template.jinja")
        record = {"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}
        dataset = tmp_path / "pairs.jsonl"
        dataset.write_text(json.dumps(record) + "\n")
        rows = lt.tokenize(
            lt.DataConfig(dataset=[str(dataset)], tokenizer=tokenizer, eval_fraction=0),
            128,
            chat=lt.PairConfig(chat_template=template),
        )
        config = lt.ModelConfig(from_config="llama", config_overrides=overrides, max_length=128)
        preference = lt.PreferenceConfig(loss_type=["reward"])
        bundle = lt.load_model(config, None, rows, 3, "no", preference=preference)
        return move_to_devices(accelerator.ranks, bundle), rows

    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return build


def scores_in_training(bundle: lt.ModelBundle, rows: lt.Tokenized) -> list[float]:
    """Return the scores of the two answers in the only row."""
    bundle.model.eval()
    batches = LocalBatches(rows.train, 1, prepare=bundle.prepare_batch)
    (batch,) = batches.__getitems__([Slot(0, 0)]).batches
    return bundle.model(**batch, compute=bundle.objective.reference)[0, :2].tolist()


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_reward_model_loaded_as_its_card_says_scores_answers_as_training_does(
    template: str,
    build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle, rows = build(template)
    expected = scores_in_training(bundle, rows)
    assert abs(expected[0] - expected[1]) > 1e-3

    folder = export_model(bundle, tmp_path / "model")
    card = (folder / "README.md").read_text()
    assert "--loss_type reward" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    variables: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(code, variables)

    question = {"role": "user", "content": PROMPT}
    scores = []
    for answer in ANSWERS:  # as in docs/guides/preferences.md
        messages = [question, {"role": "assistant", "content": answer}]
        text = variables["tokenizer"].apply_chat_template(messages, tokenize=False).rstrip()
        inputs = variables["tokenizer"](text, add_special_tokens=False, return_tensors="pt")
        scores.append(variables["model"](input_ids=inputs.input_ids).logits.item())
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("special_tokens", "overrides", "pad_token"),
    [
        pytest.param({"pad_token": "<|fill|>"}, "", "<|fill|>", id="its own"),
        pytest.param({"eos_token": "<|end|>", "pad_token": "<|endoftext|>"}, "", None, id="id 0"),
        pytest.param({"pad_token": "<|endoftext|>", "unk_token": "<?>"}, "", "<?>", id="unknown"),
        pytest.param(
            {"additional_special_tokens": ["<|im_end|>", "<|reserved_3|>"]},
            "",
            "<|reserved_3|>",
            id="reserved",
        ),
        pytest.param({}, ",vocab_size=300", "<|pad|>", id="an unused row"),
    ],
)
def test_plain_transformers_gives_a_padded_batch_the_scores_of_training(
    special_tokens: dict[str, Any], overrides: str, pad_token: str | None, build, tmp_path: Path
) -> None:
    """Transformers scores the last token that is not padding, so no answer may end with that."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    # A base often pads with the token that ends a text.
    overrides = f"{OVERRIDES},pad_token_id={tokenizer.eos_token_id}{overrides}"
    bundle, rows = build("none", str(tmp_path / "tokenizer"), overrides)
    expected = scores_in_training(bundle, rows)

    folder = export_model(bundle, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.pad_token == (pad_token or tokenizer.convert_ids_to_tokens(0))
    texts = [PROMPT + answer + tokenizer.eos_token for answer in ANSWERS]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert scores.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_a_reward_model_without_a_token_to_pad_with_scores_one_answer_at_a_time(
    build, tmp_path: Path
) -> None:
    bundle, rows = build("none", overrides=f"{OVERRIDES},pad_token_id=0")
    folder = export_model(bundle, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [PROMPT + answer + tokenizer.eos_token for answer in ANSWERS]
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    scores = [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in texts]
    assert scores == pytest.approx(scores_in_training(bundle, rows), abs=1e-5)
    with pytest.raises(ValueError, match="no padding token"):
        model(torch.zeros(2, 3, dtype=torch.int64))
