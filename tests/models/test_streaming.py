"""Models without memory are given, a piece at a time, what they would have had at once."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.errors import UserError
from llmtrain.models.export import ModelFiles
from llmtrain.models.streaming import drawn, load_buffers, pieces, stored
from llmtrain.parallel.mesh import fill
from tests.families import FAMILIES

SIZES = {
    **{
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "head_dim": 16,
    },
    **{
        "num_key_value_heads": 2,
        "vocab_size": 120,
        "max_position_embeddings": 64,
        "num_experts": 4,
    },
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
}


def config_of(family: str, **more: Any) -> Any:
    plain = AutoConfig.for_model(family)
    known = {*plain.to_dict(), *plain.attribute_map}
    sizes = {
        plain.attribute_map.get(key, key): value
        for key, value in (SIZES | more).items()
        if key in known
    }
    return AutoConfig.for_model(family, **sizes)


def real(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(family, **more), dtype=torch.float32)


def plan(family: str, **more: Any) -> Any:
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config_of(family, **more), dtype=torch.float32)
    model.tie_weights()
    return model


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_are_drawn_and_read_as_the_whole_is(family: str, tmp_path: Path) -> None:
    whole, empty = real(family), plan(family)
    fill(dict(whole.named_parameters()), drawn(whole, 5))
    expected = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    assert same({name: tensor.clone() for name, tensor in drawn(empty, 5)}, expected)
    assert not same({name: tensor.clone() for name, tensor in drawn(empty, 6)}, expected)
    whole.save_pretrained(tmp_path, max_shard_size="60KB")
    assert same(
        {name: tensor.clone() for name, tensor in stored(empty, tmp_path, torch.float32)}, expected
    )
    assert all(parameter.is_meta for parameter in empty.parameters())  # nothing is left behind
    assert len(pieces(empty)) <= 6
    assert same(dict(empty.named_buffers()), dict(whole.named_buffers()))


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_distributed_as_transformers_would_have_them(family: str) -> None:
    theirs, ours = real(family), real(family)
    fill(dict(ours.named_parameters()), drawn(ours, 5))
    for (name, one), other in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if one.numel() > 2000:
            assert float(one.detach().std()) == pytest.approx(
                float(other.detach().std()), rel=0.1
            ), name
            assert not torch.equal(one, other) or not one.detach().std(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_one_tensor_at_a_time_is_what_is_published_at_once(family: str) -> None:
    model = real(family)
    files: Any = ModelFiles({"model_type": family}, None)
    publish = files.publishing(model)
    apart = {
        key: part
        for name, whole in files.tensors(model).items()
        for key, part in publish(name, whole).items()
    }
    assert same(apart, files.exported(model))


def test_buffers_that_are_published_with_a_model_are_read(tmp_path: Path) -> None:
    more = {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "q_lora_rank": 16,
    }
    more |= {
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
        "head_dim": 8,
    }
    whole, empty = real("deepseek_v3", **more), plan("deepseek_v3", **more)
    biases = {name: buffer for name, buffer in whole.named_buffers() if "bias" in name}
    assert biases
    for buffer in biases.values():
        buffer.copy_(torch.arange(4.0))
    whole.save_pretrained(tmp_path)
    load_buffers(empty, tmp_path)
    assert same({name: buffer for name, buffer in empty.named_buffers() if name in biases}, biases)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor
        for name, tensor in load_file(file).items()
        if "e_score_correction_bias" not in name
    }
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(UserError, match=r"e_score_correction_bias is missing"):
        load_buffers(plan("deepseek_v3", **more), tmp_path)


def change(folder: Path, by: dict[str, torch.Tensor | None]) -> None:
    tensors: dict[str, Any] = load_file(folder / "model.safetensors") | by
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("by", "why"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight is missing \(1 are\)"),
        ({"model.norm.weight": torch.ones(3)}, r"model\.norm\.weight is of another shape"),
        (
            {"lm_head.weight": torch.ones(120, 64)},
            r"lm_head\.weight differs from model\.embed_tokens\.weight",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(by: dict, why: str, tmp_path: Path) -> None:
    real("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    change(tmp_path, by)
    with pytest.raises(UserError, match=why):
        list(stored(plan("llama", tie_word_embeddings=True), tmp_path, torch.float32))


def test_an_index_names_files_of_its_own_folder_and_no_others(tmp_path: Path) -> None:
    real("llama").save_pretrained(tmp_path / "model", max_shard_size="60KB")
    index = tmp_path / "model" / "model.safetensors.index.json"
    elsewhere = {
        name: f"../{file}" for name, file in json.loads(index.read_text())["weight_map"].items()
    }
    index.write_text(json.dumps({"weight_map": elsewhere}))
    assert (
        len([*stored(plan("llama"), tmp_path / "model", torch.float32)]) > 10
    )  # those of the folder were read
    for content, why in (
        ("{", "is no index of weights"),
        ('{"weight_map": {"a": "gone"}}', "gone: No such file"),
    ):
        index.write_text(content)
        with pytest.raises(UserError, match=why):
            list(stored(plan("llama"), tmp_path / "model", torch.float32))
