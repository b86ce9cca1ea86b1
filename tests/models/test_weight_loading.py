"""Weights that are streamed part by part are those of a model that is built at once."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from llmtrain.errors import UserError
from llmtrain.models.base_tensors import BaseTensors, stored_base_tensors
from llmtrain.models.config import ModelConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.pretrained import load_model
from llmtrain.models.weight_loading import (
    load_buffers,
    model_parts,
    random_weights,
    stored_weights,
)
from tests.families import FAMILIES
from tests.models.some_rows import SomeRows

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


@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
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
    block_weights = read_all(random_weights(model, seed=5, modules=[block]))
    assert block_weights
    check_equal(block_weights, {name: weights[name] for name in block_weights})


@pytest.mark.parametrize("family", FAMILIES)
def test_no_two_modules_begin_with_the_same_numbers(family: str) -> None:
    """Torch's CPU generator reads 32 bits of a seed, so the numbers themselves are compared."""
    for seeds in ([5, 6], [5, 5 + 2**32]):
        names: dict[str, str] = {}
        for seed in seeds:
            for name, tensor in random_weights(meta_model(family), seed):
                if tensor.std() > 0:
                    # The first rows of an embedding may be zeros, and widths differ by a factor.
                    numbers = tensor.flatten()[-64:].double()
                    beginning = (numbers / numbers.norm()).round(decimals=4).tolist()
                    twin = names.setdefault(str(beginning), f"{name}, seed {seed}")
                    assert twin == f"{name}, seed {seed}"


# Families with parameters that only the `__init__` of their class sets.
SET_BY_INIT = ["apertus", "data2vec-text", "openai-gpt"]
# One class asks for the names of modules, and in one a module sets the weights of its children.
SET_BY_NAME_OR_PARENT = ["xlstm", "modernbert-decoder"]


@pytest.mark.parametrize("family", SET_BY_INIT + SET_BY_NAME_OR_PARENT)
def test_what_only_the_class_sets_is_as_in_transformers(family: str) -> None:
    expected = parameters_of(real_model(family))
    weights = read_all(random_weights(meta_model(family), seed=5))

    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        if tensor.numel() == 1 or tensor.std() == 0:
            torch.testing.assert_close(weights[name], tensor, msg=name)
        else:
            assert float(weights[name].std()) == pytest.approx(float(tensor.std()), rel=0.2), name


def test_a_parameter_that_nothing_sets_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = meta_model("llama")
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda model, module: None)

    # `nn.Linear` and `nn.Embedding` set their weights, and Llama's norm sets its own to 1.
    weights = read_all(random_weights(model, seed=5))
    assert not any(tensor.isnan().any() for tensor in weights.values())

    def without_values(norm: Any, size: int, eps: float = 1e-6) -> None:
        torch.nn.Module.__init__(norm)
        norm.weight = torch.nn.Parameter(torch.empty(size))

    monkeypatch.setattr(type(model.model.norm), "__init__", without_values)
    with pytest.raises(UserError, match=r"LlamaForCausalLM gives .*norm.weight no initial values"):
        read_all(random_weights(model, seed=5))


# --- stored weights


# Stored tensors of the last two are split or joined along their first dimension, which FSDP shards.
@pytest.mark.parametrize("family", [*FAMILIES, "hrm_text", "kimi_linear"])
def test_stored_weights_are_those_of_from_pretrained(family: str, tmp_path: Path) -> None:
    real_model(family).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60KB")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = read_all(stored_weights(meta_model(family), tmp_path, torch.float32))
    check_equal(weights, parameters_of(loaded))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_loaded_in_few_parts_and_keeps_its_buffers(family: str, tmp_path: Path) -> None:
    real = real_model(family)
    real.save_pretrained(tmp_path, max_shard_size="60KB")
    meta = meta_model(family)
    assert len(model_parts(meta)) <= 6

    check_equal(read_all(stored_weights(meta, tmp_path, torch.float32)), parameters_of(real))

    assert all(parameter.is_meta for parameter in meta.parameters())
    check_equal(dict(meta.named_buffers()), dict(real.named_buffers()))


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_can_be_published_one_by_one(family: str) -> None:
    model = real_model(family)
    files: Any = ModelFiles({"model_type": family}, None)
    publish = files.tensor_converter(model)
    published: dict[str, Tensor] = {}
    for name, tensor in files.tensors(model).items():
        published |= publish(name, tensor)
    check_equal(published, files.export_tensors(model))


@pytest.fixture
def deepseek_folder(tmp_path: Path) -> Path:
    """Write a model with buffers that are stored: each router has a bias of 0, 1, 2, 3."""
    model = real_model("deepseek_v3", **DEEPSEEK_SIZES)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.copy_(torch.arange(4.0))
    model.save_pretrained(tmp_path)
    return tmp_path


def test_stored_buffers_are_loaded(deepseek_folder: Path) -> None:
    meta = meta_model("deepseek_v3", **DEEPSEEK_SIZES)
    load_buffers(meta, deepseek_folder)
    biases = [buffer for name, buffer in meta.named_buffers() if "bias" in name]
    assert biases
    assert all(torch.equal(bias, torch.arange(4.0)) for bias in biases)


def test_a_missing_buffer_is_named(deepseek_folder: Path) -> None:
    names = load_file(deepseek_folder / "model.safetensors").keys()
    biases = [name for name in names if "e_score_correction" in name]
    replace_tensors(deepseek_folder, dict.fromkeys(biases))
    with pytest.raises(UserError, match=r"e_score_correction_bias is missing"):
        load_buffers(meta_model("deepseek_v3", **DEEPSEEK_SIZES), deepseek_folder)


# --- tensors that the model does not have


def base_tensors_of(folder: Path) -> BaseTensors | None:
    return stored_base_tensors(meta_model("llama"), [], str(folder), "main", is_reward_model=False)


def test_buffers_that_are_computed_today_are_not_copied_from_old_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real_model("llama").save_pretrained(tmp_path)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    replace_tensors(tmp_path, {buffer: torch.ones(4)})
    capsys.readouterr()
    assert base_tensors_of(tmp_path) is None
    assert capsys.readouterr().out == ""


def test_the_scales_of_quantized_weights_are_not_copied(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real_model("llama").save_pretrained(tmp_path)
    replace_tensors(tmp_path, {"model.layers.0.mlp.scales": torch.ones(4)})
    base_tensors = base_tensors_of(tmp_path)
    assert base_tensors is not None
    assert base_tensors.names == {"model.layers.0.mlp.scales"}

    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert base_tensors_of(tmp_path) is None
    assert capsys.readouterr().out.startswith("left out  model.layers.0.mlp.scales: ")


@pytest.mark.parametrize(
    ("unknown", "modules"),
    [
        pytest.param(
            ["model.visual.patch.weight", "model.visual.norm"], "model.visual", id="one module"
        ),
        pytest.param(
            ["mtp.fc.weight", "model.visual.norm"], "model.visual and mtp", id="two modules"
        ),
        pytest.param(
            ["a.x", "b.x", "model.layers.0.extra", "model.z"], "a and 3 more", id="many modules"
        ),
    ],
)
def test_stored_tensors_that_the_model_lacks_are_named_in_one_line(
    unknown: list[str], modules: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real_model("llama").save_pretrained(tmp_path)
    replace_tensors(tmp_path, {name: torch.ones(5, 100) for name in unknown})
    capsys.readouterr()

    stored_base_tensors(meta_model("llama"), [], str(tmp_path), "main", is_reward_model=True)

    assert capsys.readouterr().out == (
        f"left out  {modules}: LlamaForCausalLM does not have these {500 * len(unknown):,} "
        "parameters, nor will the finished model\n"
    )


def test_nothing_is_printed_if_the_model_has_all_stored_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    real_model("llama").save_pretrained(tmp_path)
    capsys.readouterr()
    stored_base_tensors(meta_model("llama"), [], str(tmp_path), "main", is_reward_model=True)
    assert capsys.readouterr().out == ""


# --- folders that do not fit, or change


@pytest.mark.parametrize(
    ("replacements", "message"),
    [
        pytest.param(
            {"model.norm.weight": None},
            r"model\.norm\.weight is missing \(1 in all\)",
            id="missing",
        ),
        pytest.param(
            {"model.norm.weight": torch.ones(3)},
            r"model\.norm\.weight has the shape \[3\], but the model needs \[64\]",
            id="shape",
        ),
        pytest.param(
            {"lm_head.weight": torch.ones(120, 64)},
            r"lm_head\.weight differs from model\.embed_tokens\.weight",
            id="tied",
        ),
    ],
)
def test_a_folder_that_does_not_fit_the_model_is_refused(
    replacements: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    real_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    replace_tensors(tmp_path, replacements)
    meta = meta_model("llama", tie_word_embeddings=True)
    with pytest.raises(UserError, match=message):
        list(stored_weights(meta, tmp_path, torch.float32))
    assert all(parameter.is_meta for parameter in meta.parameters())


def test_loaded_embeddings_do_not_change_with_their_file(tmp_path: Path) -> None:
    real_model("llama").save_pretrained(tmp_path)
    vocabulary = {f"word{number}": number for number in range(120)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocabulary)))
    # For a new token, embeddings are loaded at once. This one has a row already.
    rows = SomeRows(tokenizer, new_tokens=[119])
    config = ModelConfig(model_name_or_path=str(tmp_path), max_length=32)
    model = load_model(config, lora=None, rows=rows, seed=0, precision="no").model
    embedding = model.get_input_embeddings().weight.detach()
    before = embedding.clone()

    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))

    assert torch.equal(embedding, before)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param("{", "index.json is no JSON object", id="not JSON"),
        pytest.param("[]", "index.json is no JSON object", id="no object"),
        pytest.param("{}", "index.json names None, which is no", id="empty"),
        pytest.param('{"weight_map": {"a": 3}}', "index.json names 3, which is no", id="number"),
        pytest.param(
            '{"weight_map": {"a": "../a.safetensors"}}',
            "index.json names '../a.safetensors', which is no",
            id="outside",
        ),
        pytest.param('{"weight_map": {"a": "a.bin"}}', "index.json names 'a.bin'", id="pickle"),
        pytest.param(
            '{"weight_map": {"a": "a.safetensors"}}', "a.safetensors: No such", id="missing file"
        ),
    ],
)
def test_an_index_that_cannot_be_used_is_refused(
    content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=message):
        list(stored_weights(meta_model("llama"), tmp_path, torch.float32))
