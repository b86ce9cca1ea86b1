"""Families of transformers whose fine-tuning is tested."""

from types import SimpleNamespace
from typing import Any

FAMILIES = [
    "llama",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "phi3",
    "olmo2",
    "gpt_neox",
    "gpt2",
    "mixtral",
    "qwen3_moe",
]
OVERRIDES = "num_hidden_layers=2,hidden_size=64"


def rows_of(tokenizer: Any, packed: bool = False, new_tokens: list[int] | None = None) -> Any:
    """Return the properties of tokenised rows that `load_model` reads, without any rows."""
    return SimpleNamespace(
        tokenizer=tokenizer,
        is_packed=packed,
        stop_token_ids=(),
        new_tokens=new_tokens or [],
        decided={},
        metadata=SimpleNamespace(dataset="nothing"),
    )
