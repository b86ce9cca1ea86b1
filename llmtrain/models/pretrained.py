"""Hugging Face causal LMs: from a folder, from the hub, or from their configuration with random weights."""

import copy
import functools
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import nn

from llmtrain.console import say
from llmtrain.contract import Built, Facts, Weights
from llmtrain.errors import UserError, require
from llmtrain.models.architecture import build_model
from llmtrain.models.config import LoraConfig, ModelConfig, PreferenceConfig
from llmtrain.models.export import ModelFiles
from llmtrain.models.lora import AdapterFiles, add_lora, with_magnitudes
from llmtrain.models.preference import PreferenceLoss, check_answers
from llmtrain.models.streaming import drawn, stored
from llmtrain.models.summed import (
    SummedLoss,
    balance_weight,
    is_mixture_of_experts,
    leaks,
    probe,
    summed,
)
from llmtrain.models.untrusted import local_folder, origin_of

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )


class _Facts(Protocol):
    dataset: str
    pairs: int  # of judged answers that a row has, at most
    shared: bool  # the answers of a pair go on from one copy of their prompt


class Rows(Protocol):
    """The rows that a model is built for."""

    tokenizer: "PreTrainedTokenizerFast"
    new_tokens: list[int]  # that a chat template has added

    @property
    def packed(self) -> bool:
        """A row may hold several documents, which must not see each other."""

    @property
    def ends(self) -> tuple[int, ...]:
        """The tokens at which an answer ends."""

    @property
    def facts(self) -> _Facts:
        """The facts about the data; without a preference its name alone is asked for."""


def load_model(
    config: ModelConfig,
    lora: LoraConfig | None,
    rows: Rows,
    seed: int,
    precision: str,
    bitwise: bool = False,
    preference: PreferenceConfig | None = None,
) -> Built:
    """Build a model with the summed loss for its ``forward``, a vocabulary that fits, and LoRA's matrices if asked for.

    Its parameters are on the meta device, and ``weights`` is the stream of what they begin with. The matrices that
    LoRA brings, and those that new tokens have rows in, are real. Quantized weights alone are loaded at once, and
    ``weights`` is ``None``. Weights are float32, which mixed precision casts as it goes; frozen ones (a LoRA's base)
    are bfloat16 where that is the ``precision``.

    With a ``preference`` its ``forward`` compares answers; to give them scores, it is the family's class for sequence
    classification. Raises :class:`UserError` where there is no such model, the vocabulary is too small, or ``bitwise``
    bits would depend on the layout. The stream raises it where a weight is missing, and ``check`` where packed
    documents would see each other.
    """
    lora, name = lora if lora is not None and lora.lora_r else None, config.model_name_or_path
    scores = preference is not None and preference.loss_type == "reward"
    _check_together(config, lora, scores)
    dtype = torch.bfloat16 if lora and precision == "bf16" else torch.float32
    model = build_model(config, rows.tokenizer, dtype, lora is not None, scores)
    settings = model.config.get_text_config()
    positions = getattr(settings, "max_position_embeddings", None) or config.block_size
    longer = f"--block_size {config.block_size} is more than this model's {positions} positions; lower it."
    require(positions >= config.block_size, longer)
    _weigh_balance(settings, config.router_aux_loss_coef, preference is not None)

    is_meta = model.device.type == "meta"
    plan = copy.deepcopy(model) if is_meta else model  # for it is changed below
    first: Callable[..., Weights] = functools.partial(drawn, plan, seed)
    if name:
        first = functools.partial(
            stored, plan, local_folder(name), dtype, seed=seed if scores else None
        )
    before = {parameter: key for key, parameter in model.named_parameters()}
    if rows.new_tokens and is_meta:  # their rows are made from the values of others
        ends = [plan.get_input_embeddings(), plan.get_output_embeddings()]  # type: ignore[no-untyped-call]
        for key, whole in first([end for end in ends if end is not None]):
            module, _, leaf = key.rpartition(".")
            setattr(model.get_submodule(module), leaf, nn.Parameter(whole))
        model.tie_weights()
    _fit_vocabulary(model, config, rows, seed)
    if config.freeze is not None:
        _freeze(model, config.freeze)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[no-untyped-call]

    origin = (
        origin_of(name, config.trust_remote_code)
        if name
        else {"random weights": config.from_config}
    )
    described = {
        **model.config.to_dict(),
        "architectures": [type(model).__name__],
        "dtype": "float32",
    }
    described = {
        key: value
        for key, value in described.items()
        if key not in ("_name_or_path", "transformers_version")
    }
    files = ModelFiles(
        described, rows.tokenizer, rows.facts.dataset, name, _generation(model, rows)
    )
    if lora is not None and name is not None:
        adapted = add_lora(model, lora, name, seed, rows.new_tokens)
        files = AdapterFiles(**vars(files), adapted=adapted, origin=origin)
    trained = summed(model, config.block_size, PreferenceLoss if preference else SummedLoss)
    if isinstance(trained, PreferenceLoss) and preference is not None:
        trained.preference, trained.slots = preference, 2 * max(rows.facts.pairs, 1)
        trained.packs, trained.shares_prompts = rows.packed, rows.facts.shared
    if bitwise:
        _check_no_dropout(trained)
    names = {before[p]: key for key, p in trained.named_parameters() if p.is_meta and p in before}
    weights = with_magnitudes(
        trained, ((names[key], whole) for key, whole in first() if key in names)
    )
    start: Facts = {
        "weights": origin,
        "lora": asdict(lora) if lora else None,
        "freeze": config.freeze,
    }
    weight = balance_weight(model.config)
    start |= (
        {"preference": asdict(preference)} if preference else {"balance": weight} if weight else {}
    )
    check = functools.partial(_check, trained, rows.packed, config.block_size)
    return Built(trained, files, weights if is_meta else None, start, check)


def _check_together(config: ModelConfig, lora: LoraConfig | None, scores: bool) -> None:
    """Raise :class:`UserError` where settings do not go together."""
    name = config.model_name_or_path
    named = bool(name or config.from_config)
    require(named, "name a model: --model_name_or_path FOLDER_OR_HUB_NAME, or --from_config llama.")
    require(
        not lora or name is not None,
        "--lora_r needs --model_name_or_path: random weights are not worth keeping.",
    )
    require(
        not (lora and config.freeze),
        "--freeze is for training in full: LoRA freezes all but its own matrices.",
    )
    require(
        not (scores and lora), "--loss_type reward trains a head of its own; leave out --lora_r."
    )


def _weigh_balance(settings: "PreTrainedConfig", weight: float | None, compares: bool) -> None:
    """Set the weight of the balancing loss in a model's configuration, where one was asked for."""
    if is_mixture_of_experts(settings):
        settings.output_router_logits = False
        require(
            not (compares and weight),
            "--router_aux_loss_coef: preferences have no balancing loss; leave it out.",
        )
        if weight is not None:
            settings.router_aux_loss_coef = weight
    elif weight is not None:
        raise UserError(
            "--router_aux_loss_coef is for a mixture of experts, and this model is none; leave it out."
        )


def _fit_vocabulary(model: "PreTrainedModel", config: ModelConfig, rows: Rows, seed: int) -> None:
    """Give rows to tokens that a chat template has added; any other tokenizer must fit as it is."""
    have = len(cast(nn.Embedding, model.get_input_embeddings()).weight)
    needed = max(rows.tokenizer.get_vocab().values()) + 1
    if not set(range(have, needed)) <= set(rows.new_tokens):
        raise UserError(
            f"the tokenizer has {needed:,} tokens and {config.model_name_or_path or config.from_config} a vocabulary "
            f"of {have:,}; use the model's own tokenizer."
        )
    if needed > have:
        torch.manual_seed(seed)
        model.resize_token_embeddings(needed)
        new = rows.tokenizer.convert_ids_to_tokens(list(range(have, needed)))
        say("tokens", f"{', '.join(new)} joined the vocabulary: {have:,} -> {needed:,}")


def _freeze(model: "PreTrainedModel", pattern: str) -> None:
    every = dict(model.named_parameters())
    matching = [parameter for name, parameter in every.items() if re.search(pattern, name)]
    if len(matching) in (0, len(every)):
        share = "every parameter" if matching else "no parameter"
        raise UserError(
            f"--freeze '{pattern}' matches {share}; their names are like {next(iter(every))}."
        )
    for parameter in matching:
        parameter.requires_grad_(False)
    say(
        "frozen",
        f"{sum(p.numel() for p in matching):,} parameters in {len(matching)} of {len(every)} tensors",
    )


def _generation(model: "PreTrainedModel", rows: Rows) -> Facts:
    """Return how the base generates; it also ends where answers end."""
    found: GenerationConfig | None = getattr(model, "generation_config", None)
    base: Facts = found.to_diff_dict() if found is not None else {}
    known = {
        key: value for key, value in base.items() if key[0] != "_" and key != "transformers_version"
    }
    if rows.ends:
        before = known.get("eos_token_id")
        before = before if isinstance(before, list) else [] if before is None else [before]
        known |= {
            "eos_token_id": sorted({*before, *rows.ends}),
            "bos_token_id": rows.tokenizer.bos_token_id,
        }
    return known


def _check_no_dropout(model: SummedLoss) -> None:
    """Raise :class:`UserError` where a model draws dropout from a generator: its bits would depend on the layout."""
    settings = model.config.get_text_config().to_dict().items()
    drops = {
        key: value
        for key, value in settings
        if "drop" in key and isinstance(value, float) and value > 0
    }
    drops |= {
        name: m.p for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0
    }
    for name, value in drops.items():
        raise UserError(
            f"--bitwise needs a model without dropout, and {name} is {value}; set it to 0."
        )


def _check(model: SummedLoss, packed: bool, block_size: int) -> None:
    """Try a model that has its weights, and tell in the banner of what people would not expect."""
    probe(model)
    if packed and leaks(model):
        kind = model.own_class.__name__
        raise UserError(
            f"{kind} lets the documents of a packed row see each other; use --no_packing."
        )
    settings = model.config.get_text_config()
    if isinstance(model, PreferenceLoss):
        check_answers(model)
    elif is_mixture_of_experts(settings):
        how = f"times {model.balance:g}, is of the global batch, at the cost of a forward pass more an update"
        say(
            "experts",
            f"the routers' balancing loss, {how}"
            if model.balance
            else "this class has no balancing loss",
        )
    if not model.head_is_linear and model.get_output_embeddings() is not None:  # type: ignore[no-untyped-call]
        say("memory", "this head does more than multiply: its logits are held whole")
    rope: Facts = getattr(settings, "rope_parameters", None) or {}
    first = rope.get("original_max_position_embeddings") or block_size
    if rope.get("rope_type") in ("longrope", "dynamic") and block_size > first:
        scaled = f"scaled by the longest row of a micro-batch beyond {first:,} tokens"
        say("positions", f"{scaled}: layouts agree less closely")
