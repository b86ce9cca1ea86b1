"""The model card: its code works on the folder, and it says how the model was trained."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import llmtrain as lt
from llmtrain.data.loader import Collate, SlotRows
from llmtrain.data.samplers import Slot
from llmtrain.interfaces.model_bundle import ModelBundle
from llmtrain.models.config import ModelConfig
from llmtrain.models.preference_config import PreferenceConfig
from llmtrain.models.pretrained import load_model
from llmtrain.models.reward_card import scoring_code
from llmtrain.parallel.placement import place
from llmtrain.record.saver import write_model
from tests.families import OVERRIDES
from tests.launching import ROOT

PROMPT = "What is 6 * 7?"
ANSWERS = ("It is 42, as always.", "I do not know")

# Templates by how they end an answer.
TEMPLATES = {
    "plain text": "none",
    "end token and a newline": "chatml",
    # The end token is also the one that pads, because the tokenizer has no other.
    "EOS": """
        {%- for message in messages -%}
            {%- if message.role == 'user' -%}{{ '[INST] ' + message.content + ' [/INST]' }}
            {%- else -%}{{ ' ' + message.content + eos_token }}{%- endif -%}
        {%- endfor -%}""",
    "two end tokens": """
        {%- for message in messages -%}
            {{- '[' + message.role + ']' + message.content -}}
            {%- if message.role == 'assistant' -%}{{- eos_token + eos_token + '\\n' -}}{%- endif -%}
        {%- endfor -%}
        {%- if add_generation_prompt -%}{{- '[assistant]' -}}{%- endif -%}""",
}


def bundle_of(
    folder: Path, accelerator: Any, template: str, **preference: Any
) -> tuple[ModelBundle, lt.Tokenized]:
    """Return a small model, and rows with one preference pair."""
    if template not in ("none", "chatml"):
        (folder / "template.jinja").write_text(template)
        template = str(folder / "template.jinja")
    record = {"prompt": PROMPT, "chosen": ANSWERS[0], "rejected": ANSWERS[1]}
    (folder / "pairs.jsonl").write_text(json.dumps(record) + "\n")
    rows = lt.tokenize(
        lt.DataConfig(dataset=[str(folder / "pairs.jsonl")], tokenizer="byte", eval_fraction=0),
        128,
        chat=lt.PairConfig(chat_template=template),
    )
    config = ModelConfig(from_config="llama", config_overrides=OVERRIDES, max_length=128)
    bundle = load_model(
        config, None, rows, seed=3, precision="no", preference=PreferenceConfig(**preference)
    )
    return place(accelerator, bundle), rows


def write_card(bundle: ModelBundle, folder: Path) -> str:
    """Write the model folder, and return its card."""
    tensors = bundle.files.export_tensors(bundle.model)
    write_model(folder, bundle.files, tensors)
    return (folder / "README.md").read_text()


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_code_of_a_reward_models_card_scores_answers_as_training_does(
    template: str,
    tmp_path: Path,
    accelerator: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    bundle, rows = bundle_of(tmp_path, accelerator, TEMPLATES[template], loss_type=["reward"])
    bundle.model.eval()
    batch = Collate(1, prepare=bundle.prepare_batch)(
        SlotRows(rows.train).__getitems__([Slot(0, 0)])
    ).batches[0]
    expected = bundle.model(**batch, compute=bundle.objective.reference)[0, :2].tolist()
    assert abs(expected[0] - expected[1]) > 1e-3

    card = write_card(bundle, tmp_path / "model")
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path / "model")
    capsys.readouterr()
    exec(code, names)
    assert re.fullmatch(r"-?\d\.\d+", capsys.readouterr().out.strip())
    scores = []
    for answer in ANSWERS:
        messages = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": answer},
        ]
        is_plain = TEMPLATES[template] == "none"
        scores.append(names["score"](PROMPT, answer) if is_plain else names["score"](messages))
    assert scores == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "template",
    [
        # Training puts an answer after the prompt that begins its reasoning.
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]<think>\n{% endif %}",
        # Training adds the token that ends an answer.
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_the_card_has_no_scoring_code_if_training_builds_another_text(
    template: str, tmp_path: Path
) -> None:
    from llmtrain.data import tokenizer as tok

    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    words.chat_template = template
    assert scoring_code(words, []) == ""


def test_the_docs_show_the_code_of_a_card(
    tmp_path: Path, accelerator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    bundle, _ = bundle_of(tmp_path, accelerator, "chatml", loss_type=["reward"])
    code = bundle.files.loading_code().replace("FOLDER", '"runs/reward/model"')
    page = (ROOT / "docs" / "guides" / "preferences.md").read_text()
    code_before_example, _, _ = code.partition("question = ")
    assert f"```python\n{code_before_example}" in page


@pytest.mark.parametrize(
    ("preference", "line"),
    [
        ({}, "Training loss: DPO (`--loss_type sigmoid`)."),
        ({"loss_type": ["simpo"]}, "Training loss: SimPO (`--loss_type simpo`)."),
        ({"loss_type": ["reward"]}, "Training loss: Bradley-Terry (`--loss_type reward`)."),
    ],
)
def test_the_card_names_the_loss(
    preference: dict[str, str],
    line: str,
    tmp_path: Path,
    accelerator: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    bundle, _ = bundle_of(tmp_path, accelerator, "chatml", **preference)
    assert f"\n{line}\n" in write_card(bundle, tmp_path / "model")


def test_padding_is_the_tokenizers_even_if_its_id_is_zero() -> None:
    """Transformers scores the last token that is not padding."""
    from llmtrain.data import tokenizer as tok
    from llmtrain.models.meta_models import build_model

    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    words.add_special_tokens({"eos_token": "<|end|>"})
    words.pad_token = "<|endoftext|>"
    assert words.pad_token_id == 0
    assert words.eos_token_id != 0
    config = ModelConfig(from_config="llama", config_overrides=OVERRIDES, max_length=64)
    model = build_model(config, words, torch.float32, is_frozen=False, is_reward_model=True)
    assert model.config.pad_token_id == 0
