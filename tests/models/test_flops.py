"""The operations of a step are counted as torch counts them."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmtrain.models.causal_lm import _attention_flops, make_causal_lm

LENGTH = 64
SIZES = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
}
TWO_OF_FOUR = ["conv", "full_attention", "conv", "full_attention"]
# Gemma 4 can also embed the tokens for each layer.
WITHOUT_PER_LAYER = {"hidden_size_per_layer_input": 0, "enable_moe_block": False}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "num_key_value_heads": 4}
LATENT_SIZES = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 40}


def build(family: str, **values: Any) -> Any:
    """Return a model with random weights and eager attention, whose products torch counts."""
    config = AutoConfig.for_model(family, **SIZES | values)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def flops_by_torch(model: Any) -> int:
    """Count the operations of matrix products in a forward and a backward pass over one row."""
    ids = torch.zeros(1, LENGTH, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False).logits.sum().backward()
    # Torch counts the backward pass of a convolution as if each channel met all others.
    counts = counter.get_flop_counts()["Global"]
    return sum(count for operation, count in counts.items() if "conv" not in str(operation))


@pytest.mark.parametrize(
    ("family", "values"),
    [
        pytest.param("llama", {}, id="heads that divide the hidden size"),
        pytest.param("qwen3", {"head_dim": 64}, id="large heads"),
        pytest.param("llama", {"tie_word_embeddings": True}, id="the embedding is the head"),
        pytest.param("lfm2", {"layer_types": TWO_OF_FOUR}, id="two layers without attention"),
        pytest.param("minicpm3", LATENT | LATENT_SIZES, id="latent attention"),
        pytest.param(
            "gemma4_text",
            {"head_dim": 24, "global_head_dim": 48, "sliding_window": LENGTH, **WITHOUT_PER_LAYER},
            id="heads of two sizes",
        ),
        pytest.param("gemma3_text", {"head_dim": 48, "sliding_window": LENGTH}, id="windows"),
    ],
)
def test_flops_are_those_that_torch_counts(family: str, values: dict[str, Any]) -> None:
    model = build(family, **values)
    expected = flops_by_torch(model)

    flops = make_causal_lm(model, row_length=LENGTH).flops_per_token() * LENGTH

    assert flops == pytest.approx(expected, rel=0.01)


# These have several texts, no number of layers, or no configuration without arguments.
WITHOUT_ONE_TEXT = {"blt", "gemma4_assistant", "musicgen", "musicgen_melody"}


@pytest.mark.parametrize("family", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} - WITHOUT_ONE_TEXT))
def test_the_attention_of_every_configuration_is_counted(family: str) -> None:
    config = AutoConfig.for_model(family).get_text_config()

    assert _attention_flops(config) >= 0
