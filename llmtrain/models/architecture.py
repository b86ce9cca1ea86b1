"""Models of Hugging Face's with nothing in them yet: their settings, and what their configurations make."""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import yaml

from llmtrain.config import did_you_mean
from llmtrain.errors import UserError, refused_as, require
from llmtrain.models.config import ModelConfig
from llmtrain.models.lora import is_adapter
from llmtrain.models.streaming import load_buffers
from llmtrain.models.untrusted import load_causal_lm, local_folder, refuse_pickles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# The sizes of an architecture that is named by its type alone: for a laptop. Each class takes those that it knows.
_SMALL = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
    },
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
    },
}


def build_model(
    config: ModelConfig,
    tokenizer: "PreTrainedTokenizerFast",
    dtype: torch.dtype,
    frozen: bool,
    scores: bool,
) -> "PreTrainedModel":
    """Build a model whose parameters are on the meta device; what it computes from its configuration is real."""
    from accelerate import init_empty_weights
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        GenerationConfig,
    )
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name, trust = config.model_name_or_path, {"trust_remote_code": config.trust_remote_code}
    options = {"dtype": dtype, **trust}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    useless = config.load_in_4bit and name is None
    require(
        not useless,
        "--load_in_4bit needs --model_name_or_path: random weights have nothing to keep.",
    )
    asked = f"--model_name_or_path {name}" if name else f"--from_config {config.from_config}"
    with refused_as(asked):
        if name is None:
            described = configuration_of(config, tokenizer)
        else:
            refuse_pickles(name)
            merge = f"llmtrain export {name} --merge --to FOLDER"
            require(not is_adapter(Path(name)), f"{asked} is an adapter; first: {merge}")
            described = AutoConfig.from_pretrained(name, **trust)
            if config.load_in_4bit or getattr(described, "quantization_config", None) is not None:
                return _quantized(config, options, frozen)
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        if scores:
            described.num_labels, described.pad_token_id = (
                1,
                tokenizer.pad_token_id or tokenizer.eos_token_id,
            )
            unknown = f"transformers has no sequence classification for {described.model_type}"
            require(type(described) in auto._model_mapping, f"--loss_type reward: {unknown}.")
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto.from_config(described, **options)  # type: ignore[no-untyped-call]
        kind = type(model).__name__
        require(
            not scores or hasattr(model, "score"),
            f"--loss_type reward: {kind} has no head named score.",
        )
        model.tie_weights()  # which making them empty one by one has undone
        if name is not None:
            load_buffers(model.train(False), local_folder(name))
            with contextlib.suppress(OSError):  # it has none of its own
                model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _quantized(config: ModelConfig, options: dict[str, object], frozen: bool) -> "PreTrainedModel":
    from transformers import BitsAndBytesConfig

    name = str(config.model_name_or_path)
    if config.load_in_4bit:
        require(frozen, "--load_in_4bit holds frozen weights: it needs --lora_r.")
        require(
            torch.cuda.is_available(),
            "--load_in_4bit needs a CUDA GPU; leave it out on this machine.",
        )
        settings: dict[str, object] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
        options["quantization_config"] = BitsAndBytesConfig(**settings)  # type: ignore[no-untyped-call]
    loaded: object = load_causal_lm(name, **options, output_loading_info=True)
    model, found = cast("tuple[PreTrainedModel, dict[str, list[object]]]", loaded)
    absent = [*sorted(map(str, found["missing_keys"])), *map(str, found["mismatched_keys"])]
    if absent:
        raise UserError(
            f"--model_name_or_path {name}: {absent[0]} is missing or of another shape ({len(absent)} are)."
        )
    return model


def configuration_of(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerFast"
) -> "PreTrainedConfig":
    """Return the configuration of random weights: the sizes of the tokenizer, small ones, and the overrides."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = str(config.from_config)
    sizes: dict[str, object] = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    sizes |= {
        f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")
    }
    make: Callable[..., PreTrainedConfig] = AutoConfig.for_model
    if name not in CONFIG_MAPPING:
        make = functools.partial(
            AutoConfig.from_pretrained, trust_remote_code=config.trust_remote_code
        )
    plain = make(name)
    if name in CONFIG_MAPPING:
        sizes = {"max_position_embeddings": config.block_size, **_SMALL, **sizes}
        if (
            "qk_rope_head_dim" in plain.to_dict()
        ):  # latent attention: keys of two parts, one for each head
            del sizes["head_dim"], sizes["num_key_value_heads"]
    known = {*plain.to_dict(), *plain.attribute_map}
    try:
        wanted = yaml.safe_load("{" + (config.config_overrides or "").replace("=", ": ") + "}")
    except yaml.YAMLError:
        wanted = None
    if not isinstance(wanted, dict) or (
        None in wanted.values() and "null" not in str(config.config_overrides)
    ):
        raise UserError(f"--config_overrides {config.config_overrides}: write key=value,key=value.")
    for key in wanted.keys() - known:
        raise UserError(
            f"--config_overrides: {plain.model_type} has no '{key}'{did_you_mean(key, known)}"
        )
    asked = {key: value for key, value in sizes.items() if key in known} | wanted
    if "qk_rope_head_dim" in asked and "num_key_value_heads" in known:
        asked.setdefault("num_key_value_heads", asked["num_attention_heads"])
    return make(
        name, **{plain.attribute_map.get(key, key): value for key, value in asked.items()}
    )  # gpt2 has its own
