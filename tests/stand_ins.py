"""Small models and data sets that stand in for those of the hub."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM

from llmtrain.data.chat_template import set_template
from llmtrain.data.tokenizer import as_pretrained, train_tokenizer

_SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}


def write_model(model_type: str, folder: Path, **sizes: Any) -> None:
    """Write a small model with random weights, and a tokenizer with a chat template.

    Args:
        model_type: the type of the model in transformers.
        folder: where to write it.
        sizes: how its config differs from that of other small models.
    """
    config = AutoConfig.for_model(model_type, **{**_SMALL, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer = as_pretrained(train_tokenizer("byte", [], lambda: iter(())), 2048)
    set_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)


def write_splits(folder: Path, **splits: list[dict[str, Any]]) -> None:
    """Write the records of splits as a data set in the layout of the hub."""
    (folder / "data").mkdir(parents=True)
    for split, records in splits.items():
        rows = Dataset.from_list(records)
        rows.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
