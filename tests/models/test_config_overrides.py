"""``--config_overrides``: the size of attention heads follows from the width and the heads."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.configuration import parse_overrides


def head_dim_of(source: str, overrides: str) -> int | None:
    """Return ``head_dim`` of the configuration that ``--from_config`` and overrides make."""
    config = ModelConfig(from_config=source, config_overrides=overrides).configuration()
    return getattr(config, "head_dim", None)


@pytest.mark.parametrize(
    ("family", "overrides", "expected"),
    [
        # The width divided by the heads.
        ("llama", "hidden_size=4096,num_attention_heads=32,num_key_value_heads=8", 128),
        ("llama", "hidden_size=256", 64),
        # These classes have heads of a fixed size.
        ("qwen3", "hidden_size=1024,num_attention_heads=16", 128),
        ("gemma2", "hidden_size=2304,num_attention_heads=8", 256),
        # Nothing follows from other keys, or if head_dim is given.
        ("llama", "hidden_size=256,head_dim=16", 16),
        # These models divide the width themselves.
        ("mixtral", "hidden_size=256,num_attention_heads=4", None),
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
        ({"hidden_size": 64, "head_dim": 24}, "hidden_size=128", 24),
    ],
)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_of_a_model_follow_only_if_they_divided_its_width(
    family: str, stored: dict[str, int], overrides: str, expected: int, tmp_path: Path
) -> None:
    AutoConfig.for_model(family, num_attention_heads=4, **stored).save_pretrained(tmp_path)
    assert head_dim_of(str(tmp_path), overrides) == expected


@pytest.mark.parametrize(
    "overrides",
    [
        "hidden_size=[8",
        "pad_token_id=null,hidden_size=",
        "n=8,hidden_size=1,n=2",
        "hidden_size",
        "1",
    ],
)
def test_overrides_of_another_form_are_refused_before_the_data_are_read(overrides: str) -> None:
    with pytest.raises(UserError, match="write key=value,key=value"):
        ModelConfig(from_config="llama", config_overrides=overrides)


def test_from_config_may_be_a_folder_unless_it_is_the_name_of_a_model_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tiny", "llama", "run/model"):
        AutoConfig.for_model("llama", max_position_embeddings=48).save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)

    assert ModelConfig(from_config="tiny").max_positions() == 48
    assert ModelConfig(from_config="run").from_config == "run/model"
    assert ModelConfig(from_config="llama").max_positions() is None


def test_a_configuration_with_a_billion_layers_is_an_error_at_once(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llava").to_dict()
    config["text_config"]["num_hidden_layers"] = 10**9
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in ("model_name_or_path", "from_config"):
        with pytest.raises(UserError, match="num_hidden_layers"):
            ModelConfig(**{source: str(tmp_path)}).configuration()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1e-6", 1e-6),  # which YAML takes for text
        ("0.1", 0.1),
        ("'1e-6'", "1e-6"),
        ("null", None),
        ("[a,b]", ["a", "b"]),
        ("{rope_theta: .5e-3}", {"rope_theta": 0.5e-3}),
    ],
)
def test_values_are_those_of_yaml_with_the_numbers_of_python(value: str, expected: Any) -> None:
    assert parse_overrides(f"key={value},n=3") == {"key": expected, "n": 3}
