"""The classes of Hugging Face models: which rows they take, and how they are built without weights.

Rows are made before the weights are loaded, so the model itself cannot be tried then whether it
keeps packed documents apart. Its class is looked up in ``packing_verdicts.json`` instead. The model
is tried when its weights are in place (:mod:`llmtrain.models.probe`).
"""

import contextlib
import functools
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from llmtrain.errors import UserError, as_user_error
from llmtrain.files import read_object
from llmtrain.interfaces.model import PackingSupport
from llmtrain.models.config import ModelConfig
from llmtrain.models.hub_models import (
    auto_class,
    causal_lm_classes,
    load_pretrained,
    local_folder,
    without_weights,
)
from llmtrain.models.weight_loading import stored_tensors, tied_but_different
from llmtrain.planning import current_plan

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

# Made by docs/tables/models_table.py, which tries a small model of every class. The verdict on a
# class is "leaks", "packs", or "shares", which means that it packs and shares prompts as well.
VERDICTS = Path(__file__).with_name("packing_verdicts.json")


def build_model(
    config: ModelConfig,
    tokenizer: "PreTrainedTokenizerFast | None",
    dtype: torch.dtype,
    *,
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
        is_reward_model: build the family's class for sequence classification, with one output per
            token instead of a vocabulary.

    Raises:
        UserError: if there is no such model, if it cannot be used this way, or if rows are longer
            than it has positions.
    """
    from transformers import AutoModelForSequenceClassification, GenerationConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]

    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    if config.attn_implementation:
        options["attn_implementation"] = config.attn_implementation

    name = config.model_name_or_path
    with as_user_error(_flag(config)):
        model_config = config.configuration(tokenizer)
        if not is_reward_model:
            check_causal_lm_class(config, model_config)
        text_config = model_config.get_text_config()
        if getattr(text_config, "output_router_logits", False):
            # transformers would add a balancing loss to the loss of the finished model.
            text_config.output_router_logits = False
        positions = getattr(text_config, "max_position_embeddings", None)
        if positions and int(config.max_length) > positions:
            raise UserError(
                f"--max_length {config.max_length} is more than this model's {positions} "
                f"positions; use --max_length {positions} or less."
            )
        is_quantized = getattr(model_config, "quantization_config", None) is not None
        # A plan has no weights to quantize, and counts those of a model in full precision.
        loads_in_4bit = config.load_in_4bit and current_plan() is None
        if name is not None and (loads_in_4bit or is_quantized):
            if is_reward_model:
                raise UserError(
                    "--loss_type reward cannot train quantized weights; name a model that is not "
                    "quantized, without --load_in_4bit."
                )
            options["revision"] = config.model_revision
            return _load_quantized(name, config.load_in_4bit, options)

        model_class: Any = auto_class(model_config)
        if is_reward_model:
            model_config.num_labels = 1
            model_class = AutoModelForSequenceClassification
        build = functools.partial(model_class.from_config, model_config, **options)
        model = without_weights(build)
        if is_reward_model:
            if not hasattr(model, "score"):
                raise UserError(
                    f"--loss_type reward: {type(model).__name__} has no head named score; use a "
                    "model of another family, such as llama or qwen3."
                )
        elif name is not None and _is_tied_by_mistake(model, config):
            model_config.tie_word_embeddings = False
            model = without_weights(build)
        if name is not None:
            model.train(False)
            with contextlib.suppress(OSError):  # not every model has a generation_config.json
                model.generation_config = GenerationConfig.from_pretrained(
                    name, revision=config.model_revision
                )
    return model


def _is_tied_by_mistake(model: "PreTrainedModel", config: ModelConfig) -> bool:
    """Return whether a model's head is tied to its embeddings, but stored with other values.

    Some multimodal configurations do not say whether they are tied, and the default of their class
    is wrong for older checkpoints, such as Mistral Small 3.1. If a configuration does say it,
    loading the weights reports the contradiction.
    """
    folder = local_folder(str(config.model_name_or_path), config.model_revision)
    is_multimodal = model.config.get_text_config() is not model.config
    if not is_multimodal or "tie_word_embeddings" in read_object(folder / "config.json"):
        return False
    return tied_but_different(model, [*stored_tensors(model, folder)]) is not None


def check_causal_lm_class(config: ModelConfig, model_config: "PreTrainedConfig") -> None:
    """Check that transformers has a causal LM for a model, without loading it.

    A multimodal model is one if it reads and writes text with a decoder.

    Args:
        config: which model.
        model_config: its configuration.

    Raises:
        UserError: if it has none.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.trust_remote_code:  # a model may bring its own class
        return
    model_type = model_config.model_type
    # An encoder would read the text, and a decoder answer it.
    is_encoder_decoder = type(model_config).is_encoder_decoder
    is_multimodal_encoder = is_encoder_decoder and (
        model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    if causal_lm_classes(model_type) is None or is_multimodal_encoder:
        raise UserError(
            f"{_flag(config)}: transformers has no causal LM for {model_type}; name a model that "
            "continues text."
        )


def packing_support(config: ModelConfig, *, is_reward_model: bool = False) -> PackingSupport | None:
    """Return what rows a model can be trained on, or ``None`` if there is no such model.

    Args:
        config: which model.
        is_reward_model: whether a reward model is trained, and no causal LM.

    Raises:
        UserError: if transformers has no class by which the model could be trained.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    model_config = config.known_configuration()
    if model_config is None:
        return None
    if not is_reward_model:
        check_causal_lm_class(config, model_config)
    elif type(model_config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(
            "--loss_type reward: transformers has no sequence classification class for "
            f"{model_config.model_type}; use a model of another family, such as llama or qwen3."
        )

    verdicts: dict[str, str] = json.loads(VERDICTS.read_text(encoding="utf-8"))["classes"]
    class_name, _ = causal_lm_classes(model_config.model_type) or (model_config.model_type, "")
    has_own_code = "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {})
    if class_name not in verdicts or (config.trust_remote_code and has_own_code):
        problem = f"it was not tried whether {class_name} keeps documents apart (--packing packs)"
        return PackingSupport(problem)
    if verdicts[class_name] == "leaks":
        return PackingSupport(f"{class_name} lets the documents of a packed row see each other")

    # Only this package's attention keeps two answers apart. A model with transformers' "sdpa" gets
    # it, unless attention has chunks that are shorter than the row (llmtrain.models.probe).
    implementation = config.attn_implementation or model_config._attn_implementation or "sdpa"
    chunk: int = getattr(model_config.get_text_config(), "attention_chunk_size", None) or 0
    has_chunks = chunk > 0 and (config.max_length == "auto" or chunk < config.max_length)
    has_own_attention = implementation == "sdpa" and not has_chunks
    return PackingSupport(shares_prompts=has_own_attention and verdicts[class_name] == "shares")


def _flag(config: ModelConfig) -> str:
    """Return the flags that say which model it is, with their values."""
    if config.model_name_or_path:
        return f"--model_name_or_path {config.model_name_or_path}"
    overrides = f" --config_overrides {config.config_overrides}" if config.config_overrides else ""
    return f"--from_config {config.from_config}{overrides}"


def _load_quantized(name: str, load_in_4bit: bool, options: dict[str, Any]) -> "PreTrainedModel":
    """Load a model with quantized weights.

    Args:
        name: the folder or hub name of the model.
        load_in_4bit: quantize the weights to 4 bits. Otherwise they are stored quantized.
        options: further arguments of ``from_pretrained``.

    Raises:
        UserError: if weights are missing, or 4 bits cannot be used here.
    """
    from transformers import BitsAndBytesConfig

    if load_in_4bit and not torch.cuda.is_available():
        raise UserError("--load_in_4bit needs a CUDA GPU; leave it out on this machine.")
    if load_in_4bit:
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    loaded: object = load_pretrained(name, **options, output_loading_info=True)
    model, info = cast("tuple[PreTrainedModel, dict[str, list[object]]]", loaded)
    unusable = sorted(map(str, [*info["missing_keys"], *info["mismatched_keys"]]))
    if unusable:
        raise UserError(
            f"--model_name_or_path {name}: {len(unusable)} weights are missing or have another "
            f"shape, such as {unusable[0]}."
        )
    return model
