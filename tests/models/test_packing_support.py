"""Whether rows are packed follows from a list of classes, which small models are tried for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from llmtrain.models.config import ModelConfig
from llmtrain.models.packing_support import PackingSupport, packing_support
from tests.models.miniatures import miniatures
from tests.models.packing_trials import build_on_meta_device, types_of_classes


def support_of(family: str, **settings: Any) -> PackingSupport:
    support = packing_support(ModelConfig(from_config=family, **settings))
    assert support is not None
    return support


NAMES = {model_type: name for name, types in types_of_classes().items() for model_type in types}


# --- the rule


@pytest.mark.parametrize("family", ["llama", "lfm2", "gemma3_text"])
def test_a_class_on_the_list_packs_and_shares_prompts(family: str) -> None:
    class_name = NAMES[family]
    assert support_of(family) == PackingSupport(class_name, packs=True, shares_prompts=True)


def test_a_class_that_leaks_is_not_packed() -> None:
    assert support_of("gpt_oss") == PackingSupport("GptOssForCausalLM")


@pytest.mark.parametrize("family", ["musicgen"])
def test_a_class_that_is_not_on_the_list_is_not_packed(family: str) -> None:
    assert support_of(family) == PackingSupport(NAMES[family], problem="the class was not tried")


@pytest.mark.parametrize("implementation", ["eager", "flash_attention_2"])
def test_another_attention_packs_but_shares_no_prompts(implementation: str) -> None:
    support = support_of("llama", attn_implementation=implementation)
    assert (support.packs, support.shares_prompts) == (True, False)


@pytest.mark.parametrize(
    ("chunk", "max_length", "shares"),
    [(64, 64, True), (64, 65, False), (64, "auto", False), ("null", "auto", True)],
)
def test_prompts_are_not_shared_if_attention_has_chunks_shorter_than_the_row(
    chunk: int | str, max_length: Any, shares: bool, tmp_path: Path
) -> None:
    config = AutoConfig.for_model("llama4_text")
    config.attention_chunk_size = None if chunk == "null" else chunk
    config.save_pretrained(tmp_path)
    support = packing_support(ModelConfig(str(tmp_path), max_length=max_length))
    assert support == PackingSupport("Llama4ForCausalLM", packs=True, shares_prompts=shares)


# --- the small models that the list is made with


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
    large = build_on_meta_device(config)
    small = build_on_meta_device(next(miniatures(config, build_on_meta_device)))
    assert sum(p.numel() for p in small.parameters()) < 100e6
    assert kinds_of(small) == kinds_of(large)
    types = getattr(config, "layer_types", None) or []
    assert {*(getattr(small.config, "layer_types", None) or [])} == {*types}


def kinds_of(model: torch.nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()} - {"Dropout"}


def test_the_sliding_window_of_a_miniature_is_shorter_than_its_rows() -> None:
    config = AutoConfig.for_model("mistral", sliding_window=4096)
    assert next(miniatures(config, build_on_meta_device)).sliding_window == 32
