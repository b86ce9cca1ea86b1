"""--model_revision: a branch of a hub model, for everything that is loaded by its name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.data.chat_template import set_template
from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.tokenizer import as_pretrained, stop_token_ids_of, train_tokenizer
from llmtrain.errors import UserError
from llmtrain.models.adapters import adapted_model, write_outline
from llmtrain.models.config import LoraConfig, ModelConfig
from llmtrain.models.pretrained import load_model
from llmtrain.record.saver import write_model
from llmtrain.training.model_rows import tokenize_for_model
from tests.launching import write_chats

NAME = "org/model"
# The two branches differ in everything that is read.
BRANCHES = {"main": ("a" * 40, 1, 48), "v2": ("b" * 40, 2, 64)}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the hub that holds two branches of a model; the hub itself cannot be reached."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "rows"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    for branch, (commit, layers, positions) in BRANCHES.items():
        snapshot = repository / "snapshots" / commit
        config = LlamaConfig(
            vocab_size=300,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=positions,
        )
        torch.manual_seed(layers)
        model = LlamaForCausalLM(config)
        model.generation_config = GenerationConfig(
            eos_token_id=layers, do_sample=True, top_k=7 + layers
        )
        model.save_pretrained(snapshot)
        tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), positions)
        set_template(tokenizer, "chatml")
        tokenizer.chat_template = f"{{# {branch} #}}{tokenizer.chat_template}"
        tokenizer.save_pretrained(snapshot)
        (repository / "refs" / branch).write_text(commit)
    return repository


@pytest.mark.parametrize("revision", ["main", "v2", "b" * 40])
def test_configuration_weights_tokenizer_and_adapter_are_those_of_the_revision(
    hub: Path, tmp_path: Path, revision: str
) -> None:
    commit, layers, positions = BRANCHES["main" if revision == "main" else "v2"]
    snapshot = hub / "snapshots" / commit
    config = ModelConfig(NAME, model_revision=revision)
    data = DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)
    rows = tokenize_for_model(data, config, ChatConfig())
    assert config.max_length == positions
    assert rows.tokenizer is not None
    template = (snapshot / "chat_template.jinja").read_text()
    assert rows.tokenizer.chat_template == template
    assert stop_token_ids_of(str(data.tokenizer)) == [layers]

    bundle = load_model(config, None, rows, seed=0, precision="no")
    stored = load_file(snapshot / "model.safetensors")
    loaded = {key: weight.clone() for key, weight in bundle.weights or []}
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[key], weight) for key, weight in stored.items())
    assert bundle.files.generation["top_k"] == 7 + layers
    origin = {"name": NAME, "commit": commit}
    assert bundle.start is not None
    assert bundle.start["weights"] == origin

    adapter = tmp_path / "adapter"
    adapted = load_model(config, LoraConfig(lora_r=2), rows, seed=0, precision="no")
    write_model(adapter, adapted.files, adapted.files.export_tensors(adapted.model))
    assert json.loads((adapter / "base.json").read_text()) == origin
    assert json.loads((adapter / "adapter_config.json").read_text())["revision"] == commit
    # The adapter keeps its commit, whatever its branch becomes.
    for branch in BRANCHES:
        (hub / "refs" / branch).write_text("c" * 40)
    assert adapted_model(str(adapter), 300).config.num_hidden_layers == layers
    outline = tmp_path / "outline"
    outline.mkdir()
    write_outline(adapter, outline)
    assert json.loads((outline / "config.json").read_text())["num_hidden_layers"] == layers


def test_a_revision_that_does_not_fit_is_one_line(tmp_path: Path, hub: Path) -> None:
    folder = str(hub / "snapshots" / ("a" * 40))
    with pytest.raises(
        UserError, match=r"--model_revision v2 is for models of the hub, and .* is a folder"
    ):
        ModelConfig(folder, model_revision="v2")
    with pytest.raises(UserError, match="belongs to --model_name_or_path, not to --from_config"):
        ModelConfig(from_config="llama", model_revision="v2")
    data = DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)
    absent = ModelConfig(NAME, model_revision="absent")
    with pytest.raises(UserError, match="org/model@absent: no tokenizer can be loaded") as caught:
        tokenize_for_model(data, absent, ChatConfig())
    assert "\n" not in str(caught.value)
    print(caught.value)
