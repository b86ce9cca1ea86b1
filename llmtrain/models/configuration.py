"""The configuration of a model of transformers: its type, its sizes, and what it may ask for."""

import contextlib
import functools
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import yaml

from llmtrain.config.parser import did_you_mean
from llmtrain.errors import UserError
from llmtrain.model_folders import vocabulary_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

# A slip of the finger would otherwise build layers until the memory is full.
MAX_LAYERS = 10_000

# Sizes of a model that only its type names, for a laptop. Each configuration takes the ones it has.
_SMALL = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rotary_dim": 32,
    # mixture of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
}


def is_model_type(name: str) -> bool:
    """Return whether ``--from_config`` names a model type, not a folder or a model of the hub.

    A model type is one even if there is such a folder.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return name in CONFIG_MAPPING


def new_configuration(
    name: str,
    *,
    overrides: dict[str, object],
    row_length: int,
    tokenizer: "PreTrainedTokenizerFast | None" = None,
    trust_remote_code: bool = False,
) -> "PreTrainedConfig":
    """Return the configuration of a model with random weights.

    It also raises whatever transformers raises.

    Args:
        name: a model type, which gets the sizes of a small model, or a model whose configuration
            is used.
        overrides: values that take precedence. If they change the width or the number of attention
            heads, the size of a head follows.
        row_length: the positions of a model of a type.
        tokenizer: its size is the vocabulary. Without it, the vocabulary is that of the class.
        trust_remote_code: run code that comes with the model.

    Raises:
        UserError: if the configuration does not have a key of ``overrides``.
    """
    from transformers import AutoConfig

    is_type = is_model_type(name)
    make: Callable[..., PreTrainedConfig] = AutoConfig.for_model
    if not is_type:
        make = functools.partial(AutoConfig.from_pretrained, trust_remote_code=trust_remote_code)
    original = make(name)
    original_values = original.to_dict()
    has_latent_attention = "qk_rope_head_dim" in original_values

    valid_keys = {*original_values, *original.attribute_map}
    unknown = sorted(overrides.keys() - valid_keys)
    if unknown:
        names = ", ".join(f"'{key}'" for key in unknown)
        raise UserError(
            f"--config_overrides: {original.model_type} has no {names}; correct or remove what its "
            f"configuration does not have{did_you_mean(unknown[0], valid_keys)}"
        )

    sizes: dict[str, object] = {}
    if is_type:
        sizes = {"max_position_embeddings": row_length, **_SMALL}
        if has_latent_attention:
            # Each attention head has its own key, in two parts with their own sizes.
            del sizes["head_dim"]
            sizes["num_key_value_heads"] = overrides.get(
                "num_attention_heads", sizes["num_attention_heads"]
            )
    if tokenizer is not None:
        sizes["vocab_size"] = vocabulary_of(tokenizer)
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            sizes[token] = getattr(tokenizer, token)
    values = {key: value for key, value in sizes.items() if key in valid_keys} | overrides

    # Some classes, such as GPT-2's, have their own names for the common keys.
    renamed = {original.attribute_map.get(key, key): value for key, value in values.items()}
    changed_keys = {original.attribute_map.get(key, key) for key in overrides}
    changes_heads = changed_keys & {
        original.attribute_map.get(key, key) for key in ("hidden_size", "num_attention_heads")
    }
    has_heads = hasattr(original, "num_attention_heads")
    if not has_heads or not changes_heads or "head_dim" in changed_keys:
        return make(name, **renamed)
    if is_type and not has_latent_attention:
        # The class chooses: Llama divides the width among the heads, and Qwen3 always has 128.
        renamed.pop("head_dim", None)
    changed = make(name, **renamed)
    heads = original.num_attention_heads
    divides_width = original_values.get("head_dim") == original.hidden_size / heads
    if divides_width and not is_type:
        renamed["head_dim"] = changed.hidden_size // changed.num_attention_heads
    return make(name, **renamed)


def refuse_hub_attention(config: "PreTrainedConfig", name: str) -> None:
    """Raise :class:`UserError` if a model's configuration asks for a compiled kernel of the hub.

    Args:
        config: the configuration of the model, or of a part of it.
        name: the folder or hub name of the model.
    """
    attention = str(config._attn_implementation)
    if "/" in attention:
        raise UserError(
            f"{name}: its config.json asks for the attention {attention}, a program on the hub; "
            "choose another one with --attn_implementation sdpa, or remove it from config.json."
        )
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            refuse_hub_attention(part, name)


class _OverridesLoader(yaml.SafeLoader):
    """Reads numbers such as 1e-6, which are text to YAML 1.1, as Python does."""


_OverridesLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    [*"-+.0123456789"],
)


def parse_overrides(text: str) -> dict[str, Any]:
    """Parse ``--config_overrides``: ``key=value,key=value`` with YAML values.

    Raises:
        UserError: if the text has another form.
    """
    values: object = None
    with contextlib.suppress(yaml.YAMLError):
        values = yaml.load("{" + text.replace("=", ": ") + "}", Loader=_OverridesLoader)
    has_empty_value = re.search(r"=\s*(,|$)", text)
    if not isinstance(values, dict) or len(values) != text.count("=") or has_empty_value:
        raise UserError(f"--config_overrides {text}: write key=value,key=value, each key once.")
    return values
