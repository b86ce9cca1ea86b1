"""Load an adapter with its base model, or merge it into that."""

import functools
import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from llmtrain.console import say
from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import digest, new_folder, read_hashed, read_object, write_json
from llmtrain.json_types import JsonObject
from llmtrain.locks import file_lock
from llmtrain.model_folders import (
    ADAPTER_WEIGHTS,
    DATA_ONLY,
    check_model_files,
    folder_beside,
    tokenizer_of,
)
from llmtrain.models.dtypes import check_range, stored_dtypes
from llmtrain.models.export import (
    ModelFiles,
    config_values,
    folder_config,
    gives_scores,
)
from llmtrain.models.hub_models import (
    load_causal_lm,
    load_reward_model,
    local_folder,
    origin_of,
    without_weights,
)
from llmtrain.models.lora_config import LoraConfig
from llmtrain.models.text_tower import BASE_FILE, BaseTensors, copy_processor, stored_base_tensors
from llmtrain.once_per_machine import once_per_machine

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

# The file in a merged model's folder that identifies the adapter, and names the chosen dtype.
_MERGED_FROM = "merged_from.json"


def ignore_peft_warnings() -> None:
    """Ignore warnings of peft that do not concern the user."""
    # The ranks of fused weights match no module, because they are the ranks of parameters.
    warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys", RuntimeWarning)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    # An embedding and a head that share weights are separated before an adapter of one is merged.
    warnings.filterwarnings("ignore", "Model (with|has) `tie_word_embeddings=True`", UserWarning)
    warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied", UserWarning)


def merged_model(adapter: Path) -> str:
    """Merge an adapter into its base, unless that was done before.

    Args:
        adapter: the folder of the adapter.

    Returns:
        The folder of the merged model. For a run, that is ``merged`` in the run folder, where
        ``llmtrain export --merge`` writes it, too.

    Raises:
        UserError: if that folder holds something else, if the adapter cannot be loaded, or if the
            merged model would compute something else than the adapter with its base.
    """
    base = base_of(adapter)
    if _quantization(base, base_revision(adapter)):
        raise UserError(
            f"{adapter} is an adapter of quantized weights, {base}, and merging would round them "
            "again: train the adapter itself with --continue_adapter, or write the rounded model "
            f"with llmtrain export {adapter} --merge, and name that."
        )
    target = merged_folder(adapter)

    def merge() -> str:
        with file_lock(target.with_name(f".lock-{target.name}")):
            if not target.exists():
                with new_folder(target) as working:
                    write_merged(adapter, working)
            else:
                _check_merged_from(adapter, target)
        return str(target)

    # The processes of a machine come here at the same time.
    once_per_machine(f"merged {target}", merge)
    say(
        "merged",
        f"{adapter} is an adapter, so its merged model is used: {target} "
        "(--continue_adapter trains the adapter itself)",
    )
    return str(target)


def _check_merged_from(adapter: Path, target: Path) -> None:
    """Check that a folder holds the merged model of an adapter, in the dtypes of its base.

    Raises:
        UserError: if it holds something else.
    """
    merged_from = read_object(target / _MERGED_FROM)
    dtype = merged_from.pop("dtype", None)
    if merged_from != _identity_of(adapter):
        raise UserError(
            f"{target} exists and was not merged from {adapter}; delete it, or name a merged model."
        )
    if dtype != "auto":
        raise UserError(
            f"{target} was exported with --dtype {dtype}, and a run starts from the dtypes of the "
            f"base; delete it, or name it with --model_name_or_path {target} to start from it."
        )


def _quantization(name: str, revision: str) -> JsonObject:
    """Return how the weights of a model are stored quantized; empty if they are not."""
    from transformers import AutoConfig

    with as_user_error(f"{name}: its configuration could not be loaded"):
        config = AutoConfig.from_pretrained(name, revision=revision, **DATA_ONLY)
    return cast(JsonObject, getattr(config, "quantization_config", None) or {})


def write_outline(adapter: Path, folder: Path) -> str:
    """Write a model folder with the shapes of the merged model, but with the weights of the base.

    It costs nothing, and is enough to plan a run. The files of the weights are symbolic links.

    Args:
        adapter: the folder of the adapter.
        folder: the folder to write, which exists.

    Returns:
        ``folder``.

    Raises:
        UserError: if the adapter, its base or its tokenizer cannot be loaded.
    """
    from transformers import AutoConfig

    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        base = local_folder(base_of(adapter), base_revision(adapter))
        config = AutoConfig.from_pretrained(base, **DATA_ONLY)
        tokenizer = tokenizer_of(str(adapter))

    text_config = config.get_text_config()
    text_config.vocab_size = max(text_config.vocab_size, len(tokenizer))
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)
    for weights in base.glob("*.safetensors*"):  # with the index of several files
        (folder / weights.name).symlink_to(weights.resolve())
    return str(folder)


def merged_folder(adapter: Path) -> Path:
    """Return where to write the merged model of an adapter."""
    return folder_beside(adapter, "merged")


def _identity_of(adapter: Path) -> dict[str, object]:
    """Identify an adapter by a hash of its weights."""
    return {**read_hashed(adapter / ADAPTER_WEIGHTS)}


def adapter_origin(adapter: Path) -> str:
    """Return a hash of an adapter's weights and settings, wherever its base is."""
    settings = read_object(adapter / "adapter_config.json")
    settings.pop("base_model_name_or_path", None)
    return digest({"weights": _identity_of(adapter), "settings": settings})


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
    base = base_of(adapter)
    tokenizer = tokenizer_of(str(adapter))
    adapted = adapted_model(str(adapter), len(tokenizer), torch.float32)
    base_folder = local_folder(base, base_revision(adapter))
    _separate_adapted_embeddings(adapted)
    with warnings.catch_warnings():
        ignore_peft_warnings()
        try:
            merged: PreTrainedModel = adapted.merge_and_unload()
        except RuntimeError as error:  # biases of the adapter, and a base without any
            raise UserError(
                f"{adapter} cannot be merged: {first_line(error).rstrip('.')}. Use it as it is, "
                "with peft or --continue_adapter."
            ) from None
    is_reward_model = gives_scores(folder_config(adapter))
    if is_reward_model:
        # The tokenizer knows what was padding in training, and the base has its own padding token.
        merged.config.get_text_config().pad_token_id = tokenizer.pad_token_id

    # A copy, because a model that has loaded weights remembers how these were quantized.
    architecture = without_weights(functools.partial(type(merged), merged.config))
    base_tensors: BaseTensors | None = None
    # The merged model of a base that is stored quantized has other tensors.
    if not _quantization(base, base_revision(adapter)):
        base_tensors = stored_base_tensors(
            architecture,
            [],
            base,
            origin_of(base, base_revision(adapter)),
            is_reward_model=is_reward_model,
        )

    config = config_values(merged.config)
    config["architectures"] = [type(merged).__name__]  # a reward model is not of its base's class
    files = ModelFiles(
        config=config,
        tokenizer=tokenizer,
        trained_on="the data of its adapter",
        base=base,
        architecture=architecture,
        base_tensors=base_tensors,
        base_dtypes=stored_dtypes(base_folder),
    ).finished(dtype)
    weights = files.export_tensors(merged)
    check_range(adapter, weights)
    # The names of these weights are those of published models already.
    merged.save_pretrained(folder, state_dict=weights, save_original_format=False)
    files.write(folder, merged.num_parameters())
    copy_processor(base_folder, folder)
    if (adapter / "generation_config.json").exists():
        shutil.copy(adapter / "generation_config.json", folder)
    merged_from = {**_identity_of(adapter), "dtype": dtype}
    write_json(folder / _MERGED_FROM, merged_from, durable=False)


def _separate_adapted_embeddings(adapted: "PeftModel") -> None:
    """Give an embedding or a head with LoRA's matrices weights of its own.

    If both share their weights, merging would add the matrices of one to the other.
    """
    from peft.tuners.lora import LoraLayer

    model = cast("PreTrainedModel", adapted.get_base_model())
    for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[no-untyped-call]
        if isinstance(module, LoraLayer):
            layer = cast(nn.Embedding | nn.Linear, module.base_layer)
            layer.weight = nn.Parameter(layer.weight.detach().clone())


def base_of(adapter: Path) -> str:
    """Return the folder or hub name of an adapter's base model.

    Args:
        adapter: the folder of the adapter.

    Raises:
        UserError: if the adapter is a pickle, or names no base.
    """
    check_model_files(adapter)
    with as_user_error(f"{adapter}: its adapter could not be loaded", first_line):
        from peft import PeftConfig

        base = str(PeftConfig.from_pretrained(str(adapter)).base_model_name_or_path or "")
    if not base:
        raise UserError(
            f"{adapter} does not name the model that it adapts; set base_model_name_or_path in "
            "adapter_config.json."
        )
    return base


def check_base(adapter: Path, base: str, origin: JsonObject) -> None:
    """Check that an adapter was trained on the weights that its base has now.

    An adapter of another program does not say which weights these are.

    Args:
        adapter: the folder of the adapter.
        base: the folder or hub name of the base.
        origin: identifies the weights that the base has now.

    Raises:
        UserError: if they are other weights.
    """
    recorded = _recorded_origin(adapter)
    if recorded and recorded != origin:
        raise UserError(
            f"{adapter} is an adapter of other weights than {base} holds now; put those back."
        )


def base_revision(adapter: Path) -> str:
    """Return the revision of an adapter's base on the hub; ``main`` if none is recorded.

    It is the commit that llmtrain has recorded, or what another program has written.
    """
    settings = read_object(adapter / "adapter_config.json")
    return str(_recorded_origin(adapter).get("commit") or settings.get("revision") or "main")


def _recorded_origin(adapter: Path) -> JsonObject:
    """Return what identifies the weights that an adapter was trained on; empty if unknown."""
    path = adapter / BASE_FILE
    return cast(JsonObject, json.loads(path.read_text())) if path.exists() else {}


def _dequantized(base: str, revision: str) -> dict[str, object]:
    """Return the options that load FP8 or MXFP4 as floats, as transformers does without a GPU."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    quantization = _quantization(base, revision)
    if quantization.get("quant_method") not in ("fp8", "mxfp4"):
        return {}
    settings = AutoQuantizationConfig.from_dict({**quantization, "dequantize": True})
    return {"quantization_config": settings}


def has_token_rows(adapter: Path | None) -> bool:
    """Return whether there is an adapter with rows of the embeddings, for some tokens."""
    return adapter is not None and bool(
        read_object(adapter / "adapter_config.json").get("trainable_token_indices")
    )


def trains_whole_modules(lora: LoraConfig | None, adapter: Path | None) -> bool:
    """Return whether an adapter, new or stored, has modules that are trained in full."""
    if adapter is None:
        return lora is not None and bool(lora.lora_modules_to_save)
    return bool(read_object(adapter / "adapter_config.json").get("modules_to_save"))


def adapted_model(name: str, vocabulary: int, dtype: "torch.dtype | str" = "auto") -> "PeftModel":
    """Load an adapter with its base model.

    Args:
        name: the folder of the adapter.
        vocabulary: the number of tokens that need embeddings.
        dtype: of the base's weights. ``auto`` is the dtype in which they are stored.

    Raises:
        UserError: if the base is not the one that the adapter was trained on, if one of them cannot
            be loaded, or if the adapter is a pickle.
    """
    from peft import PeftModel

    folder = Path(name)
    base = base_of(folder)
    with as_user_error(f"{folder}: its adapter could not be loaded", first_line):
        origin = _recorded_origin(folder)
        if "sha256" in origin:  # a commit is loaded as it was
            check_base(folder, base, origin_of(base))
        load = load_reward_model if gives_scores(folder_config(folder)) else load_causal_lm
        options: dict[str, object] = {}
        if dtype == torch.float32:  # peft could not add matrices to 8 bits
            options = _dequantized(base, base_revision(folder))
        model = load(base, dtype=dtype, revision=base_revision(folder), **options)
        embeddings = cast(nn.Embedding, model.get_input_embeddings())
        if vocabulary > len(embeddings.weight):
            # The adapter has the rows of the new tokens.
            model.resize_token_embeddings(vocabulary, mean_resizing=False)
        with warnings.catch_warnings():
            ignore_peft_warnings()
            return PeftModel.from_pretrained(model, name)
