"""Weights that are streamed part by part are those of a model that is built at once."""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

import llmtrain as lt
from llmtrain.errors import UserError
from llmtrain.models import hub_models
from llmtrain.models.export import ModelFiles
from llmtrain.models.text_tower import BaseTensors, stored_base_tensors
from llmtrain.models.weight_loading import (
    InitialWeights,
    random_weights,
    stored_weights,
)
from llmtrain.parallel.placement import move_to_devices
from llmtrain.parallel.ranks import TrainingAccelerator
from tests.families import FAMILIES
from tests.models.small_models import byte_tokenizer, twins
from tests.models.some_rows import SomeRows

# A long form has every class (test_every_class.py).
SOME_FAMILIES = ["llama", "gpt2", "gemma2", "mixtral"]

# Each family's configuration takes the sizes that it knows.
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 120,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

DEEPSEEK_SIZES = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
}


def config_of(family: str, **overrides: Any) -> Any:
    defaults = AutoConfig.for_model(family)
    known = {*defaults.to_dict(), *defaults.attribute_map}
    sizes = {}
    for key, value in (SIZES | overrides).items():
        if key in known:
            sizes[defaults.attribute_map.get(key, key)] = value
    return AutoConfig.for_model(family, **sizes)


def real_model(family: str, **overrides: Any) -> Any:
    torch.manual_seed(0)
    config = config_of(family, **overrides)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def meta_model(family: str, **overrides: Any) -> Any:
    """Return a model whose parameters are on the meta device, and whose buffers are real."""
    config = config_of(family, **overrides)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.tie_weights()
    return model


def read_all(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in weights}


def parameters_of(model: Any) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def check_equal(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    torch.testing.assert_close(dict(tensors), dict(expected), rtol=0, atol=0)


def replace_tensors(folder: Path, replacements: Mapping[str, Tensor | None]) -> None:
    """Replace tensors of a checkpoint; ``None`` removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | dict(replacements)
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        path,
        {"format": "pt"},
    )


# --- random weights


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_random_weights_depend_only_on_the_seed(family: str) -> None:
    meta = meta_model(family)
    torch.manual_seed(1)
    expected = read_all(random_weights(meta, seed=5))
    torch.manual_seed(2)

    check_equal(read_all(random_weights(meta, seed=5)), expected)

    assert all(parameter.is_meta for parameter in meta.parameters()), "it has not changed"
    check_equal(read_all(random_weights(meta.bfloat16(), seed=5)), expected)
    other_weights = read_all(random_weights(meta, seed=6))
    assert any(not torch.equal(other_weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_random_weights_are_distributed_like_those_of_transformers(family: str) -> None:
    expected = parameters_of(real_model(family))
    for name, tensor in random_weights(meta_model(family), seed=5):
        if tensor.numel() <= 2000:  # too few for a standard deviation
            continue
        std = float(expected[name].std())
        assert float(tensor.std()) == pytest.approx(std, rel=0.1), name
        is_constant = std == 0
        assert is_constant or not torch.equal(tensor, expected[name]), name


def test_a_part_has_the_random_weights_that_it_has_in_the_full_model() -> None:
    model = meta_model("llama")
    block = model.model.layers[1]
    weights = read_all(random_weights(model, seed=5))
    names = {f"model.layers.1.{name}" for name, _ in block.named_parameters()}
    block_weights = read_all(random_weights(model, seed=5, names=names))
    assert block_weights
    check_equal(block_weights, {name: weights[name] for name in block_weights})


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_no_two_modules_begin_with_the_same_numbers(family: str) -> None:
    """Torch's CPU generator reads 32 bits of a seed, so the numbers themselves are compared."""
    weights = {}
    for seed in (5, 6, 5 + 2**32):
        for name, tensor in random_weights(meta_model(family), seed):
            weights[f"{name}, seed {seed}"] = tensor.clone()
    assert twins(weights) == []


# --- stored weights


# Stored tensors of the last two are split or joined along their first dimension, which FSDP shards.
@pytest.mark.parametrize("family", [*FAMILIES, "hrm_text", "kimi_linear"])
def test_stored_weights_are_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    real = real_model(family)
    real.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    meta = meta_model(family)

    weights = read_all(stored_weights(meta, tmp_path, parameters_of(meta)))

    check_equal(weights, parameters_of(loaded))

    assert all(parameter.is_meta for parameter in meta.parameters())
    check_equal(dict(meta.named_buffers()), dict(loaded.named_buffers()))


@pytest.mark.parametrize("family", SOME_FAMILIES)
def test_tensors_can_be_published_one_by_one(family: str) -> None:
    model = real_model(family)
    files: Any = ModelFiles({"model_type": family}, None)
    publish = files.tensor_converter(model)
    published: dict[str, Tensor] = {}
    for name, tensor in files.tensors(model).items():
        published |= publish(name, tensor)
    check_equal(published, files.export_tensors(model))


def test_stored_buffers_are_loaded_and_a_missing_one_is_named(tmp_path: Path) -> None:
    model = real_model("deepseek_v3", **DEEPSEEK_SIZES)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)

    meta = meta_model("deepseek_v3", **DEEPSEEK_SIZES)
    InitialWeights(meta, tmp_path, seed=0)
    biases = [buffer for name, buffer in meta.named_buffers() if "bias" in name]
    assert biases
    assert all(torch.equal(bias, torch.arange(4.0)) for bias in biases)

    names = load_file(tmp_path / "model.safetensors").keys()
    replace_tensors(tmp_path, {n: None for n in names if "e_score_correction" in n})
    with pytest.raises(UserError, match="e_score_correction_bias is missing"):
        InitialWeights(meta, tmp_path, seed=0)


# --- tensors that the model does not have


def test_modules_of_stored_tensors_that_the_model_lacks_are_copied_or_named(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def base_tensors(*, is_reward_model: bool = False) -> BaseTensors | None:
        model = meta_model("llama")
        capsys.readouterr()
        origin = hub_models.origin_of(str(tmp_path))
        return stored_base_tensors(
            model, [], str(tmp_path), origin, is_reward_model=is_reward_model
        )

    real_model("llama").save_pretrained(tmp_path)
    assert base_tensors(is_reward_model=True) is None
    assert capsys.readouterr().out == ""

    unknown = ["mtp.fc.weight", "model.visual.patch.weight", "model.visual.norm"]
    replace_tensors(tmp_path, {name: torch.ones(5, 100) for name in unknown})
    copied = base_tensors()
    assert copied is not None
    assert copied.names == {*unknown}
    assert base_tensors(is_reward_model=True) is None
    output = capsys.readouterr().out
    assert output.startswith("left out  model.visual.norm (3 tensors in all): ")

    # They may be the scales of quantized weights.
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert base_tensors() is None
    assert capsys.readouterr().out.startswith("left out  ")


# --- folders that do not fit, or change


@pytest.mark.parametrize(
    ("replacements", "message"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight has the shape \[3\]"),
        ({"lm_head.weight": torch.ones(120, 64)}, r"lm_head\.weight differs from model\.embed"),
    ],
)
def test_a_folder_that_does_not_fit_the_model_is_refused(
    replacements: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    real_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    replace_tensors(tmp_path, replacements)
    meta = meta_model("llama", tie_word_embeddings=True)
    with pytest.raises(UserError, match=message):
        list(stored_weights(meta, tmp_path, parameters_of(meta)))
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_loaded_embeddings_do_not_change_with_their_file(tmp_path: Path) -> None:
    real_model("llama", vocab_size=300).save_pretrained(tmp_path)
    # For a new token, embeddings are loaded at once. This one has a row already.
    rows = SomeRows(byte_tokenizer(), new_tokens=[256])
    config = lt.ModelConfig(model_name_or_path=str(tmp_path), max_length=32)
    model = lt.load_model(config, lora=None, rows=rows, seed=0, precision="no").model
    embedding = model.get_input_embeddings().weight.detach()
    before = embedding.clone()

    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))

    assert torch.equal(embedding, before)


def test_no_tensor_of_a_placed_model_is_left_as_it_was_allocated_or_mapped_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = real_model("deepseek_v3", vocab_size=300, **DEEPSEEK_SIZES)
    real.save_pretrained(tmp_path)
    rows = SomeRows(byte_tokenizer())
    config = lt.ModelConfig(model_name_or_path=str(tmp_path), max_length=32)
    empty_like = torch.empty_like

    def filled_with_nan(like: Tensor, **options: Any) -> Tensor:
        tensor = empty_like(like, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty_like", filled_with_nan)
    bundle = lt.load_model(config, lora=None, rows=rows, seed=0, precision="no")
    model: Any = move_to_devices(TrainingAccelerator(cpu=True).ranks, bundle).model

    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))

    check_equal(parameters_of(model), parameters_of(real))
    check_equal(dict(model.named_buffers()), dict(real.named_buffers()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "index.json is no JSON object"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "index.json names '../a.safetensors'"),
        ('{"weight_map": {"a": "a.bin"}}', "index.json names 'a.bin'"),
        ('{"weight_map": {"a": "a.safetensors"}}', "index.json names 'a.safetensors'"),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=message):
        list(stored_weights(meta_model("llama"), tmp_path, []))


def test_a_model_is_identified_by_its_bytes(tmp_path: Path) -> None:
    """They may change without a trace in the file system."""
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    times = weights.stat()
    origin = hub_models.origin_of(str(tmp_path))

    weights.write_bytes(b"two")
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert hub_models.origin_of(str(tmp_path)) != origin
