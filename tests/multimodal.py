"""Tiny checkpoints of multimodal classes, with a tokenizer and a processor, to train on text."""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data.tokenizer import set_template
from tests.models.small_models import byte_tokenizer

_TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
_IMAGES = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 14}
_SIGLIP = {**_IMAGES, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_QWEN = {**_IMAGES, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
_QWEN_TOKENS = {
    "image_token_id": 290,
    "video_token_id": 291,
    "vision_start_token_id": 292,
    "vision_end_token_id": 293,
}
_GEMMA4_TOKENS = {
    "boi_token_id": 290,
    "eoi_token_id": 291,
    "image_token_id": 292,
    "video_token_id": 293,
    "audio_token_id": 294,
    "boa_token_id": 295,
    "eoa_token_index": 296,
}
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
_MULTIMODAL_ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}

# The settings of each class, by the beginning of its name in transformers.
CLASSES: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "text_config": {**_TEXT, "sliding_window": 16},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "boi_token_index": 290,
        "eoi_token_index": 291,
        "image_token_index": 292,
    },
    "Gemma4": {
        "text_config": {
            **_TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 8,
            "num_global_key_value_heads": 2,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        "vision_config": {
            **_SIGLIP,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "position_embedding_size": 16,
        },
        **_GEMMA4_TOKENS,
    },
    "Gemma4Unified": {
        "text_config": {
            **_TEXT,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 8,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
        },
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 16},
        "audio_config": {"audio_embed_dim": 16},
        **_GEMMA4_TOKENS,
    },
    "Qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR_ATTENTION},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "Qwen3_5Moe": {
        "text_config": {**_TEXT, **_LINEAR_ATTENTION, **_EXPERTS},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "Llama4": {
        "text_config": {
            **_TEXT,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 64,
        },
        "vision_config": {
            **_SIGLIP,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "pixel_shuffle_ratio": 0.5,
        },
        "boi_token_index": 290,
        "eoi_token_index": 291,
        "image_token_index": 292,
    },
    "Mistral3": {
        "text_config": {**_TEXT, "model_type": "ministral3"},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": 290,
    },
    "Qwen3VL": {
        "text_config": {**_TEXT, "rope_parameters": _MULTIMODAL_ROPE},
        "vision_config": {
            **_QWEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_QWEN_TOKENS,
    },
}

# The full class of Qwen3.5 ignores some tensors of published files. This is such a tensor.
IGNORED = "mtp.fc.weight"

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def write_checkpoint(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with random weights, a tokenizer with a chat template, and a processor.

    Args:
        name: the class is ``{name}ForConditionalGeneration``; see :data:`CLASSES`.
        folder: where to write it.
        dtype: the dtype of its weights.
    """
    config_class: type[PreTrainedConfig] = getattr(transformers, f"{name}Config")
    model_class: type[PreTrainedModel] = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    model = model_class(config_class(**CLASSES[name]))
    model.to(dtype).save_pretrained(folder)
    if name.startswith("Qwen3_5"):
        weights = folder / "model.safetensors"
        tensors = load_file(weights)
        tensors[IGNORED] = torch.randn(32, 64).to(dtype)
        save_file(tensors, weights, {"format": "pt"})

    tokenizer = byte_tokenizer()
    set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)

    for file in PROCESSOR_FILES:
        (folder / file).write_text(f'{{"of": "{name}"}}')
    return folder
