"""Models in a folder or on the hub: loading one, its files, its commit, and its dtypes."""

import contextlib
import copy
import hashlib
import json
import re
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from torch import nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import JsonObject, hashes_of, read_object
from llmtrain.model_folders import (
    ADAPTER_WEIGHTS,
    DATA_ONLY,
    check_model_files,
    is_adapter,
    vocabulary_of,
    weight_files,
)
from llmtrain.models.configuration import refuse_hub_attention
from llmtrain.planning import current_plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# The dtypes that a finished model may have, by the names of the flags and of config.json.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_RESERVED = re.compile("reserved|unused|place.?holder", re.IGNORECASE)


def causal_lm_classes(model_type: str) -> tuple[str, str] | None:
    """Return the class that is trained for a type of model, and the auto class that loads it.

    It is the class of the full model. For many multimodal models, ``AutoModelForCausalLM`` loads
    the text model alone, or nothing.

    Returns:
        The two names; ``None`` if transformers has no class of this type that continues text.
    """
    from transformers.models.auto import modeling_auto

    image_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES  # for sound, too
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if model_type in image_text:
        return image_text[model_type], "AutoModelForImageTextToText"
    if model_type in multimodal:
        return multimodal[model_type], "AutoModelForMultimodalLM"
    if model_type in causal:
        return causal[model_type], "AutoModelForCausalLM"
    return None


def auto_class(model_config: "PreTrainedConfig") -> Any:
    """Return the auto class that loads a model with this configuration."""
    import transformers

    is_of_transformers = type(model_config).__module__.startswith("transformers.")
    names = causal_lm_classes(model_config.model_type)
    if names is None or not is_of_transformers:  # the model may bring its own class
        return transformers.AutoModelForCausalLM
    return getattr(transformers, names[1])


def without_weights(build: Callable[[], "PreTrainedModel"]) -> "PreTrainedModel":
    """Build a model whose parameters are on the meta device. Its buffers are real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = build()
    # `init_empty_weights` made a separate parameter of each tied one.
    model.tie_weights()
    return model


def load_pretrained(
    name: str, *, gives_scores: bool = False, **options: object
) -> "PreTrainedModel":
    """Load a model from safetensors files with its weights: for inference, or quantized ones.

    It raises whatever transformers raises, too.

    Args:
        name: the folder or hub name of the model.
        gives_scores: load it as a reward model. Its head is random if the files do not have it.
        options: further arguments of ``from_pretrained``.

    Raises:
        UserError: if the weights are pickles, or if the configuration asks for a kernel of the hub.
    """
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
    )
    from transformers.utils import logging

    # The progress bar would appear in the middle of generated text.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # It warns about kernels that are not installed.
    getLogger("transformers.integrations.hub_kernels").setLevel(ERROR)

    revision = str(options.get("revision", "main"))
    folder = local_folder(name, revision)
    if is_adapter(folder) and not (folder / "config.json").exists():
        # transformers loads its base, too.
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        local_folder(str(base), revision)

    options = {**DATA_ONLY, "use_safetensors": True, **options}
    # An adapter has no configuration of a model. Loading a model reports what is wrong with it.
    model_class: Any = AutoModelForCausalLM
    with contextlib.suppress(OSError, ValueError):
        model_config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder),
            trust_remote_code=options["trust_remote_code"],
            revision=revision,
        )
        model_class = auto_class(model_config)
        if "attn_implementation" not in options:
            refuse_hub_attention(model_config, name)
    if gives_scores:
        logging.set_verbosity_error()  # type: ignore[no-untyped-call] # a random head is reported
        options["num_labels"] = 1
        model_class = AutoModelForSequenceClassification
    return cast("PreTrainedModel", model_class.from_pretrained(str(folder), **options))


def local_folder(name: str, revision: str = "main") -> Path:
    """Return the local folder with a model's files, which are safe to load.

    If ``name`` is a hub name, the files are downloaded unless the cache has them, without the
    weights for a plan. ``revision`` is a branch, tag or commit there.

    Raises:
        UserError: if the hub does not provide them, or if they are not safe; see
            :func:`llmtrain.model_folders.check_model_files`.
    """
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        with as_user_error(f"{name} is no folder, and the hub did not provide it"):
            patterns = [ADAPTER_WEIGHTS, "*.json", "*.py"]
            if current_plan() is None:
                patterns.append("model*.safetensors")
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    check_model_files(folder)
    return folder


def origin_of(name: str, revision: str = "main") -> JsonObject:
    """Identify a model: by a hash of the weights and the configuration in its folder.

    A hub name is identified by the commit of its revision, which the cache knows if there is no
    hub. It raises whatever the hub's library raises if neither has the model.

    Args:
        name: the folder or hub name of the model.
        revision: a branch, tag or commit on the hub.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    folder = Path(name)
    if not folder.is_dir():
        try:
            path = hf_hub_download(name, "config.json", revision=revision)
        except EntryNotFoundError:
            path = hf_hub_download(name, "adapter_config.json", revision=revision)
        return {"name": name, "commit": Path(path).parent.name}

    files = [*sorted(folder.glob("*.safetensors")), *folder.glob("config.json")]
    hashes = "".join(content["sha256"] for content in hashes_of(files))
    return {"sha256": hashlib.sha256(hashes.encode()).hexdigest()}


# --- the dtypes of stored weights


@dataclass(frozen=True)
class StoredDtypes:
    """The dtypes of the floating tensors in a model folder.

    Attributes:
        main: the dtype of most tensors, which ``config.json`` names.
        by_name: the dtypes of single tensors. A bfloat16 model may keep the routing biases of its
            experts in float32, for example. All others have the main dtype.
    """

    main: torch.dtype
    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)

    def cast(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors in the dtypes of their names. Integers and 8 bits stay as they are."""
        result = dict(tensors)
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and tensor.element_size() > 1:
                result[name] = tensor.to(self.by_name.get(name, self.main))
        return result


def stored_dtypes(folder: Path) -> StoredDtypes:
    """Return the dtypes in which a model's folder holds its weights.

    Quantized weights count as bfloat16, in which they are computed. Those of 64 or 8 bits count as
    most of the others, because no model is trained in these dtypes.

    Raises:
        UserError: if a file of weights cannot be read.
    """
    by_name: dict[str, torch.dtype] = {}
    for path in weight_files(folder):
        with as_user_error(str(path), first_line), safe_open(path, "pt") as file:
            for name in [*file.keys()]:
                tensor = file.get_tensor(name)  # is mapped, not read
                if tensor.is_floating_point() and tensor.element_size() in (2, 4):
                    by_name[name] = tensor.dtype

    config = read_object(folder / "config.json")
    if config.get("quantization_config"):
        return StoredDtypes(torch.bfloat16)
    # A plan may have no weights. The key is `torch_dtype` in models before transformers 4.56.
    configured = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")), torch.float32)
    dtypes = [*by_name.values()] or [configured]
    return StoredDtypes(statistics.mode(dtypes), by_name)


def check_range(source: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Check that weights have kept finite values in the dtype to which they were cast.

    Args:
        source: the model folder that they come from.
        weights: the weights by name.

    Raises:
        UserError: if one is infinite.
    """
    for name, tensor in weights.items():
        if tensor.is_floating_point() and torch.isinf(tensor).any():
            raise UserError(
                f"{source}: {name} has values above {torch.finfo(tensor.dtype).max:g}, the largest "
                f"of {tensor.dtype}; use llmtrain export --dtype bfloat16."
            )


def cast_weights(model: nn.Module, dtype: torch.dtype, with_frozen: bool = False) -> None:
    """Give the weights of a model a dtype, in place. Tied weights stay tied.

    Args:
        model: the model.
        dtype: the dtype of all weights that are trained.
        with_frozen: whether frozen weights get it, too. Quantized ones stay as they are.
    """
    for parameter in model.parameters():
        is_quantized = not parameter.is_floating_point() or parameter.element_size() == 1
        if parameter.requires_grad or (with_frozen and not is_quantized):
            parameter.data = parameter.data.to(dtype)


def with_dtype(config: JsonObject, dtype: torch.dtype) -> JsonObject:
    """Return the content of ``config.json`` for a model whose weights have a dtype.

    The configurations of a multimodal model's parts name it, too, if they name one.
    """
    name = str(dtype).removeprefix("torch.")

    def rename(part: JsonObject) -> JsonObject:
        for key in ("dtype", "torch_dtype"):  # the latter before transformers 5
            if isinstance(part.get(key), str):
                part[key] = name
        return part

    changed = json.loads(json.dumps(config), object_hook=rename)
    return {**changed, "dtype": name}


# --- reward models


def with_padding_token(
    tokenizer: "PreTrainedTokenizerFast", stop_token_ids: Collection[int], vocabulary: int
) -> "PreTrainedTokenizerFast":
    """Return a copy of a tokenizer whose padding token ends no answer.

    Transformers scores the last token of a text that is not the padding token. It is the
    tokenizer's own one, the unknown token, a reserved token, or the next row of the embedding, if
    no token has that. If there is no such token, the copy has no padding token, and transformers
    refuses to score several texts at once.

    Args:
        tokenizer: the tokenizer.
        stop_token_ids: the tokens at which an answer ends, besides EOS.
        vocabulary: the number of rows of the embedding.
    """
    added_tokens = sorted(tokenizer.added_tokens_decoder.items())
    reserved = [token_id for token_id, token in added_tokens if _RESERVED.search(token.content)]
    candidates = [tokenizer.pad_token_id, tokenizer.unk_token_id, *reserved]
    unusable = {None, tokenizer.eos_token_id, *stop_token_ids}
    usable = [token_id for token_id in candidates if token_id not in unusable]

    padded = copy.deepcopy(tokenizer)
    if usable:
        padded.pad_token = tokenizer.convert_ids_to_tokens(usable[0])
    elif vocabulary_of(tokenizer) < vocabulary:
        padded.add_special_tokens({"pad_token": "<|pad|>"})
    else:
        padded.pad_token = None
    return padded
