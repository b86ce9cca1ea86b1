"""``--model_revision``: everything that is loaded by the name of a hub model is of one commit."""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from llmtrain.data.chat_template import set_template
from llmtrain.data.config import ChatConfig, DataConfig
from llmtrain.data.prepare import Tokenized
from llmtrain.data.tokenizer import stop_token_ids_of
from llmtrain.errors import UserError
from llmtrain.models.adapters import adapted_model, write_outline
from llmtrain.models.config import ModelConfig
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.pretrained import load_model
from llmtrain.training.model_rows import tokenize_for_model
from tests.launching import write_chats
from tests.models.small_models import byte_tokenizer, export_model

NAME = "org/model"


class Branch(NamedTuple):
    """A branch of the hub model. The two branches differ in everything that is read."""

    commit: str
    layers: int
    positions: int

    @property
    def stop_token(self) -> int:
        return self.layers

    @property
    def top_k(self) -> int:
        return 7 + self.layers


BRANCHES = {
    "main": Branch(commit="a" * 40, layers=1, positions=48),
    "v2": Branch(commit="b" * 40, layers=2, positions=64),
}
REVISIONS = {"main": BRANCHES["main"], "v2": BRANCHES["v2"], "b" * 40: BRANCHES["v2"]}


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a cache of the hub with two branches of a model; the hub itself cannot be reached."""
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "rows"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "hub" / "models--org--model"
    (repository / "refs").mkdir(parents=True)
    for name, branch in BRANCHES.items():
        write_snapshot(repository / "snapshots" / branch.commit, name, branch)
        (repository / "refs" / name).write_text(branch.commit)
    return repository


def write_snapshot(folder: Path, name: str, branch: Branch) -> None:
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=branch.layers,
        num_attention_heads=2,
        max_position_embeddings=branch.positions,
    )
    torch.manual_seed(branch.layers)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=branch.stop_token, do_sample=True, top_k=branch.top_k
    )
    model.save_pretrained(folder)

    tokenizer = byte_tokenizer(branch.positions)
    set_template(tokenizer, "chatml")
    tokenizer.chat_template = f"{{# {name} #}}{tokenizer.chat_template}"
    tokenizer.save_pretrained(folder)


class Loaded(NamedTuple):
    """A model config with a revision, its branch, and rows that were tokenized for it."""

    config: ModelConfig
    branch: Branch
    rows: Tokenized
    data: DataConfig


@pytest.fixture(params=REVISIONS, ids=["main", "branch", "commit"])
def loaded(request: pytest.FixtureRequest, hub: Path, tmp_path: Path) -> Loaded:
    config = ModelConfig(NAME, model_revision=request.param)
    data = DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)
    rows = tokenize_for_model(data, config, ChatConfig())
    return Loaded(config, REVISIONS[request.param], rows, data)


def test_the_tokenizer_and_the_length_are_those_of_the_revision(loaded: Loaded, hub: Path) -> None:
    branch = loaded.branch
    snapshot = hub / "snapshots" / branch.commit
    assert loaded.config.max_length == branch.positions
    assert loaded.rows.tokenizer is not None
    template = (snapshot / "chat_template.jinja").read_text()
    assert loaded.rows.tokenizer.chat_template == template
    assert stop_token_ids_of(str(loaded.data.tokenizer)) == [branch.stop_token]


def test_the_weights_and_the_fingerprint_are_those_of_the_revision(
    loaded: Loaded, hub: Path
) -> None:
    bundle = load_model(loaded.config, None, loaded.rows, seed=0, precision="no")

    weights = {key: weight.clone() for key, weight in bundle.weights or []}
    stored = load_file(hub / "snapshots" / loaded.branch.commit / "model.safetensors")
    torch.testing.assert_close(weights, stored, rtol=0, atol=0)
    assert bundle.files.generation["top_k"] == loaded.branch.top_k
    assert bundle.start is not None
    assert bundle.start["weights"] == {"name": NAME, "commit": loaded.branch.commit}


def test_an_adapter_keeps_its_commit_if_the_branch_moves(
    loaded: Loaded, hub: Path, tmp_path: Path
) -> None:
    branch = loaded.branch
    lora = LoraConfig(lora_r=2)
    bundle = load_model(loaded.config, lora, loaded.rows, seed=0, precision="no")
    adapter = export_model(bundle, tmp_path / "adapter")
    base = json.loads((adapter / "base.json").read_text())
    assert base == {"name": NAME, "commit": branch.commit}
    assert json.loads((adapter / "adapter_config.json").read_text())["revision"] == branch.commit

    for name in BRANCHES:
        (hub / "refs" / name).write_text("c" * 40)

    assert adapted_model(str(adapter), 300).config.num_hidden_layers == branch.layers
    outline = tmp_path / "outline"
    outline.mkdir()
    write_outline(adapter, outline)
    config = json.loads((outline / "config.json").read_text())
    assert config["num_hidden_layers"] == branch.layers


def test_a_revision_is_refused_for_a_folder(hub: Path) -> None:
    folder = str(hub / "snapshots" / BRANCHES["main"].commit)
    message = r"--model_revision v2 is for models of the hub, and .* is a folder"
    with pytest.raises(UserError, match=message):
        ModelConfig(folder, model_revision="v2")


def test_a_revision_is_refused_for_random_weights() -> None:
    message = "belongs to --model_name_or_path, not to --from_config"
    with pytest.raises(UserError, match=message):
        ModelConfig(from_config="llama", model_revision="v2")


def test_a_revision_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    data = DataConfig(dataset=[str(write_chats(tmp_path / "chats.jsonl"))], tokenizer=None)
    config = ModelConfig(NAME, model_revision="absent")
    with pytest.raises(UserError, match="org/model@absent: no tokenizer can be loaded") as caught:
        tokenize_for_model(data, config, ChatConfig())
    assert "\n" not in str(caught.value)
