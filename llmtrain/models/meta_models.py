"""Build Hugging Face models on the meta device, without weights, from their configuration."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from llmtrain.config.unknown_names import did_you_mean
from llmtrain.errors import UserError, as_user_error
from llmtrain.files import read_object
from llmtrain.model_folders import check_model_files, is_adapter
from llmtrain.models.config import MAX_LAYERS, ModelConfig, is_model_type, parse_overrides
from llmtrain.models.hub_models import (
    auto_class,
    causal_lm_classes,
    load_causal_lm,
    local_folder,
    refuse_hub_attention,
    without_weights,
)
from llmtrain.models.reward_family import check_reward_family, check_score_head
from llmtrain.models.weight_loading import stored_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

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


def build_model(
    config: ModelConfig,
    tokenizer: "PreTrainedTokenizerFast | None",
    dtype: torch.dtype,
    *,
    is_frozen: bool,
    is_reward_model: bool,
) -> "PreTrainedModel":
    """Build a Hugging Face model whose parameters are on the meta device.

    Its buffers are real, with initial values. If the weights are quantized, all of the model is
    real, and loaded.

    Args:
        config: which model, and how it is used.
        tokenizer: its size is the vocabulary of a model with random weights. Without it, such a
            model has the vocabulary of its class.
        dtype: of the parameters.
        is_frozen: whether the model's own weights are not trained (LoRA).
        is_reward_model: build the family's class for sequence classification, with one output per
            token instead of a vocabulary.

    Raises:
        UserError: if there is no such model, or if it cannot be used this way.
    """
    from transformers import AutoModelForSequenceClassification, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    name = config.model_name_or_path
    if config.load_in_4bit and name is None:
        raise UserError(
            "--load_in_4bit needs --model_name_or_path: it is for training an adapter of existing "
            "weights."
        )
    options: dict[str, object] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation

    if not is_reward_model:
        check_causal_lm_class(config)
    with as_user_error(_building_problem(config)):
        model_config = model_configuration(config, tokenizer)
        if name is not None:
            is_quantized = getattr(model_config, "quantization_config", None) is not None
            if config.load_in_4bit or is_quantized:
                options["revision"] = config.model_revision
                return _load_quantized(name, config.load_in_4bit, options, is_frozen)

        if is_reward_model:
            check_reward_family(type(model_config))
            model_config.num_labels = 1
            model_class: Any = AutoModelForSequenceClassification
        else:
            model_class = auto_class(model_config)

        build = functools.partial(model_class.from_config, model_config, **options)
        model = without_weights(build)
        if is_reward_model:
            check_score_head(model)
        elif name is not None and _is_tied_by_mistake(model, config):
            model_config.tie_word_embeddings = False
            model = without_weights(build)
        if name is not None:
            with contextlib.suppress(OSError):  # not every model has a generation_config.json
                model.generation_config = GenerationConfig.from_pretrained(
                    name, revision=config.model_revision
                )
    return model


def _is_tied_by_mistake(model: "PreTrainedModel", config: ModelConfig) -> bool:
    """Return whether a model's head is tied to its embeddings, but stored with other values.

    Some multimodal configurations do not say whether they are tied, and the default of their class
    is wrong for older checkpoints, such as Mistral Small 3.1. transformers finds out when it loads
    them. If a configuration does say it, loading the weights reports the contradiction.
    """
    folder = local_folder(str(config.model_name_or_path), config.model_revision)
    if model.config.get_text_config() is model.config:
        return False
    if "tie_word_embeddings" in read_object(folder / "config.json"):
        return False

    sources = model.get_expanded_tied_weights_keys(all_submodels=True)
    stored = {tensor.name: tensor for tensor in stored_tensors(model, folder)}
    for name, source in sources.items():
        if name in stored and source in stored:
            return not torch.equal(stored[name].read(), stored[source].read())
    return False


def check_causal_lm_class(config: ModelConfig) -> None:
    """Check that transformers has a causal LM for a model, without loading it.

    A multimodal model is one if it reads and writes text with a decoder.

    Raises:
        UserError: if it has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config_class = config.configuration_class()
    # A model may bring its own class.
    if config.trust_remote_code or config_class is None:
        return
    # An encoder would read the text, and a decoder answer it.
    is_multimodal_encoder = config_class.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and (
        config_class.is_encoder_decoder
    )
    if causal_lm_classes(config_class.model_type) is None or is_multimodal_encoder:
        raise UserError(
            f"{_flag(config)}: transformers has no causal LM for {config_class.model_type}; name a "
            "model that continues text."
        )


def _flag(config: ModelConfig) -> str:
    """Return the flags that say which model it is, with their values."""
    if config.model_name_or_path:
        return f"--model_name_or_path {config.model_name_or_path}"
    overrides = f" --config_overrides {config.config_overrides}" if config.config_overrides else ""
    return f"--from_config {config.from_config}{overrides}"


def _building_problem(config: ModelConfig) -> str:
    """Return what is wrong if a model cannot be built, and what to do."""
    names_type = config.model_name_or_path is None and is_model_type(str(config.from_config))
    if names_type and not config.config_overrides:
        return f"{_flag(config)} needs --config_overrides, or name a model instead of its type"
    return _flag(config)


def model_configuration(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerFast | None" = None
) -> "PreTrainedConfig":
    """Return the configuration of the model to train.

    It also raises whatever transformers raises.

    Args:
        config: which model.
        tokenizer: its size is the vocabulary of a model with random weights. Without it, such a
            model has the vocabulary of its class.

    Raises:
        UserError: if the model cannot be used.
    """
    from transformers import AutoConfig

    name = str(config.model_name_or_path or config.from_config)
    if config.model_name_or_path is None:
        loaded = configuration_of(config, tokenizer)
    else:
        check_model_files(Path(name))
        if is_adapter(Path(name)):
            raise UserError(
                f"--model_name_or_path {name} is an adapter; merge it into its model first: "
                f"llmtrain export {name} --merge --to FOLDER."
            )
        loaded = AutoConfig.from_pretrained(
            name, revision=config.model_revision, trust_remote_code=config.trust_remote_code
        )
    for part in [loaded, *(getattr(loaded, key, None) for key in loaded.sub_configs)]:
        layers = getattr(part, "num_hidden_layers", 0)
        if isinstance(layers, int) and layers > MAX_LAYERS:
            raise UserError(
                f"the configuration of {name} has {layers:,} layers, and a model can have at most "
                f"{MAX_LAYERS:,}; correct num_hidden_layers."
            )
    if not config.attn_implementation:
        refuse_hub_attention(loaded, name)
    return loaded


def _load_quantized(
    name: str, load_in_4bit: bool, options: dict[str, object], is_frozen: bool
) -> "PreTrainedModel":
    """Load a model with quantized weights.

    Args:
        name: the folder or hub name of the model.
        load_in_4bit: quantize the weights to 4 bits. Otherwise they are stored quantized.
        options: further arguments of ``from_pretrained``.
        is_frozen: whether the model's own weights are not trained.

    Raises:
        UserError: if weights are missing, or 4 bits cannot be used here.
    """
    from transformers import BitsAndBytesConfig

    if load_in_4bit and not is_frozen:
        raise UserError("--load_in_4bit needs --lora_r: weights in 4 bits cannot be trained.")
    if load_in_4bit and not torch.cuda.is_available():
        raise UserError("--load_in_4bit needs a CUDA GPU; leave it out on this machine.")
    if load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    loaded: object = load_causal_lm(name, **options, output_loading_info=True)
    model, info = cast("tuple[PreTrainedModel, dict[str, list[object]]]", loaded)
    missing = sorted(map(str, info["missing_keys"]))
    mismatched = [str(key) for key in info["mismatched_keys"]]
    unusable = [*missing, *mismatched]
    if unusable:
        raise UserError(
            f"--model_name_or_path {name}: {len(unusable)} weights are missing or have another "
            f"shape, such as {unusable[0]}."
        )
    return model


def configuration_of(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerFast | None"
) -> "PreTrainedConfig":
    """Return the configuration of a model with random weights.

    ``--from_config`` names a model type, which gets the sizes of a small model, or a model whose
    configuration is used. The vocabulary is the tokenizer's, if there is one.
    ``--config_overrides`` takes precedence over both. If it changes the width or the number of
    attention heads, the size of a head follows.

    Raises:
        UserError: if ``--config_overrides`` is malformed or has a key that the configuration lacks.
    """
    from transformers import AutoConfig

    name = str(config.from_config)
    is_type = is_model_type(name)
    make: Callable[..., PreTrainedConfig] = AutoConfig.for_model
    if not is_type:
        make = functools.partial(
            AutoConfig.from_pretrained, trust_remote_code=config.trust_remote_code
        )
    original = make(name)
    original_values = original.to_dict()
    has_latent_attention = "qk_rope_head_dim" in original_values

    sizes: dict[str, object] = {}
    if is_type:
        sizes = {"max_position_embeddings": config.row_length, **_SMALL}
        if has_latent_attention:
            # Each attention head has its own key, in two parts with their own sizes.
            del sizes["head_dim"]
            del sizes["num_key_value_heads"]
    if tokenizer is not None:
        sizes["vocab_size"] = max(tokenizer.get_vocab().values()) + 1
        for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
            sizes[token] = getattr(tokenizer, token)

    valid_keys = {*original_values, *original.attribute_map}
    overrides = parse_overrides(config.config_overrides or "")
    for key in overrides.keys() - valid_keys:
        raise UserError(
            f"--config_overrides: {original.model_type} has no '{key}'"
            f"{did_you_mean(key, valid_keys)}"
        )

    values = {key: value for key, value in sizes.items() if key in valid_keys} | overrides
    if "qk_rope_head_dim" in values and "num_key_value_heads" in valid_keys:
        values.setdefault("num_key_value_heads", values["num_attention_heads"])
    is_resized = _changes_heads(overrides, original)
    if is_resized and is_type and not has_latent_attention:
        # The class chooses: Llama divides the width among the heads, and Qwen3 always has 128.
        values.pop("head_dim", None)

    # Some classes, such as GPT-2's, have their own names for the common keys.
    renamed = {original.attribute_map.get(key, key): value for key, value in values.items()}
    changed = make(name, **renamed)
    if is_resized and not is_type and _heads_divide_width(original):
        head_dim = changed.hidden_size // changed.num_attention_heads
        return make(name, **renamed, head_dim=head_dim)
    return changed


def _changes_heads(overrides: dict[str, object], original: "PreTrainedConfig") -> bool:
    """Return whether overrides change the width or the number of heads, but not ``head_dim``."""
    if not hasattr(original, "num_attention_heads"):
        return False

    def own_name(key: str) -> str:
        return str(original.attribute_map.get(key, key))

    changed_keys = {own_name(key) for key in overrides}
    size_keys = {own_name("hidden_size"), own_name("num_attention_heads")}
    return bool(changed_keys & size_keys) and own_name("head_dim") not in changed_keys


def _heads_divide_width(config: "PreTrainedConfig") -> bool:
    """Return whether ``head_dim`` is stored, and is the width divided by the number of heads."""
    head_dim = config.to_dict().get("head_dim")
    if head_dim is None:
        return False
    return bool(head_dim * config.num_attention_heads == config.hidden_size)
