"""``--model_revision``: everything that is loaded by the name of a hub model is of one commit."""

import json
from contextlib import nullcontext
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaForCausalLM

import llmtrain as lt
from llmtrain.data.tokenizer import set_template, stop_token_ids_of
from llmtrain.errors import UserError
from llmtrain.models.adapters import adapted_model, write_outline
from llmtrain.planning import planning
from tests.launching import write_chats
from tests.models.small_models import byte_tokenizer, export_model, tiny_llama

NAME = "org/model"
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
LAYERS = {"main": 1, "v2": 2}  # and the numbers below, so the branches differ in all that is read
POSITIONS = {"main": 48, "v2": 64}
TOP_K = {"main": 8, "v2": 9}
STOP_TOKENS = {"main": 3, "v2": 4}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a cache of the hub with two branches of a model; the hub itself cannot be reached."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "rows"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    for branch, commit in COMMITS.items():
        (repository / "refs" / branch).write_text(commit)
        snapshot = repository / "snapshots" / commit

        config = tiny_llama()
        config.update({"vocab_size": 300, "num_hidden_layers": LAYERS[branch]})
        config.max_position_embeddings = POSITIONS[branch]
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(
            eos_token_id=STOP_TOKENS[branch], do_sample=True, top_k=TOP_K[branch]
        )
        model.save_pretrained(snapshot)

        tokenizer = byte_tokenizer(POSITIONS[branch])
        set_template(tokenizer, "chatml")
        tokenizer.chat_template = f"{{# {branch} #}}{tokenizer.chat_template}"
        tokenizer.save_pretrained(snapshot)
    return repository


@pytest.mark.parametrize("is_plan", [True, False], ids=["plan", "run"])
def test_a_plan_downloads_no_weights(
    is_plan: bool, hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patterns: list[str] = []

    def download(name: str, *, allow_patterns: list[str], **options: str) -> str:
        patterns.extend(allow_patterns)
        return str(hub / "snapshots" / COMMITS["main"])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    chats = write_chats(tmp_path / "chats.jsonl")
    config = lt.ModelConfig(NAME, max_length=32)
    data = lt.DataConfig(dataset=[str(chats)], tokenizer=None)
    rows = lt.tokenize(data, chat=lt.ChatConfig(), model=config)

    with planning("no") if is_plan else nullcontext():
        lt.load_model(config, None, rows, seed=0, precision="no")

    has_weights = any(fnmatch("model-00001-of-00002.safetensors", each) for each in patterns)
    assert "*.json" in patterns
    assert has_weights is not is_plan


@pytest.mark.parametrize("revision", ["main", "v2", COMMITS["v2"]])
def test_everything_that_is_loaded_is_of_the_revision(
    revision: str, hub: Path, tmp_path: Path
) -> None:
    branch = "main" if revision == "main" else "v2"
    commit = COMMITS[branch]
    snapshot = hub / "snapshots" / commit
    config = lt.ModelConfig(NAME, model_revision=revision)
    data = lt.DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)

    rows = lt.tokenize(data, chat=lt.ChatConfig(), model=config)
    assert rows.decided["max_length"] == rows.metadata.block_size == POSITIONS[branch]
    assert rows.tokenizer is not None
    assert rows.tokenizer.chat_template == (snapshot / "chat_template.jinja").read_text()
    assert stop_token_ids_of(rows.metadata.tokenizer) == [STOP_TOKENS[branch]]

    bundle = lt.load_model(config, None, rows, seed=0, precision="no")
    weights = {key: weight.clone() for key, weight in bundle.weights or []}
    stored = load_file(snapshot / "model.safetensors")
    torch.testing.assert_close(weights, stored, rtol=0, atol=0)
    assert bundle.files.generation["top_k"] == TOP_K[branch]
    assert bundle.start is not None
    assert bundle.start["weights"] == {"name": NAME, "commit": commit}

    # An adapter keeps the commit if the branch moves.
    bundle = lt.load_model(config, lt.LoraConfig(lora_r=2), rows, seed=0, precision="no")
    adapter = export_model(bundle, tmp_path / "adapter")
    assert json.loads((adapter / "base.json").read_text()) == {"name": NAME, "commit": commit}
    assert json.loads((adapter / "adapter_config.json").read_text())["revision"] == commit
    for name in COMMITS:
        (hub / "refs" / name).write_text("c" * 40)
    assert adapted_model(adapter, 300).config.num_hidden_layers == LAYERS[branch]
    (tmp_path / "outline").mkdir()
    write_outline(adapter, tmp_path / "outline")
    outline = json.loads((tmp_path / "outline" / "config.json").read_text())
    assert outline["num_hidden_layers"] == LAYERS[branch]


def test_a_revision_is_refused_for_a_folder_and_for_random_weights(hub: Path) -> None:
    folder = str(hub / "snapshots" / COMMITS["main"])
    with pytest.raises(UserError, match="--model_revision v2"):
        lt.ModelConfig(folder, model_revision="v2")
    with pytest.raises(UserError, match="for a model of the hub in --model_name_or_path"):
        lt.ModelConfig(from_config="llama", model_revision="v2")


def test_a_revision_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    data = lt.DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)
    config = lt.ModelConfig(NAME, model_revision="absent")
    with pytest.raises(UserError, match="org/model@absent"):
        lt.tokenize(data, chat=lt.ChatConfig(), model=config)
