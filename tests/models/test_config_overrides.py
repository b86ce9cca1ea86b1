"""``--config_overrides``: the size of attention heads follows from the width and the heads."""

from pathlib import Path

import pytest
from transformers import AutoConfig

from llmtrain.models.architecture import configuration_of
from llmtrain.models.config import ModelConfig


def head_dim_of(source: str, overrides: str) -> int | None:
    """Return ``head_dim`` of the configuration that ``--from_config`` and overrides make."""
    config = configuration_of(ModelConfig(from_config=source, config_overrides=overrides), None)
    return getattr(config, "head_dim", None)


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        ("llama", "hidden_size=4096,num_attention_heads=32,num_key_value_heads=8", 128),
        ("llama", "hidden_size=256", 64),
        ("llama", "num_attention_heads=8", 16),
        ("mistral", "hidden_size=256,num_attention_heads=4", 64),
        # These classes have heads of a fixed size.
        ("qwen3", "hidden_size=1024,num_attention_heads=16", 128),
        ("gemma2", "hidden_size=2304,num_attention_heads=8", 256),
        # Nothing follows from other keys, or if head_dim is given.
        ("llama", "num_hidden_layers=8", 32),
        ("qwen3", "num_hidden_layers=8", 32),
        ("llama", "hidden_size=256,head_dim=16", 16),
        ("qwen3", "hidden_size=256,head_dim=16", 16),
        # These models divide the width themselves.
        ("mixtral", "hidden_size=256,num_attention_heads=4", None),
        ("gpt2", "n_embd=256", None),
    ],
)
def test_heads_of_a_model_type_are_those_of_its_class(
    family: str, overrides: str, expected: int | None
) -> None:
    assert head_dim_of(family, overrides) == expected


@pytest.mark.parametrize(
    ("stored", "overrides", "expected"),
    [
        ({"hidden_size": 64, "head_dim": 16}, "hidden_size=128", 32),
        ({"hidden_size": 64, "head_dim": 16}, "num_attention_heads=2", 32),
        ({"hidden_size": 64, "head_dim": 16}, "hidden_size=128,head_dim=8", 8),
        ({"hidden_size": 64, "head_dim": 16}, "num_hidden_layers=1", 16),
        ({"hidden_size": 64, "head_dim": 24}, "hidden_size=128", 24),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_of_a_model_follow_only_if_they_divided_its_width(
    family: str, stored: dict[str, int], overrides: str, expected: int, tmp_path: Path
) -> None:
    AutoConfig.for_model(family, num_attention_heads=4, **stored).save_pretrained(tmp_path)
    assert head_dim_of(str(tmp_path), overrides) == expected
