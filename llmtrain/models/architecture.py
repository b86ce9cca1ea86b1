"""Models of Hugging Face's with nothing in them yet: their settings, and what their configurations make."""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
import yaml

from llmtrain.config import Config, did_you_mean, flag, require, require_at_least
from llmtrain.errors import UserError, hub_said
from llmtrain.models.lora import is_adapter
from llmtrain.models.streaming import load_buffers
from llmtrain.models.untrusted import load_causal_lm, local_folder, refuse_pickles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# The sizes of an architecture that is named by its type alone: for a laptop. Each class takes those that it knows.
_SMALL = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    **{"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32, "q_lora_rank": 64, "kv_lora_rank": 32},
}


@dataclass
class ModelConfig(Config):
    """The model of Hugging Face's that is trained, and the weights that it starts from. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "model"
    acts: ClassVar[str] = "model"

    model_name_or_path: str | None = flag(None, "the folder or hub name of a causal LM to start from")
    from_config: str | None = flag(
        None,
        "random weights: a model type such as llama, qwen3 or gpt2 (a small one), or a folder or hub name whose "
        "configuration is taken",
    )
    config_overrides: str | None = flag(None, 'of --from_config: "hidden_size=256,num_hidden_layers=8"')
    block_size: int = flag(512, "tokens of a row", acts="model data")
    attn_implementation: str | None = flag(
        None, "sdpa, eager, flash_attention_2, ... (default: the model's)", acts="pass"
    )
    gradient_checkpointing: bool = flag(False, "keep no activations: compute them again in backward", acts="layout")
    router_aux_loss_coef: float | None = flag(
        None, "weight of the routers' balancing loss in a mixture of experts (default: the model's); 0: none"
    )
    freeze: str | None = flag(None, "a regular expression: parameters with a matching name are not trained")
    load_in_4bit: bool = flag(False, "hold the frozen weights of a LoRA run in 4 bits (bitsandbytes, on a GPU)")
    trust_remote_code: bool = flag(False, "run code that comes with a model or a tokenizer")

    def __post_init__(self) -> None:
        require_at_least(self, 2, "block_size")
        require((self.router_aux_loss_coef or 0) >= 0, "--router_aux_loss_coef must be at least 0.")
        try:
            re.compile(self.freeze or "")
        except re.error as error:
            raise UserError(f"--freeze '{self.freeze}' is no regular expression: {error}.") from None
        overrides = self.config_overrides and self.model_name_or_path
        require(not overrides, "--config_overrides is for --from_config: the weights of a model fit its own sizes.")


def build_model(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerFast", dtype: torch.dtype, frozen: bool, scores: bool = False
) -> "PreTrainedModel":
    """Build a model whose parameters are on the meta device; what it computes from its configuration is real."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    name, trust = config.model_name_or_path, {"trust_remote_code": config.trust_remote_code}
    options = {"dtype": dtype, **trust}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    needs = "--load_in_4bit needs --model_name_or_path: random weights have nothing to keep."
    require(name is not None or not config.load_in_4bit, needs)
    try:
        if name is None:
            described = configuration_of(config, tokenizer)
        else:
            refuse_pickles(name)
            merge = f"llmtrain export {name} --merge --to FOLDER"
            require(not is_adapter(Path(name)), f"--model_name_or_path {name} is an adapter; first: {merge}")
            described = AutoConfig.from_pretrained(name, **trust)
            if config.load_in_4bit or getattr(described, "quantization_config", None) is not None:
                return _quantized(config, options, frozen)
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        if scores:
            described.num_labels, described.pad_token_id = 1, tokenizer.pad_token_id or tokenizer.eos_token_id
            known = type(described) in auto._model_mapping
            require(
                known, f"--loss_type reward: transformers has no sequence classification for {described.model_type}."
            )
        with init_empty_weights(include_buffers=False):
            model: PreTrainedModel = auto.from_config(described, **options)  # type: ignore[no-untyped-call]
        if scores and not hasattr(model, "score"):
            raise UserError(f"--loss_type reward: {type(model).__name__} has no head named score.")
        model.tie_weights()  # which making them empty one by one has undone
        if name is not None:
            load_buffers(model.train(False), local_folder(name))
            with contextlib.suppress(OSError):  # it has none of its own
                model.generation_config = GenerationConfig.from_pretrained(name)
    except UserError:
        raise
    except Exception as error:  # each library has its own ways to refuse a folder
        asked = "--model_name_or_path" if name else "--from_config"
        raise UserError(f"{asked} {name or config.from_config}: {hub_said(error)}") from None
    return model


def _quantized(config: ModelConfig, options: dict[str, object], frozen: bool) -> "PreTrainedModel":
    from transformers import BitsAndBytesConfig

    name = str(config.model_name_or_path)
    if config.load_in_4bit:
        require(frozen, "--load_in_4bit holds frozen weights: it needs --lora_r.")
        require(torch.cuda.is_available(), "--load_in_4bit needs a CUDA GPU; leave it out on this machine.")
        settings: dict[str, object] = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
        settings |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": torch.bfloat16}
        options["quantization_config"] = BitsAndBytesConfig(**settings)  # type: ignore[no-untyped-call]
    loaded: object = load_causal_lm(name, **options, output_loading_info=True)
    model, found = cast("tuple[PreTrainedModel, dict[str, list[object]]]", loaded)
    absent = [*sorted(map(str, found["missing_keys"])), *map(str, found["mismatched_keys"])]
    if absent:
        raise UserError(f"--model_name_or_path {name}: {absent[0]} is missing or of another shape ({len(absent)} are).")
    return model


def configuration_of(config: ModelConfig, tokenizer: "PreTrainedTokenizerFast") -> "PreTrainedConfig":
    """Return the configuration of random weights: the sizes of the tokenizer, small ones, and the overrides."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = str(config.from_config)
    sizes: dict[str, object] = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    sizes |= {f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    make: Callable[..., PreTrainedConfig] = AutoConfig.for_model
    if name not in CONFIG_MAPPING:
        make = functools.partial(AutoConfig.from_pretrained, trust_remote_code=config.trust_remote_code)
    plain = make(name)
    if name in CONFIG_MAPPING:
        sizes = {"max_position_embeddings": config.block_size, **_SMALL, **sizes}
        if "qk_rope_head_dim" in plain.to_dict():  # latent attention: keys of two parts, one for each head
            del sizes["head_dim"], sizes["num_key_value_heads"]
    known = {*plain.to_dict(), *plain.attribute_map}
    try:
        wanted = yaml.safe_load("{" + (config.config_overrides or "").replace("=", ": ") + "}")
    except yaml.YAMLError:
        wanted = None
    if not isinstance(wanted, dict) or (None in wanted.values() and "null" not in str(config.config_overrides)):
        raise UserError(f"--config_overrides {config.config_overrides}: write key=value,key=value.")
    for key in wanted.keys() - known:
        raise UserError(f"--config_overrides: {plain.model_type} has no '{key}'{did_you_mean(key, known)}")
    asked = {key: value for key, value in sizes.items() if key in known} | wanted
    if "qk_rope_head_dim" in asked and "num_key_value_heads" in known:
        asked.setdefault("num_key_value_heads", asked["num_attention_heads"])
    return make(name, **{plain.attribute_map.get(key, key): value for key, value in asked.items()})  # gpt2 has its own
