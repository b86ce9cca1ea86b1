"""Hugging Face causal LMs: from a folder, from the hub, or from their configuration with random weights."""

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import yaml

from llmtrain.config import Config, did_you_mean, flag, require, require_at_least
from llmtrain.console import say
from llmtrain.errors import UserError, hub_said
from llmtrain.models.attention import hasten_transformers
from llmtrain.models.export import ModelFiles
from llmtrain.models.lora import AdapterFiles, LoraConfig, add_lora, is_adapter, with_magnitudes
from llmtrain.models.streaming import Weights, draw, drawn, load_buffers, renamed, stored
from llmtrain.models.summed import is_mixture_of_experts, leaks, probe, summed
from llmtrain.models.untrusted import WEIGHTS_ONLY, local_folder, origin_of, refuse_pickles

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# The sizes of an architecture that is named by its type alone: for a laptop. Each class takes those that it knows.
_SMALL = {
    **{"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}


@dataclass
class ModelConfig(Config):
    """Which model of Hugging Face's is trained, from which weights, and what of it. Each field is a flag."""

    _argument_group_name: ClassVar[str] = "model"
    acts: ClassVar[str] = "model"

    model_name_or_path: str | None = flag(None, "the folder or hub name of a causal LM to start from")
    from_config: str | None = flag(
        None,
        "random weights: a model type such as llama, qwen3 or gpt2 (a small one), or a folder or hub name whose "
        "configuration is taken",
    )
    config_overrides: str | None = flag(None, 'of --from_config: "hidden_size=256,num_hidden_layers=8"')
    block_size: int = flag(512, "tokens of a row")
    attn_implementation: str | None = flag(None, "sdpa, eager, flash_attention_2, ... (default: as the model says)")
    gradient_checkpointing: bool = flag(False, "compute activations again in the backward pass instead of keeping them")
    freeze: str | None = flag(None, "a regular expression: parameters with a matching name are not trained")
    load_in_4bit: bool = flag(False, "hold the frozen weights of a LoRA run in 4 bits (bitsandbytes, on a GPU)")
    trust_remote_code: bool = flag(False, "run code that comes with a model or a tokenizer")

    def __post_init__(self) -> None:
        require_at_least(self, 2, "block_size")
        with _readable_pattern(self.freeze):
            re.compile(self.freeze or "")
        named = self.model_name_or_path or self.from_config
        overrides = self.config_overrides and self.model_name_or_path
        require(not overrides, "--config_overrides is for --from_config: the weights of a model fit its own sizes.")
        require(bool(named), "name a model: --model_name_or_path FOLDER_OR_HUB_NAME, or --from_config llama.")

    @property
    def trust(self) -> dict[str, Any]:
        return {"trust_remote_code": self.trust_remote_code}


class Loaded(NamedTuple):
    model: "PreTrainedModel"
    files: ModelFiles
    start: dict[str, Any]  # what was trained, and from which weights, for a run's identity


def load_model(
    config: ModelConfig,
    lora: LoraConfig,
    tokenizer: "PreTrainedTokenizerFast",
    accelerator: "Accelerator",
    seed: int,
    spread: "Callable[[Accelerator, PreTrainedModel, Weights], None]" = lambda *_: None,
    packed: bool = False,
    bitwise: bool = False,
    trained_on: str = "unknown data",
    ends: tuple[int, ...] = (),
    new_tokens: Sequence[int] = (),
) -> Loaded:
    """The model on its device, with the summed loss for a ``forward``, its vocabulary grown to the tokenizer's, and
    LoRA's matrices in it where they are asked for. Where it is to be sharded it is built without memory, and
    ``spread`` over the processes with its weights as a stream.

    Weights are float32, which mixed precision casts as it goes; frozen ones (a LoRA's base) are held in bfloat16 where
    that is the precision. Raises :class:`UserError` where there is no such model, a weight is missing, the vocabulary
    is too small, ``packed`` documents would see each other, or ``bitwise`` bits would depend on the layout.
    """
    frozen, name = lora.lora_r > 0, config.model_name_or_path
    require(not (frozen and config.freeze), "--freeze is for training in full: LoRA freezes all but its own matrices.")
    model = _load(config, tokenizer, accelerator, seed, frozen)
    plan = copy.deepcopy(model) if accelerator.is_fsdp2 else None  # of what is about to be changed
    planned = dict(model.named_parameters())
    _fit_vocabulary(model, tokenizer, config, new_tokens, plan, seed)
    _freeze(model, config.freeze)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})

    kind = type(model).__name__
    described = {**model.config.to_dict(), "architectures": [kind], "dtype": "float32"}
    described = {key: value for key, value in described.items() if key not in ("_name_or_path", "transformers_version")}
    origin = origin_of(name, config.trust_remote_code) if name else {"random weights": config.from_config}
    files = ModelFiles(described, tokenizer, trained_on, name, _generation(model, tokenizer, ends))
    if frozen:
        adapted = add_lora(model, lora, name, seed, list(new_tokens))
        files = AdapterFiles(**vars(files), adapted=adapted, origin=origin)

    summed(model, config.block_size)
    if plan is not None:
        places = {id(parameter): now for now, parameter in model.named_parameters() if parameter.is_meta}
        names = {before: places[id(parameter)] for before, parameter in planned.items() if id(parameter) in places}
        weights = drawn(plan, seed) if name is None else stored(plan, local_folder(name), plan.dtype)
        spread(accelerator, model, with_magnitudes(model, renamed(weights, names)))
    probe(model)
    if packed and leaks(model):
        raise UserError(f"{kind} lets the documents of a packed row see each other; use --no_packing.")
    if bitwise:
        _check_no_dropout(model)
    _describe(model, kind, config)
    return Loaded(model, files, {"weights": origin, "lora": asdict(lora) if frozen else None, "freeze": config.freeze})


def _load(
    config: ModelConfig, tokenizer: "PreTrainedTokenizerFast", accelerator: "Accelerator", seed: int, frozen: bool
) -> Any:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hasten_transformers()
    empty = accelerator.is_fsdp2
    require(not (config.load_in_4bit and empty), "--load_in_4bit weights cannot be sharded; use a DDP config.")
    if config.model_name_or_path:
        dtype = torch.bfloat16 if frozen and accelerator.mixed_precision == "bf16" else torch.float32
        model: Any = (_planned if empty else _from_pretrained)(config, dtype, frozen)
    else:
        model = _from_config(config, tokenizer, empty)
        if not empty:
            draw(model, seed)
    settings = model.config.get_text_config()
    positions = getattr(settings, "max_position_embeddings", None) or config.block_size
    if positions < config.block_size:
        raise UserError(f"--block_size {config.block_size} is more than this model's {positions} positions; lower it.")
    if is_mixture_of_experts(settings):
        settings.output_router_logits = False
    if config.load_in_4bit or empty:
        return model
    return model.to(accelerator.device)


def _describe(model: Any, kind: str, config: ModelConfig) -> None:
    """Lines of the banner: what is trained, and what is not as it might be thought."""
    every, trained = model.num_parameters(), model.num_parameters(only_trainable=True)
    share = "" if trained == every else f", {trained:,} of them trained ({trained / every:.2%})"
    say("model", f"{kind}: {every:,} parameters{share}")
    settings = model.config.get_text_config()
    if is_mixture_of_experts(settings):
        say("experts", "the router's balancing loss is left out: it is of a micro-batch, not of the global batch")
    if not model.head_is_linear:
        say("memory", "this head does more than multiply: its logits are held whole")
    rope = getattr(settings, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") or config.block_size
    if rope.get("rope_type") in ("longrope", "dynamic") and config.block_size > first:
        say(
            "positions",
            f"scaled by the longest row of a micro-batch beyond {first:,} tokens: layouts agree less closely",
        )


def _generation(model: Any, tokenizer: "PreTrainedTokenizerFast", ends: tuple[int, ...]) -> dict[str, Any]:
    """What the base said of generating, and also ending where answers end."""
    found = getattr(model, "generation_config", None)
    known = {key: value for key, value in (found.to_diff_dict() if found is not None else {}).items() if key[0] != "_"}
    known.pop("transformers_version", None)
    if ends:
        before = known.get("eos_token_id")
        before = before if isinstance(before, list) else [] if before is None else [before]
        known |= {"eos_token_id": sorted({*before, *ends}), "bos_token_id": tokenizer.bos_token_id}
    return known


def _check_no_dropout(model: "PreTrainedModel") -> None:
    """Raise :class:`UserError` where a model draws dropout from a generator: its bits would depend on the layout."""
    settings = model.config.get_text_config().to_dict().items()
    drawn = {key: value for key, value in settings if "drop" in key and isinstance(value, float) and value > 0}
    drawn |= {name: m.p for name, m in model.named_modules() if isinstance(m, torch.nn.Dropout) and m.p > 0}
    if drawn:
        name, value = next(iter(drawn.items()))
        raise UserError(f"--bitwise needs a model without dropout, and {name} is {value}; set it to 0.")


def _check_is_whole(name: str) -> None:
    refuse_pickles(name)
    if is_adapter(Path(name)):
        raise UserError(f"--model_name_or_path {name} is an adapter; first: llmtrain export {name} --merge --to FOLDER")


def _planned(config: ModelConfig, dtype: torch.dtype, frozen: bool) -> "PreTrainedModel":
    """A model as a folder or the hub describes it, without memory for its weights."""
    from transformers import AutoConfig, GenerationConfig

    name = str(config.model_name_or_path)
    _check_is_whole(name)
    try:
        described = AutoConfig.from_pretrained(name, **config.trust)
        require(
            getattr(described, "quantization_config", None) is None,
            f"--model_name_or_path {name} holds quantized weights, which cannot be sharded; use a DDP config.",
        )
        model = _without_memory(described, dtype, config)
        with torch.no_grad():
            load_buffers(model, local_folder(name))
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--model_name_or_path {name}: {hub_said(error)}") from None
    with contextlib.suppress(OSError):  # it has none of its own
        model.generation_config = GenerationConfig.from_pretrained(name)
    return model


def _without_memory(described: Any, dtype: torch.dtype, config: ModelConfig) -> "PreTrainedModel":
    """A model whose parameters are on the meta device; what it computes from its configuration is real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = _make(described, dtype, config)
    model.tie_weights()  # which making them empty one by one has undone
    return model


def _make(described: Any, dtype: torch.dtype, config: ModelConfig) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    options = {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}
    return AutoModelForCausalLM.from_config(described, dtype=dtype, **config.trust, **options)


def _from_pretrained(config: ModelConfig, dtype: torch.dtype, frozen: bool) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM

    name = str(config.model_name_or_path)
    _check_is_whole(name)
    options = {**WEIGHTS_ONLY, **config.trust, "dtype": dtype, "output_loading_info": True}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation
    if config.load_in_4bit:
        options["quantization_config"] = _four_bits(frozen)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options)
    except Exception as error:  # each library has its own ways to refuse a folder
        raise UserError(f"--model_name_or_path {name}: {hub_said(error)}") from None
    model, found = loaded
    absent = sorted(found["missing_keys"]) + [str(key) for key in found["mismatched_keys"]]
    require(not getattr(model, "_hf_peft_config_loaded", False), f"--model_name_or_path {name} is an adapter.")
    if absent:
        raise UserError(f"--model_name_or_path {name}: {absent[0]} is missing or of another shape ({len(absent)} are).")
    return model


def _four_bits(frozen: bool) -> Any:
    from transformers import BitsAndBytesConfig

    require(frozen, "--load_in_4bit holds frozen weights: it needs --lora_r.")
    require(torch.cuda.is_available(), "--load_in_4bit needs a CUDA GPU; leave it out on this machine.")
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def _from_config(config: ModelConfig, tokenizer: "PreTrainedTokenizerFast", empty: bool) -> "PreTrainedModel":
    require(not config.load_in_4bit, "--load_in_4bit needs --model_name_or_path: random weights have nothing to keep.")
    try:
        made = _configuration(config, tokenizer)
        return (_without_memory if empty else _make)(made, torch.float32, config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"--from_config {config.from_config}: {hub_said(error)}") from None


def _configuration(config: ModelConfig, tokenizer: "PreTrainedTokenizerFast") -> "PretrainedConfig":
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    name = str(config.from_config)
    sizes: dict[str, Any] = {"vocab_size": max(tokenizer.get_vocab().values()) + 1}
    sizes |= {f"{part}_token_id": getattr(tokenizer, f"{part}_token_id") for part in ("bos", "eos", "pad")}
    if name in CONFIG_MAPPING:
        plain: Any = AutoConfig.for_model(name)
        make: Any = AutoConfig.for_model
        sizes = {"max_position_embeddings": config.block_size, **_SMALL, **sizes}
        if "qk_rope_head_dim" in plain.to_dict():  # heads of two parts, whose sizes depend on each other
            del sizes["head_dim"]
    else:
        plain = AutoConfig.from_pretrained(name, **config.trust)
        make = functools.partial(AutoConfig.from_pretrained, **config.trust)
    known = {*plain.to_dict(), *plain.attribute_map}
    wanted = _overrides(config.config_overrides)
    for key in wanted.keys() - known:
        raise UserError(f"--config_overrides: {plain.model_type} has no '{key}'{did_you_mean(key, known)}")
    asked = {key: value for key, value in sizes.items() if key in known} | wanted
    made = {plain.attribute_map.get(key, key): value for key, value in asked.items()}  # gpt2 has names of its own
    return make(name, **made)


def _overrides(text: str | None) -> dict[str, Any]:
    """``key=value,...``, the values as YAML has them."""
    try:
        found = yaml.safe_load("{" + (text or "").replace("=", ": ") + "}")
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict) or any(value is None and "null" not in str(text) for value in found.values()):
        raise UserError(f"--config_overrides {text}: write key=value,key=value.")
    return found


def _fit_vocabulary(
    model: Any,
    tokenizer: "PreTrainedTokenizerFast",
    config: ModelConfig,
    new_tokens: Sequence[int],
    plan: Any,
    seed: int,
) -> None:
    """Give rows to tokens that a chat template has added; any other tokenizer must fit as it is. Where there is a
    ``plan``, the matrices that they stand in are made real before."""
    have = model.get_input_embeddings().weight.shape[0]
    needed = max(tokenizer.get_vocab().values()) + 1
    if not set(range(have, needed)) <= set(new_tokens):
        raise UserError(
            f"the tokenizer has {needed:,} tokens and {config.model_name_or_path or config.from_config} a vocabulary "
            f"of {have:,}; use the model's own tokenizer."
        )
    if new_tokens and plan is not None and config.model_name_or_path:
        ends = [plan.get_input_embeddings(), plan.get_output_embeddings()]
        for name, whole in stored(plan, local_folder(config.model_name_or_path), plan.dtype, ends):
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, torch.nn.Parameter(whole))
        model.tie_weights()
    if needed > have:
        torch.manual_seed(seed)
        model.resize_token_embeddings(needed)
        joined = tokenizer.convert_ids_to_tokens(list(range(have, needed)))
        say("tokens", f"{', '.join(joined)} joined the vocabulary: {have:,} -> {needed:,}")


def _freeze(model: "PreTrainedModel", pattern: str | None) -> None:
    if pattern is None:
        return
    matching = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
    every = sum(1 for _ in model.parameters())
    if len(matching) in (0, every):
        example = next(name for name, _ in model.named_parameters())
        share = "no parameter" if not matching else "every parameter"
        raise UserError(f"--freeze '{pattern}' matches {share}; their names are like {example}.")
    for parameter in matching:
        parameter.requires_grad_(False)
    say("frozen", f"{sum(p.numel() for p in matching):,} parameters in {len(matching)} of {every} tensors")


@contextlib.contextmanager
def _readable_pattern(pattern: str | None) -> Iterator[None]:
    try:
        yield
    except re.error as error:
        raise UserError(f"--freeze '{pattern}' is no regular expression: {error}.") from None
