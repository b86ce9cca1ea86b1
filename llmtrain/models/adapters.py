"""Stored adapters: load one with its base, merge it into that, or train it further."""

import functools
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import JsonObject, digest, new_folder, read_hashed, read_object, write_json
from llmtrain.locks import file_lock
from llmtrain.model_folders import (
    ADAPTER_WEIGHTS,
    DATA_ONLY,
    folder_beside,
    has_tokenizer,
    is_adapter,
    tokenizer_of,
    vocabulary_of,
)
from llmtrain.models.export import (
    ModelFiles,
    config_values,
    folder_config,
    gives_scores,
)
from llmtrain.models.hub_models import (
    check_range,
    load_pretrained,
    local_folder,
    origin_of,
    stored_dtypes,
    without_weights,
)
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.text_tower import BASE_FILE, copy_processor, stored_base_tensors

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# The file in a merged model's folder that identifies the adapter, and names the chosen dtype.
_MERGED_FROM = "merged_from.json"


def merged_model(adapter: Path) -> str:
    """Merge an adapter into its base, unless that was done before, and return the new folder.

    For a run, that is ``merged`` in the run folder, where ``llmtrain export --merge`` writes it.

    Raises:
        UserError: if that folder holds something else, if the adapter cannot be loaded, or if the
            merged model would compute something else than the adapter with its base.
    """
    base, revision = base_of(adapter)
    if "quantization_config" in read_object(local_folder(base, revision) / "config.json"):
        raise UserError(
            f"{adapter} is an adapter of quantized weights, {base}, and merging would round them "
            "again: train the adapter itself with --continue_adapter, or write the rounded model "
            f"with llmtrain export {adapter} --merge, and name that."
        )
    target = folder_beside(adapter, "merged")
    # The processes of a machine come here at the same time.
    with file_lock(target.with_name(f".lock-{target.name}")):
        if not target.exists():
            with new_folder(target) as working:
                write_merged(adapter, working)
        elif read_object(target / _MERGED_FROM) != _merged_from(adapter, "auto"):
            raise UserError(
                f"{target} exists and was not merged from {adapter} in the dtypes of its base; "
                f"delete it, or name it with --model_name_or_path {target} to start from it."
            )
    say(
        "merged",
        f"{adapter} is an adapter, so its merged model is used: {target} "
        "(--continue_adapter trains the adapter itself)",
    )
    return str(target)


def write_outline(adapter: Path, folder: Path) -> str:
    """Write a model folder with the shapes of the merged model, but with the weights of the base.

    It costs nothing, and is enough to plan a run. The files of the weights are symbolic links.

    Args:
        adapter: the folder of the adapter.
        folder: the folder to write, which exists. It is returned.
    """
    from transformers import AutoConfig

    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        base = local_folder(*base_of(adapter))
        config = AutoConfig.from_pretrained(base, **DATA_ONLY)
        tokenizer = tokenizer_with_base(str(adapter))

    text_config = config.get_text_config()
    text_config.vocab_size = max(text_config.vocab_size, len(tokenizer))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for weights in base.glob("*.safetensors*"):  # with the index of several files
        (folder / weights.name).symlink_to(weights.resolve())
    return str(folder)


def _merged_from(adapter: Path, dtype: str) -> JsonObject:
    """Return what a merged model says of its origin: the hash of an adapter, and the dtype."""
    return {**read_hashed(adapter / ADAPTER_WEIGHTS), "dtype": dtype}


def adapter_origin(adapter: Path) -> str:
    """Return a hash of an adapter's weights and settings, wherever its base is."""
    settings = folder_config(adapter)
    settings.pop("base_model_name_or_path", None)
    return digest({"weights": {**read_hashed(adapter / ADAPTER_WEIGHTS)}, "settings": settings})


def write_merged(adapter: Path, folder: Path, dtype: str = "auto") -> None:
    """Merge an adapter into its base, and write the resulting model.

    They are merged in float32, and rounded once. Except for that it computes the same logits.

    Args:
        adapter: the folder of the adapter.
        folder: the folder to write.
        dtype: of the weights. ``auto`` stands for the dtypes in which the base is stored.

    Raises:
        UserError: if the adapter, its base or its tokenizer cannot be loaded.
    """
    base, revision = base_of(adapter)
    tokenizer = tokenizer_with_base(str(adapter))
    adapted = adapted_model(adapter, len(tokenizer), torch.float32)
    model = cast("PreTrainedModel", adapted.get_base_model())
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[no-untyped-call]
        layer: nn.Embedding | nn.Linear | None = getattr(module, "base_layer", None)
        if layer is not None:
            # If both share their weights, merging would add the matrices of one to the other.
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    with (
        # Biases of an adapter need a base with biases.
        as_user_error(f"{adapter} cannot be merged (--continue_adapter trains it)", first_line),
        warnings.catch_warnings(action="ignore"),
    ):
        merged: PreTrainedModel = adapted.merge_and_unload()
    is_reward_model = gives_scores(folder_config(adapter))
    if is_reward_model:
        # The tokenizer knows what was padding in training, and the base has its own padding token.
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    config = config_values(merged.config)
    config["architectures"] = [type(merged).__name__]  # a reward model is not of its base's class
    # A copy, because a model that has loaded weights remembers how these were quantized.
    architecture = without_weights(functools.partial(type(merged), merged.config))
    base_folder = local_folder(base, revision)
    files = ModelFiles(
        config=config,
        tokenizer=tokenizer,
        trained_on="the data of its adapter",
        base=base,
        generation=read_object(adapter / "generation_config.json"),
        architecture=architecture,
        base_tensors=stored_base_tensors(
            architecture, [], base, origin_of(base, revision), is_reward_model=is_reward_model
        ),
        base_dtypes=stored_dtypes(base_folder),
    ).finished(dtype)
    weights = files.export_tensors(merged)
    check_range(adapter, weights)
    # The names of these weights are those of published models already.
    merged.save_pretrained(folder, state_dict=weights, save_original_format=False)
    files.write(folder, merged.num_parameters())
    copy_processor(base_folder, folder)
    write_json(folder / _MERGED_FROM, _merged_from(adapter, dtype), durable=False)


def base_of(adapter: Path) -> tuple[str, str]:
    """Return the folder or hub name of an adapter's base model, and its revision on the hub.

    Raises:
        UserError: if the adapter is a pickle, or names no base.
    """
    settings = folder_config(local_folder(str(adapter)))  # which refuses a pickle
    base = settings.get("base_model_name_or_path")
    is_there = base and (Path(base).is_dir() or not Path(base).is_absolute())
    if not is_there:
        raise UserError(
            f"{adapter} does not name the model that it adapts, or {base} has moved; set "
            "base_model_name_or_path in adapter_config.json."
        )
    if is_adapter(Path(str(base))):
        raise UserError(
            f"{adapter} adapts {base}, which is an adapter, too; merge that into its base first: "
            f"llmtrain export {base} --merge."
        )
    return str(base), str(settings.get("revision") or "main")


def tokenizer_with_base(name: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model folder or hub name.

    An adapter that peft alone has saved holds none, and has that of its base.

    Raises:
        UserError: if no tokenizer can be loaded.
    """
    folder = Path(name)
    if is_adapter(folder) and not has_tokenizer(folder):
        return tokenizer_of(str(local_folder(*base_of(folder))))
    return tokenizer_of(name)


def check_base(adapter: Path, base: str, origin: JsonObject) -> None:
    """Check that an adapter was trained on the weights that its base has now.

    An adapter of another program does not say which weights these are.

    Args:
        adapter: the folder of the adapter.
        base: the folder or hub name of the base.
        origin: identifies its present weights; see :func:`llmtrain.models.hub_models.origin_of`.

    Raises:
        UserError: if they are other weights.
    """
    recorded = read_object(adapter / BASE_FILE)
    if recorded and recorded != origin:
        raise UserError(
            f"{adapter} was trained on different weights than {base} now has; restore the original "
            "weights."
        )


def trains_whole_modules(lora: LoraConfig | None, adapter: Path | None) -> bool:
    """Return whether an adapter, new or stored, has modules that are trained in full."""
    if adapter is None:
        return lora is not None and bool(lora.lora_modules_to_save)
    return bool(folder_config(adapter).get("modules_to_save"))


def adapted_model(
    adapter: Path, vocabulary: int, dtype: "torch.dtype | str" = "auto"
) -> "PeftModel":
    """Load an adapter with its base model.

    Args:
        adapter: the folder of the adapter.
        vocabulary: the number of tokens that need embeddings.
        dtype: of the base's weights. ``auto`` is the dtype in which they are stored.

    Raises:
        UserError: if the base is not the one that the adapter was trained on, if one of them cannot
            be loaded, or if the adapter is a pickle.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    base, revision = base_of(adapter)
    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        if "sha256" in read_object(adapter / BASE_FILE):  # a commit is loaded as it was
            check_base(adapter, base, origin_of(base))
        options: dict[str, object] = {"dtype": dtype, "revision": revision}
        config = read_object(local_folder(base, revision) / "config.json")
        quantization = config.get("quantization_config") or {}
        if dtype == torch.float32 and quantization.get("quant_method") in ("fp8", "mxfp4"):
            # peft could not add matrices to 8 bits. Without a GPU, transformers does this itself.
            options["quantization_config"] = AutoQuantizationConfig.from_dict(
                {**quantization, "dequantize": True}
            )
        is_reward_model = gives_scores(folder_config(adapter))
        model = load_pretrained(base, gives_scores=is_reward_model, **options)
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        if vocabulary > len(embeddings.weight):
            # The adapter has the rows of the new tokens.
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
    return _load_adapter(model, adapter, is_trained=False)


def load_lora(
    model: "PreTrainedModel",
    adapter: Path,
    new_tokens: Sequence[int],
    is_reward_model: bool = False,
) -> "PeftModel":
    """Add a stored adapter to a model, in place, to train it further, and freeze everything else.

    The adapter's settings stay. Its tensors become the initial values, in float32, and are real
    also if the model is on the meta device.

    Args:
        model: the base model.
        adapter: the folder of the adapter.
        new_tokens: tokens that need embeddings of the adapter.
        is_reward_model: whether the model scores answers.

    Returns:
        peft's view of the model, which can save the adapter.

    Raises:
        UserError: if this is no LoRA adapter, or if it does not fit the model.
    """
    settings = folder_config(adapter)
    if gives_scores(settings) != is_reward_model:
        kind = "causal LM" if is_reward_model else "reward model"
        raise UserError(
            f"--continue_adapter: {adapter} is an adapter of a {kind}, which this run does not "
            "train; only --loss_type reward trains reward models."
        )
    peft_type = settings.get("peft_type")
    start = settings.get("init_lora_weights", True)  # other kinds have changed the base
    if peft_type != "LORA" or start not in (True, False, "gaussian", "orthogonal", "eva"):
        raise UserError(
            f"--continue_adapter: {adapter} is no plain LoRA (peft_type {peft_type}, "
            f"init_lora_weights {start}); leave the flag out to merge it, or convert it with "
            "path_initial_model_for_weight_conversion of peft."
        )
    adapted = _load_adapter(model, adapter, is_trained=True)
    is_in_full = hasattr(model.get_input_embeddings(), "modules_to_save")
    if not is_in_full and not _tokens_with_rows(adapter).issuperset(new_tokens):
        raise UserError(
            f"--continue_adapter: {adapter} does not train the embeddings of all {len(new_tokens)} "
            "new tokens; leave --chat_template out, or leave this flag out to merge the adapter."
        )
    return adapted


def _load_adapter(model: "PreTrainedModel", adapter: Path, is_trained: bool) -> "PeftModel":
    """Add a stored adapter to its base, in place.

    Args:
        model: the base. It may be on the meta device if the adapter is trained.
        adapter: the folder of the adapter.
        is_trained: whether the adapter is trained further. Its tensors are float32 then, and real.

    Raises:
        UserError: if it cannot be loaded, or if it does not fit the model.
    """
    with (
        as_user_error(f"{adapter}: its adapter could not be loaded", first_line),
        warnings.catch_warnings(action="ignore"),
    ):
        import peft

        settings: Any = peft.PeftConfig.from_pretrained(str(adapter))
        if settings.is_prompt_learning and not is_trained:
            return peft.PeftModel.from_pretrained(model, str(adapter))
        settings.inference_mode = False
        adapted: PeftModel = peft.get_peft_model(model, settings)
        names = [name for name, tensor in adapted.named_parameters() if tensor.requires_grad]
        if is_trained:
            for name in names:
                parameter = adapted.get_parameter(name)
                device = "cpu" if parameter.is_meta else parameter.device
                real = torch.empty_like(parameter, dtype=torch.float32, device=device)
                torch.utils.swap_tensors(parameter, nn.Parameter(real))  # type: ignore[no-untyped-call]
        tensors = load_file(adapter / ADAPTER_WEIGHTS)
        result: Any = peft.set_peft_model_state_dict(adapted, tensors)

    mismatched = sorted({*names}.intersection(result.missing_keys).union(result.unexpected_keys))
    if mismatched:
        base, _ = base_of(adapter)
        raise UserError(
            f"{adapter} does not fit {base}: only one of them has {mismatched[0]}; set "
            "base_model_name_or_path in adapter_config.json to the model that it was trained on."
        )
    return adapted


def tokens_of_adapter(
    adapter: Path,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerFast | None",
    new_tokens: Sequence[int],
) -> list[int]:
    """Return the tokens whose embeddings an adapter has, or must have because its base has none.

    Args:
        adapter: the folder of the adapter.
        model: the base model.
        tokenizer: the adapter's.
        new_tokens: tokens that a chat template has added to it.
    """
    tokens = {*_tokens_with_rows(adapter), *new_tokens}
    if tokenizer is not None:
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        tokens.update(range(len(embeddings.weight), vocabulary_of(tokenizer)))
    return sorted(tokens)


def _tokens_with_rows(adapter: Path) -> set[int]:
    """Return the tokens whose rows of the embeddings are in an adapter."""
    rows = folder_config(adapter).get("trainable_token_indices") or []
    lists = rows.values() if isinstance(rows, dict) else [rows]
    return {*itertools.chain.from_iterable(lists)}
