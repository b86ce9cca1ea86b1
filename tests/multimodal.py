"""Tiny checkpoints of multimodal classes, with the tokenizer of a base model, for training on text."""

from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from llmtrain.data import tokenizer as tok
from llmtrain.data.chat_template import set_template

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
_LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10_000.0}

# The settings of each class, by the beginning of its name in transformers.
CLASSES = {
    "Gemma3": {
        "text_config": {**_TEXT, "sliding_window": 16},
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
        "boi_token_index": 290,
        "eoi_token_index": 291,
        "image_token_index": 292,
    },
    "Qwen3_5": {
        "text_config": {**_TEXT, **_LINEAR_ATTENTION},
        "vision_config": {**_QWEN, "num_position_embeddings": 16},
        **_QWEN_TOKENS,
    },
    "Mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_SIGLIP, "model_type": "pixtral", "head_dim": 16},
        "image_token_index": 290,
    },
    "Qwen3VL": {
        "text_config": {**_TEXT, "rope_parameters": _SECTIONS},
        "vision_config": {
            **_QWEN,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        **_QWEN_TOKENS,
    },
}


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write a model of class ``{name}ForConditionalGeneration`` whose tokenizer has a template."""
    config_class: type[PreTrainedConfig] = getattr(transformers, f"{name}Config")
    model_class: type[PreTrainedModel] = getattr(transformers, f"{name}ForConditionalGeneration")
    torch.manual_seed(0)
    model_class(config_class(**CLASSES[name])).save_pretrained(folder)
    words = tok.as_pretrained(tok.train_tokenizer("byte", [], lambda: iter(())), 64)
    set_template(words, "chatml")
    words.save_pretrained(folder)
    return folder
