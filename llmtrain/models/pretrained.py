"""Build the Hugging Face model that is trained, with everything that belongs to it.

It comes from a folder, from the hub, or from a configuration with random weights.
"""

import copy
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError
from llmtrain.files import JsonObject
from llmtrain.interfaces.batches import Batch
from llmtrain.interfaces.model import ModelBundle, Weights
from llmtrain.interfaces.objective import Objective
from llmtrain.model_folders import as_token_ids, vocabulary_of
from llmtrain.models.adapters import (
    adapter_origin,
    check_base,
    load_lora,
    tokens_of_adapter,
    trains_whole_modules,
)
from llmtrain.models.causal_lm import CausalLM, make_causal_lm
from llmtrain.models.config import ModelConfig
from llmtrain.models.export import ModelFiles, config_values
from llmtrain.models.hub_models import (
    StoredDtypes,
    local_folder,
    origin_of,
    stored_dtypes,
    with_dtype,
    with_padding_token,
)
from llmtrain.models.lora import AdapterFiles, add_lora, with_adapter_weights
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.model_classes import build_model
from llmtrain.models.preference import PreferenceConfig
from llmtrain.models.preference_objective import PreferenceObjective
from llmtrain.models.probe import check_model
from llmtrain.models.text_tower import (
    BaseTensors,
    outside_text_tower,
    remove_outside_text,
    stored_base_tensors,
)
from llmtrain.models.weight_loading import InitialWeights
from llmtrain.planning import current_plan
from llmtrain.seeds import seed_of

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )


class _Metadata(Protocol):
    """The metadata of rows that a model needs.

    The numbers of pairs are used with a preference loss, and the vocabulary without a tokenizer.
    """

    dataset: str
    vocabulary: int  # the largest token id, plus 1
    pairs: int  # the largest number of preference pairs in a row
    shared: bool  # whether the two answers of a pair share one copy of their prompt


class PreparedRows(Protocol):
    """The rows that a model is built for."""

    tokenizer: "PreTrainedTokenizerFast | None"
    new_tokens: list[int]  # tokens that a chat template has added to a pretrained tokenizer
    decided: Mapping[str, Any]  # values for flags that the user has left open, by their names

    @property
    def column_names(self) -> list[str]:
        """The names of the columns of the rows."""

    @property
    def is_packed(self) -> bool:
        """Whether a row may hold several documents, which must not attend to each other."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens at which an answer ends."""

    @property
    def metadata(self) -> _Metadata:
        """Metadata of the rows."""


def load_model(
    config: ModelConfig,
    lora: LoraConfig | None,
    rows: PreparedRows,
    seed: int,
    precision: str,
    bitwise: bool = False,
    preference: PreferenceConfig | None = None,
) -> ModelBundle:
    """Build the Hugging Face model that is trained, and its objective.

    One object is the model from the beginning to the end, and it changes in place, in this order:
    transformers builds it without weights; modules outside the text are removed; its vocabulary
    grows to that of the rows; ``--freeze`` and LoRA choose what is trained; at last its class gets
    the methods by which it is trained (:mod:`llmtrain.models.causal_lm`). Then ``lt.place`` puts it
    on its devices and fills in the weights, and the probe tries it.

    Its parameters are on the meta device, except for LoRA's matrices and embeddings with rows for
    new tokens. The initial weights of the others are the stream ``weights`` of the result. A
    quantized model is loaded here, and ``weights`` is ``None``.

    Parameters are float32, and mixed precision casts them when they are used. The frozen base of a
    LoRA run may keep the dtype of its files (:func:`_frozen_dtype`).

    Args:
        config: which model, and how it is used.
        lora: train an adapter instead of the model, if its rank is not 0.
        rows: the rows to train on.
        seed: of random initial weights.
        precision: Accelerate's mixed precision: ``no``, ``fp16`` or ``bf16``.
        bitwise: reject a model whose bits would depend on the parallel layout.
        preference: compare answers instead of predicting tokens. A reward model is an instance of
            the family's class for sequence classification.

    Raises:
        UserError: if there is no such model, or if it does not fit the rows or the other settings.
            The stream of weights raises it if a weight is missing. ``check`` of the result raises
            it if packed documents would attend to each other.
    """
    config = config.with_values(rows.decided)
    config.resolve_runs()
    _check_flags(config, lora)
    if lora is not None and not lora.lora_r:
        lora = None
    is_reward_model = preference is not None and preference.is_reward_model
    adapter = config.adapter
    base = config.of_base()
    name = base.model_name_or_path
    is_adapted = lora is not None or adapter is not None

    folder: Path | None = None
    origin: JsonObject = {"random weights": base.from_config}
    dtype = torch.float32
    if name is not None:
        folder = local_folder(name, base.model_revision)
        origin = origin_of(name, base.model_revision)
        if is_adapted:
            trains_modules = is_reward_model or trains_whole_modules(lora, adapter)
            dtype = _frozen_dtype(folder, precision, trains_modules)
    model = build_model(base, rows.tokenizer, dtype, is_reward_model=is_reward_model)

    # The modules that text does not pass through are not loaded.
    outside_text = outside_text_tower(model)
    base_tensors: BaseTensors | None = None
    if name is not None and not is_adapted:
        base_tensors = stored_base_tensors(
            model, outside_text, name, origin, is_reward_model=is_reward_model
        )
    remove_outside_text(model, outside_text)

    # The names of published tensors, and the initial weights, are those of the model as it is now.
    architecture: PreTrainedModel | None = None
    initial_weights: InitialWeights | None = None
    if model.device.type == "meta":
        # A copy of its own, because a model that has loaded weights remembers their names.
        architecture = copy.deepcopy(model)
        # A plan reads no weights.
        weights_folder = folder if current_plan() is None else None
        initial_weights = InitialWeights(model, weights_folder, seed)

    new_tokens = _fit_vocabulary(model, base, rows, adapter, initial_weights, seed)
    if base.freeze is not None:
        _freeze(model, base.freeze)

    files = _model_files(model, name, rows, preference)
    if adapter is not None:
        check_base(adapter, str(name), origin)
        adapted = load_lora(model, adapter, new_tokens, is_reward_model)
        files = AdapterFiles(**vars(files), adapted=adapted, origin=origin)
    elif lora is not None:
        adapted = add_lora(model, lora, seed, new_tokens, is_reward_model)
        files = AdapterFiles(**vars(files), adapted=adapted, origin=origin)
    else:
        files = replace(
            files,
            architecture=architecture,
            base_tensors=base_tensors,
            base_dtypes=_base_dtypes(folder, base_tensors),
        )

    trained = make_causal_lm(
        model,
        row_length=int(base.max_length),  # no longer auto: the rows decided on it
        shares_prompts=preference is not None and rows.metadata.shared,
        gives_scores=is_reward_model,
    )
    if bitwise:
        _check_no_dropout(trained)
    trained.recompute_blocks(enabled=bool(base.gradient_checkpointing))
    objective, prepare_batch = _objective(trained, rows, preference)

    return ModelBundle(
        model=trained,
        files=files,
        weights=_weights_of(trained, initial_weights, is_adapted=is_adapted),
        start=_start(base, lora, adapter, origin, [*outside_text]),
        check=functools.partial(check_model, trained, is_packed=rows.is_packed),
        objective=objective,
        prepare_batch=prepare_batch,
    )


def _weights_of(
    trained: CausalLM, initial_weights: InitialWeights | None, is_adapted: bool
) -> Weights | None:
    """Return the weights of the parameters on the meta device; ``None`` for a quantized model."""
    if initial_weights is None:
        return None
    weights = initial_weights.for_parameters_of(trained)
    return with_adapter_weights(trained, weights) if is_adapted else weights


def _base_dtypes(folder: Path | None, base_tensors: BaseTensors | None) -> StoredDtypes | None:
    """Return the dtypes of a base, if there is one, with those of tensors that are not trained.

    These may be in another folder, if the run starts from a checkpoint.
    """
    if folder is None:
        return None
    dtypes = stored_dtypes(folder)
    if base_tensors is None:
        return dtypes
    untrained = stored_dtypes(base_tensors.folder()).by_name
    return replace(dtypes, by_name={**untrained, **dtypes.by_name})


def _frozen_dtype(folder: Path, precision: str, trains_modules: bool) -> torch.dtype:
    """Return the dtype of a frozen base, which is that of its files if it can be trained with.

    Args:
        folder: the base.
        precision: Accelerate's mixed precision.
        trains_modules: whether modules beside it are trained in full, in float32.
    """
    if precision == "bf16":
        return torch.bfloat16
    if precision == "no" and trains_modules:
        return torch.float32  # without autocast, a product takes no inputs of two dtypes
    stored = stored_dtypes(folder).main
    if stored == torch.float16 and precision != "fp16":
        # Its activations and their gradients would be float16, too. Small gradients become 0 there
        # without a loss scale, which only the precision fp16 has.
        return torch.float32
    return stored


def _objective(
    model: CausalLM, rows: PreparedRows, preference: PreferenceConfig | None
) -> tuple[Objective, Callable[[Batch], Batch]]:
    """Return the objective, and a function that prepares its micro-batches on the host."""
    if preference is not None:
        objective = PreferenceObjective(
            preference,
            answers_per_row=2 * max(rows.metadata.pairs, 1),
            is_packed=rows.is_packed,
            share_prompts=rows.metadata.shared,
        )

        # The model is not on its device yet.
        return objective, lambda batch: objective.prepare_batch(
            batch, on_gpu=model.device.type == "cuda"
        )

    return Objective(), model.prepare_batch


def _check_flags(config: ModelConfig, lora: LoraConfig | None) -> None:
    """Raise :class:`UserError` if no model is named, or if flags contradict each other."""
    name = config.model_name_or_path
    if not name and not config.from_config:
        raise UserError(
            "name a model: --model_name_or_path FOLDER_OR_HUB_NAME, or --from_config llama."
        )
    has_lora = lora is not None and lora.lora_r > 0
    if config.continue_adapter and has_lora:
        raise UserError(
            "--continue_adapter cannot be combined with --lora_r: the adapter has its own rank and "
            "modules; leave one of them out."
        )
    if has_lora and name is None and current_plan() is None:
        raise UserError(
            "--lora_r needs --model_name_or_path: an adapter of random weights would be of no use."
        )
    is_adapted = has_lora or config.continue_adapter
    if is_adapted and config.freeze:
        flag = "--lora_r" if has_lora else "--continue_adapter"
        raise UserError(
            f"--freeze cannot be combined with {flag}: everything but the adapter is frozen; leave "
            "one of them out."
        )
    if config.load_in_4bit and not is_adapted:
        raise UserError("--load_in_4bit needs --lora_r: weights in 4 bits cannot be trained.")


def _model_files(
    model: "PreTrainedModel",
    name: str | None,
    rows: PreparedRows,
    preference: PreferenceConfig | None,
) -> ModelFiles:
    """Return the files of the finished model's folder.

    Args:
        model: the model that is trained. The padding token of a reward model is set.
        name: the folder or hub name of the model that it starts from.
        rows: the rows to train on.
        preference: the preference loss, if there is one.

    Raises:
        UserError: if a reward model has no tokenizer.
    """
    tokenizer = rows.tokenizer
    if preference is not None and preference.is_reward_model:
        if tokenizer is None:
            raise UserError("--loss_type reward needs a tokenizer: answers end at its tokens.")
        text_config = model.config.get_text_config()
        tokenizer = with_padding_token(tokenizer, rows.stop_token_ids, text_config.vocab_size)
        text_config.pad_token_id = tokenizer.pad_token_id

    config = with_dtype(config_values(model.config), torch.float32)
    config["architectures"] = [type(model).__name__]
    for key in ("_name_or_path", "transformers_version"):
        config.pop(key, None)

    # The generation settings of the base, with the tokens that end an answer as stop tokens.
    base: GenerationConfig | None = getattr(model, "generation_config", None)
    generation: JsonObject = {}
    if base is not None:
        for key, value in base.to_diff_dict().items():
            if not key.startswith("_") and key != "transformers_version":
                generation[key] = value
    if rows.stop_token_ids and rows.tokenizer is not None:
        stop_token_ids = as_token_ids(generation.get("eos_token_id"))
        generation["eos_token_id"] = sorted({*stop_token_ids, *rows.stop_token_ids})
        generation["bos_token_id"] = rows.tokenizer.bos_token_id

    return ModelFiles(
        config=config,
        tokenizer=tokenizer,
        trained_on=rows.metadata.dataset,
        base=name,
        loss=preference.loss_name if preference is not None else "",
        generation=generation,
    )


def _start(
    config: ModelConfig,
    lora: LoraConfig | None,
    adapter: Path | None,
    origin: JsonObject,
    outside_text: list[str],
) -> JsonObject:
    """Return where the run starts, for its fingerprint: initial weights, and which are trained."""
    if adapter is not None:
        origin = {**origin, "adapter": adapter_origin(adapter)}
    start: JsonObject = {
        "weights": origin,
        "lora": asdict(lora) if lora else None,
        "freeze": config.freeze,
    }
    if "/" in (config.attn_implementation or ""):
        start["attention"] = config.attn_implementation  # it names a commit
    if outside_text:
        start["outside_text"] = outside_text
    return start


def _fit_vocabulary(
    model: "PreTrainedModel",
    config: ModelConfig,
    rows: PreparedRows,
    adapter: Path | None,
    initial_weights: InitialWeights | None,
    seed: int,
) -> list[int]:
    """Add embeddings for tokens that a chat template, or an adapter, has added.

    The embeddings of a model on the meta device are loaded first, as new ones follow from them.

    Returns:
        The tokens that may have got new embeddings.

    Raises:
        UserError: if other tokens of the tokenizer, or of rows without one, have no embedding.
    """
    new_tokens = rows.new_tokens
    if adapter is not None:
        new_tokens = tokens_of_adapter(adapter, model, rows.tokenizer, rows.new_tokens)
    if initial_weights is not None and new_tokens:
        initial_weights.load_embeddings(model)

    embeddings = cast(nn.Embedding, model.get_input_embeddings())
    size = len(embeddings.weight)
    if rows.tokenizer is None:
        if rows.metadata.vocabulary > size:
            raise UserError(
                f"the rows hold token {rows.metadata.vocabulary - 1:,}, and the model has a "
                f"vocabulary of {size:,}; use the model's own tokenizer to make them."
            )
        return new_tokens
    needed_size = vocabulary_of(rows.tokenizer)
    if not set(range(size, needed_size)) <= set(new_tokens):
        name = config.model_name_or_path or config.from_config
        raise UserError(
            f"the tokenizer has {needed_size:,} tokens and {name} a vocabulary of {size:,}; "
            "use the model's own tokenizer."
        )

    if needed_size > size:
        torch.manual_seed(seed_of(seed, "rows of new tokens"))
        model.resize_token_embeddings(needed_size)
        tokens = rows.tokenizer.convert_ids_to_tokens(list(range(size, needed_size)))
        say(
            "tokens",
            f"{', '.join(tokens)} added to the vocabulary: {size:,} -> {needed_size:,}",
        )
    return new_tokens


def _freeze(model: "PreTrainedModel", pattern: str) -> None:
    """Freeze the parameters whose names contain a match of a regular expression.

    Raises:
        UserError: if no parameter matches, or if none would be left to train.
    """
    parameters = dict(model.named_parameters())
    matching = [parameter for name, parameter in parameters.items() if re.search(pattern, name)]
    trained = {parameter for parameter in parameters.values() if parameter.requires_grad}
    if not matching or trained.issubset(matching):
        share = "every parameter" if matching else "no parameter"
        raise UserError(
            f"--freeze '{pattern}' matches {share}; their names are like {next(iter(parameters))}."
        )

    for parameter in matching:
        parameter.requires_grad_(False)
    count = sum(parameter.numel() for parameter in matching)
    say("frozen", f"{count:,} parameters in {len(matching)} of {len(parameters)} tensors")


def _check_no_dropout(model: "PreTrainedModel") -> None:
    """Raise :class:`UserError` if a model has dropout.

    Its random numbers would depend on the parallel layout.
    """
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
