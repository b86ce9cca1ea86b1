"""Load a Hugging Face model for training, from a folder, the hub, or a configuration with random weights."""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.models.answers import AnswerRows
from llmtrain.models.architecture import build_model
from llmtrain.models.causal_lm import CausalLM, make_causal_lm
from llmtrain.models.config import LoraConfig, ModelConfig, PreferenceConfig
from llmtrain.models.expert_objective import ExpertObjective
from llmtrain.models.experts import balance_weight, is_mixture_of_experts
from llmtrain.models.export import ModelFiles
from llmtrain.models.lora import AdapterFiles, add_lora, with_magnitudes
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.models.probe import leaks, probe
from llmtrain.models.untrusted import local_folder, origin_of
from llmtrain.models.weight_loading import random_weights, stored_weights
from llmtrain.types import Batch, Facts, ModelBundle, Objective, Weights

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )


class _Facts(Protocol):
    """What a model needs to know about its data; without a preference loss only the name."""

    dataset: str
    pairs: int  # the largest number of pairs of answers in a row
    shared: bool  # the answers of a pair share one copy of their prompt


class Rows(Protocol):
    """The rows that a model is built for."""

    tokenizer: "PreTrainedTokenizerFast"
    new_tokens: list[int]  # tokens that a chat template has added to a pretrained tokenizer

    @property
    def packed(self) -> bool:
        """True if a row may hold several documents, which must not attend to each other."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which an answer ends."""

    @property
    def facts(self) -> _Facts:
        """Facts about the data."""


def load_model(
    config: ModelConfig,
    lora: LoraConfig | None,
    rows: Rows,
    seed: int,
    precision: str,
    bitwise: bool = False,
    preference: PreferenceConfig | None = None,
) -> ModelBundle:
    """Build the Hugging Face model that is trained, and its objective.

    Its parameters are on the meta device, except for LoRA's matrices and embeddings with rows for new tokens. The
    initial weights of the others are the stream ``weights`` of the result. A quantized model is loaded here, and
    ``weights`` is ``None``.

    Parameters are float32, which mixed precision casts when they are used. The frozen base of a LoRA run is bfloat16 if
    the ``precision`` is bf16.

    Args:
        config: Names the model.
        lora: Train an adapter instead of the model, if its rank is not 0.
        rows: The rows to train on.
        seed: Of random initial weights.
        precision: Accelerate's mixed precision: ``no``, ``fp16`` or ``bf16``.
        bitwise: Refuse a model whose bits would depend on the parallel layout.
        preference: Compare answers instead of predicting tokens. For a reward model this builds the family's class for
            sequence classification.

    Raises:
        UserError: If there is no such model, or it does not fit the rows or the other settings. The stream of weights
            raises it for a missing weight, and ``check`` of the result if packed documents would see each other.
    """
    name = config.model_name_or_path
    if lora is not None and not lora.lora_r:
        lora = None
    scores = preference is not None and preference.loss_type == "reward"
    _check_flags(config, lora, scores)

    dtype = torch.bfloat16 if lora and precision == "bf16" else torch.float32
    model = build_model(config, rows.tokenizer, dtype, frozen=lora is not None, scores=scores)
    settings = model.config.get_text_config()
    _check_positions(settings, config.block_size)
    _set_balance_weight(
        settings, config.router_aux_loss_coef, has_preference=preference is not None
    )

    is_meta = model.device.type == "meta"
    # The initial weights are made for the model as it is now; `model` changes below.
    original = copy.deepcopy(model) if is_meta else model
    initial_weights = _weight_source(original, config, dtype, seed, scores)
    original_names = {parameter: key for key, parameter in model.named_parameters()}
    if rows.new_tokens and is_meta:
        _load_embeddings(model, original, initial_weights)
    _fit_vocabulary(model, config, rows, seed)
    if config.freeze is not None:
        _freeze(model, config.freeze)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]

    origin: Facts = {"random weights": config.from_config}
    if name:
        origin = origin_of(name, config.trust_remote_code)
    files = ModelFiles(
        config=_written_configuration(model),
        tokenizer=rows.tokenizer,
        trained_on=rows.facts.dataset,
        base=name,
        generation=_generation(model, rows),
    )
    if lora is not None and name is not None:
        adapted = add_lora(model, lora, name, seed, rows.new_tokens)
        files = AdapterFiles(**vars(files), adapted=adapted, origin=origin)

    trained = make_causal_lm(
        model,
        row_length=config.block_size,
        shares_prompts=preference is not None and rows.facts.shared,
        gives_scores=scores,
    )
    objective, prepare_batch = _objective(trained, rows, preference)
    if bitwise:
        _check_no_dropout(trained)

    weights: Weights | None = None
    if is_meta:
        weights = _renamed_weights(trained, original_names, initial_weights)
    return ModelBundle(
        model=trained,
        files=files,
        weights=weights,
        start=_start(model, config, lora, preference, origin),
        check=functools.partial(_check, trained, objective, rows.packed, config.block_size),
        objective=objective,
        prepare_batch=prepare_batch,
    )


def _objective(
    model: CausalLM, rows: Rows, preference: PreferenceConfig | None
) -> tuple[Objective, Callable[[Batch], Batch]]:
    """Return what is minimised, and what prepares the micro-batches for it on the host."""
    if preference is not None:
        answer_rows = AnswerRows(
            answers_per_row=2 * max(rows.facts.pairs, 1),
            are_packed=rows.packed,
            share_prompts=rows.facts.shared,
            are_scored=model.gives_scores,
        )

        def prepare_answers(batch: Batch) -> Batch:
            return answer_rows.prepare_batch(batch, on_gpu=model.device.type == "cuda")

        return PreferenceObjective(preference, answer_rows), prepare_answers

    weight = balance_weight(model.config)
    objective = ExpertObjective(weight) if weight else Objective()
    return objective, model.prepare_batch


def _check_flags(config: ModelConfig, lora: LoraConfig | None, scores: bool) -> None:
    """Raise :class:`UserError` if no model is named, or if flags do not go together."""
    name = config.model_name_or_path
    if not name and not config.from_config:
        raise UserError(
            "name a model: --model_name_or_path FOLDER_OR_HUB_NAME, or --from_config llama."
        )
    if lora and name is None:
        raise UserError(
            "--lora_r needs --model_name_or_path: an adapter of random weights would be of no use."
        )
    if lora and config.freeze:
        raise UserError(
            "--freeze does not go with --lora_r: LoRA freezes everything but its own matrices."
        )
    if lora and scores:
        raise UserError(
            "--loss_type reward does not go with --lora_r: a reward model has a new head, which LoRA would not save."
        )


def _check_positions(settings: "PreTrainedConfig", block_size: int) -> None:
    """Raise :class:`UserError` if rows are longer than what the model has positions for."""
    positions = getattr(settings, "max_position_embeddings", None) or block_size
    if block_size > positions:
        raise UserError(
            f"--block_size {block_size} is more than this model's {positions} positions; lower it."
        )


def _set_balance_weight(
    settings: "PreTrainedConfig", weight: float | None, has_preference: bool
) -> None:
    """Set the weight of the balancing loss in the configuration of a mixture of experts."""
    if not is_mixture_of_experts(settings):
        if weight is not None:
            raise UserError(
                "--router_aux_loss_coef is for a mixture of experts, which this model is not; leave it out."
            )
        return
    settings.output_router_logits = False
    if has_preference and weight:
        raise UserError(
            "--router_aux_loss_coef does nothing here: preference losses have no balancing loss; leave it out."
        )
    if weight is not None:
        settings.router_aux_loss_coef = weight


def _weight_source(
    model: "PreTrainedModel", config: ModelConfig, dtype: torch.dtype, seed: int, scores: bool
) -> Callable[..., Weights]:
    """Return a function that yields the initial weights of a model, or of some of its modules."""
    name = config.model_name_or_path
    if not name:
        return functools.partial(random_weights, model, seed)
    # A reward model's head is not stored anywhere, so it is initialised from the seed.
    head_seed = seed if scores else None
    return functools.partial(stored_weights, model, local_folder(name), dtype, head_seed=head_seed)


def _load_embeddings(
    model: "PreTrainedModel", original: "PreTrainedModel", initial_weights: Callable[..., Weights]
) -> None:
    """Give the input and output embeddings their weights: the rows of new tokens are made from those of others."""
    modules = [original.get_input_embeddings(), original.get_output_embeddings()]  # type: ignore[no-untyped-call]
    for key, weight in initial_weights([module for module in modules if module is not None]):
        module_name, _, parameter_name = key.rpartition(".")
        # A clone, because `weight` may be mapped from a file that changes during the run.
        parameter = nn.Parameter(weight.clone())
        setattr(model.get_submodule(module_name), parameter_name, parameter)
    model.tie_weights()


def _renamed_weights(
    trained: CausalLM,
    original_names: dict[nn.Parameter, str],
    initial_weights: Callable[..., Weights],
) -> Weights:
    """Yield the initial weights of the parameters that are still on the meta device, by their present names.

    LoRA has renamed the parameters of the layers that it wraps.
    """
    names = {
        original_names[parameter]: key
        for key, parameter in trained.named_parameters()
        if parameter.is_meta and parameter in original_names
    }
    renamed = ((names[key], weight) for key, weight in initial_weights() if key in names)
    return with_magnitudes(trained, renamed)


def _written_configuration(model: "PreTrainedModel") -> Facts:
    """Return the configuration that is written with the finished model."""
    configuration = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "float32",
    }
    for key in ("_name_or_path", "transformers_version"):
        configuration.pop(key, None)
    return configuration


def _start(
    model: "PreTrainedModel",
    config: ModelConfig,
    lora: LoraConfig | None,
    preference: PreferenceConfig | None,
    origin: Facts,
) -> Facts:
    """Return what identifies the start of a run: the initial weights, and which of them are trained for what."""
    start: Facts = {
        "weights": origin,
        "lora": asdict(lora) if lora else None,
        "freeze": config.freeze,
    }
    balance = balance_weight(model.config)
    if preference:
        start["preference"] = asdict(preference)
    elif balance:
        start["balance"] = balance
    return start


def _fit_vocabulary(model: "PreTrainedModel", config: ModelConfig, rows: Rows, seed: int) -> None:
    """Add embedding rows for tokens that a chat template has added; raises if other tokens have none."""
    size = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    needed = max(rows.tokenizer.get_vocab().values()) + 1
    if not set(range(size, needed)) <= set(rows.new_tokens):
        raise UserError(
            f"the tokenizer has {needed:,} tokens and {config.model_name_or_path or config.from_config} a vocabulary "
            f"of {size:,}; use the model's own tokenizer."
        )
    if needed > size:
        torch.manual_seed(seed)
        model.resize_token_embeddings(needed)
        added = rows.tokenizer.convert_ids_to_tokens(list(range(size, needed)))
        say("tokens", f"{', '.join(added)} joined the vocabulary: {size:,} -> {needed:,}")


def _freeze(model: "PreTrainedModel", pattern: str) -> None:
    """Freeze the parameters whose names contain a match of a regular expression."""
    parameters = dict(model.named_parameters())
    matching = [parameter for name, parameter in parameters.items() if re.search(pattern, name)]
    if len(matching) in (0, len(parameters)):
        share = "every parameter" if matching else "no parameter"
        raise UserError(
            f"--freeze '{pattern}' matches {share}; their names are like {next(iter(parameters))}."
        )
    for parameter in matching:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in matching)
    say("frozen", f"{count:,} parameters in {len(matching)} of {len(parameters)} tensors")


def _generation(model: "PreTrainedModel", rows: Rows) -> Facts:
    """Return the generation settings of the finished model: those of its base, and the tokens that end an answer."""
    base: GenerationConfig | None = getattr(model, "generation_config", None)
    settings: Facts = {}
    if base is not None:
        for key, value in base.to_diff_dict().items():
            if not key.startswith("_") and key != "transformers_version":
                settings[key] = value
    if not rows.ends:
        return settings

    stop_token_ids = settings.get("eos_token_id")
    if stop_token_ids is None:
        stop_token_ids = []
    elif not isinstance(stop_token_ids, list):
        stop_token_ids = [stop_token_ids]
    settings["eos_token_id"] = sorted({*stop_token_ids, *rows.ends})
    settings["bos_token_id"] = rows.tokenizer.bos_token_id
    return settings


def _check_no_dropout(model: CausalLM) -> None:
    """Raise :class:`UserError` if a model has dropout: its random numbers would depend on the parallel layout."""
    rates: dict[str, float] = {}
    for key, value in model.config.get_text_config().to_dict().items():
        if "drop" in key and isinstance(value, float):
            rates[key] = value
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            rates[name] = module.p
    for name, rate in rates.items():
        if rate > 0:
            raise UserError(
                f"--bitwise needs a model without dropout, and {name} is {rate}; set it to 0."
            )


def _check(model: CausalLM, objective: Objective, packed: bool, block_size: int) -> None:
    """Try a model that has its weights, and log what a user might not expect of it.

    Raises:
        UserError: If packed documents, or answers that share a prompt, would see each other.
    """
    probe(model)
    if packed and leaks(model):
        kind = model.own_class.__name__
        raise UserError(
            f"{kind} lets the documents of a packed row see each other; use --no_packing."
        )

    settings = model.config.get_text_config()
    objective.check(model)
    if is_mixture_of_experts(settings) and not isinstance(objective, PreferenceObjective):
        say("experts", _experts_line(objective))
    has_head = model.get_output_embeddings() is not None  # type: ignore[no-untyped-call]
    if has_head and not model.head_is_linear:
        say(
            "memory",
            "this model's head is more than one matrix product, so the logits of a whole micro-batch are in memory",
        )

    rope: Facts = getattr(settings, "rope_parameters", None) or {}
    unscaled = rope.get("original_max_position_embeddings") or block_size
    if rope.get("rope_type") in ("longrope", "dynamic") and block_size > unscaled:
        say(
            "positions",
            f"beyond {unscaled:,} tokens they are scaled by the longest row of a micro-batch, so the losses of "
            "different parallel layouts agree less closely",
        )


def _experts_line(objective: Objective) -> str:
    """Return what the log says about the balancing loss of a mixture of experts."""
    if not isinstance(objective, ExpertObjective) or not objective.weight:
        return "this class has no balancing loss"
    return (
        f"the routers' balancing loss, times {objective.weight:g}, is computed over the global batch, "
        "which takes one more forward pass per step"
    )
