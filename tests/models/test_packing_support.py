"""Rows are packed if the class is on a list, which is made with small models of each class."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llmtrain.models.config import ModelConfig
from llmtrain.models.packing_support import PackingSupport, packing_support
from tests.models.miniatures import miniatures
from tests.models.packing_trials import build_on_meta_device


def support_of(family: str, **settings: Any) -> PackingSupport:
    support = packing_support(ModelConfig(from_config=family, **settings))
    assert support is not None
    return support


CLASS_NAMES = {  # by model type
    "llama": "LlamaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "musicgen": "MusicgenForCausalLM",
}


# --- the rule


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma3_text"])
def test_a_class_on_the_list_packs_and_shares_prompts(family: str) -> None:
    expected = PackingSupport(CLASS_NAMES[family], packs=True, shares_prompts=True)
    assert support_of(family) == expected


def test_a_class_that_leaks_is_not_packed() -> None:
    assert support_of("gpt_oss") == PackingSupport("GptOssForCausalLM")


def test_a_class_that_is_not_on_the_list_is_not_packed() -> None:
    expected = PackingSupport(CLASS_NAMES["musicgen"], problem="the class was not tried")
    assert support_of("musicgen") == expected


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
def test_another_attention_packs_but_shares_no_prompts(implementation: str) -> None:
    support = support_of("llama", attn_implementation=implementation)
    assert support.packs
    assert not support.shares_prompts


@pytest.mark.parametrize(
    ("chunk", "max_length", "shares"),
    [
        pytest.param(64, 64, True, id="a chunk for each row"),
        pytest.param(64, 65, False, id="longer rows"),
        pytest.param(64, "auto", False, id="rows of any length"),
        pytest.param(None, "auto", True, id="no chunks"),
    ],
)
def test_prompts_are_not_shared_if_attention_has_chunks_shorter_than_the_row(
    chunk: int | None, max_length: Any, shares: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("llama4_text")
    config.attention_chunk_size = chunk
    config.save_pretrained(tmp_path)

    support = packing_support(ModelConfig(str(tmp_path), max_length=max_length))
    assert support == PackingSupport("Llama4ForCausalLM", packs=True, shares_prompts=shares)


# --- the small models of the trials


PUBLISHED = {
    "llama": {"num_key_value_heads": 8},
    "gemma3_text": {},
    "llama4_text": {"num_hidden_layers": 8},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp"] * 4 + ["full_attention"] * 2},
    "jamba": {},
    "qwen3_next": {},
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_a_miniature_is_small_and_has_layers_of_every_kind(family: str) -> None:
    config = AutoConfig.for_model(family, **PUBLISHED[family])
    published = build_on_meta_device(config)
    miniature = build_on_meta_device(next(miniatures(config, build_on_meta_device)))
    assert sum(weight.numel() for weight in miniature.parameters()) < 100e6
    assert classes_of_modules(miniature) == classes_of_modules(published)
    assert layer_types_of(miniature.config) == layer_types_of(config)


def classes_of_modules(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} - {"Dropout"}


def layer_types_of(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or [])


def test_the_sliding_window_of_a_miniature_is_shorter_than_its_rows() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert next(miniatures(config, build_on_meta_device)).sliding_window == 32
