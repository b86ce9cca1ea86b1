"""Write the model of a folder as a GGUF file, which llama.cpp and Ollama read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import json_text, sync_file, sync_folder, temporary_sibling
from llmtrain.json_types import JsonObject
from llmtrain.models.gguf_tokenizer import add_tokenizer
from llmtrain.models.hub_safety import DATA_ONLY, refuse_pickles
from llmtrain.models.weight_loading import COMPUTED_BUFFERS, weight_files

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from transformers import PreTrainedConfig

# --- architectures


def _unchanged(name: str, tensor: Tensor, config: "PreTrainedConfig") -> Tensor:
    return tensor


def _interleave_heads(name: str, tensor: Tensor, config: "PreTrainedConfig") -> Tensor:
    """Reorder the rows of the query and key projections for llama.cpp's rotary positions.

    transformers rotates row ``i`` of a head together with row ``i + D / 2``. For these
    architectures, llama.cpp rotates neighbouring rows.
    """
    module = name.split(".")[-2]
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    if module not in heads:
        return tensor
    halves: Tensor = tensor.unflatten(0, (heads[module], 2, -1))  # type: ignore[no-untyped-call]
    return halves.transpose(1, 2).reshape(tensor.shape)


def _transpose_projections(name: str, tensor: Tensor, config: "PreTrainedConfig") -> Tensor:
    """Transpose the projections of GPT-2, whose weights are stored [in, out]."""
    is_projection = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.T.contiguous() if is_projection else tensor


def _flatten_filters(name: str, tensor: Tensor, config: "PreTrainedConfig") -> Tensor:
    """Turn the filters [C, 1, K] of a short convolution into a matrix [C, K]."""
    return tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor


@dataclass(frozen=True)
class _Architecture:
    """How llama.cpp computes a class of transformers.

    Attributes:
        name: its name in llama.cpp.
        convert: returns a tensor as llama.cpp expects it, given its name and the configuration.
        fixed: settings that a GGUF file cannot express, with the values that llama.cpp assumes.
        rope_types: the rotary positions that it computes.
    """

    name: str
    convert: Callable[[str, Tensor, "PreTrainedConfig"], Tensor] = _unchanged
    fixed: dict[str, tuple[object, ...]] = field(default_factory=dict)
    rope_types: tuple[str, ...] = ("default", "linear")


_LLAMA = _Architecture(
    "llama",
    convert=_interleave_heads,
    fixed={"hidden_act": ("silu",)},
    rope_types=("default", "linear", "llama3"),
)

# Only classes whose greedy tokens in llama.cpp were compared with those of transformers.
_ARCHITECTURES = {
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _LLAMA,
    "Qwen2ForCausalLM": _Architecture("qwen2", fixed={"hidden_act": ("silu",)}),
    "Qwen3ForCausalLM": _Architecture("qwen3", fixed={"hidden_act": ("silu",)}),
    "GPT2LMHeadModel": _Architecture(
        "gpt2",
        convert=_transpose_projections,
        fixed={
            # llama.cpp has one GELU, with tanh. It differs from the exact one by 5e-4 at most.
            "activation_function": ("gelu", "gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "Lfm2ForCausalLM": _Architecture(
        "lfm2", convert=_flatten_filters, fixed={"conv_bias": (False,)}
    ),
}

# The token embeddings, by llama.cpp's name.
_EMBEDDINGS = "token_embd.weight"

# What the frequencies of rotary positions are divided by.
_ROPE_FACTORS = "rope_freqs.weight"

# The dtypes of weights, by the names that safetensors and GGUF share.
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Tensors that llama.cpp computes with in float32, besides vectors.
_FLOAT32_TENSORS = ("_norm.weight", "position_embd.weight", "shortconv.conv.weight")


# --- the file


def write_gguf(folder: Path, target: Path, name: str) -> None:
    """Write the model of a folder as a GGUF file.

    Weights keep their dtype, except for vectors, which llama.cpp wants in float32.

    Args:
        folder: the folder of a model of transformers, with its tokenizer.
        target: the file to write.
        name: the name of the model, which programs show to their users.

    Raises:
        UserError: if the package ``gguf`` is not installed, or if llama.cpp would compute something
            else than transformers does.
    """
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

    try:
        import gguf
    except ImportError:
        raise UserError("--to_gguf needs the package gguf: pip install 'llmtrain[gguf]'.") from None

    refuse_pickles(str(folder))
    with as_user_error(f"{folder}: its model could not be loaded", first_line):
        config = AutoConfig.from_pretrained(folder, **DATA_ONLY)
    with as_user_error(f"{folder}: its tokenizer could not be loaded", first_line):
        tokenizer = AutoTokenizer.from_pretrained(folder, **DATA_ONLY)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UserError(f"--to_gguf: {folder} has no tokenizer.json, the file of a fast tokenizer.")

    architecture = _architecture_of(folder, config)
    weights = _Weights(folder, architecture, config)

    writer = gguf.GGUFWriter(path=None, arch=architecture.name)
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(name)
    _add_settings(writer, config, weights)
    add_tokenizer(writer, folder, tokenizer, vocabulary=len(weights.outlines[_EMBEDDINGS]))

    working = temporary_sibling(target)
    try:
        _write(writer, working, weights)
        sync_file(working)
        working.replace(target)
    except BaseException:
        working.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _architecture_of(folder: Path, config: "PreTrainedConfig") -> _Architecture:
    """Return how llama.cpp computes a model.

    Raises:
        UserError: if it does not, or only with other settings.
    """
    model_class = (config.architectures or ["a model without a class"])[0]
    architecture = _ARCHITECTURES.get(model_class)
    if architecture is None:
        raise UserError(
            f"--to_gguf: {folder} is {model_class}; it can write {', '.join(_ARCHITECTURES)}. For "
            "others, try llama.cpp's convert_hf_to_gguf.py."
        )

    for key, values in architecture.fixed.items():
        if getattr(config, key) not in values:
            raise UserError(
                f"--to_gguf: {folder} has {key} = {getattr(config, key)!r} in config.json, but "
                f"llama.cpp computes {model_class} only with {values[0]!r}."
            )
    rope = _rope_of(config)
    rope_type = rope.get("rope_type", "default")
    if rope_type not in architecture.rope_types or rope.get("partial_rotary_factor", 1) != 1:
        raise UserError(
            f"--to_gguf: {folder} has the rotary positions {json_text(rope)}; --to_gguf writes "
            f"those of type {', '.join(architecture.rope_types)}, for whole heads."
        )
    return architecture


def _rope_of(config: "PreTrainedConfig") -> JsonObject:
    """Return the settings of rotary positions; empty for a model with learned positions."""
    return dict(getattr(config, "rope_parameters", None) or {})


# --- tensors


class _Weights:
    """The tensors of a model folder, as llama.cpp expects them.

    Attributes:
        outlines: the tensors without their numbers, by llama.cpp's names.

    Raises:
        UserError: if the folder holds no weights, a tensor that llama.cpp's model does not have, or
            one in another dtype than float32, float16 or bfloat16.
    """

    def __init__(
        self, folder: Path, architecture: _Architecture, config: "PreTrainedConfig"
    ) -> None:
        import gguf

        self._architecture = architecture
        self._config = config
        self._sources: dict[str, tuple[Path, str]] = {}
        self.outlines: dict[str, Tensor] = {}

        model_arch = gguf.MODEL_ARCH[architecture.name.upper()]
        names = gguf.get_tensor_name_map(model_arch, config.num_hidden_layers)
        for path, key, stored in _stored_tensors(folder, config):
            name = names.get_name(key, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise UserError(f"--to_gguf: {path} holds {key}, which llama.cpp has no place for.")
            self._sources[name] = path, key
            self.outlines[name] = self._converted(name, key, stored)

        if _EMBEDDINGS not in self.outlines:
            raise UserError(f"--to_gguf: {folder} holds no weights of a model as safetensors.")
        if _rope_of(config).get("rope_type") == "llama3":
            self.outlines[_ROPE_FACTORS] = _rope_factors(config)

    def load(self, name: str) -> Tensor:
        """Load a tensor by llama.cpp's name."""
        if name == _ROPE_FACTORS:
            return self.outlines[name]
        path, key = self._sources[name]
        with safe_open(path, "pt") as file:
            return self._converted(name, key, file.get_tensor(key))

    def _converted(self, name: str, key: str, tensor: Tensor) -> Tensor:
        tensor = self._architecture.convert(key, tensor, self._config)
        is_float32 = tensor.dim() < 2 or name.endswith(_FLOAT32_TENSORS)
        return tensor.float() if is_float32 else tensor


def _stored_tensors(folder: Path, config: "PreTrainedConfig") -> Iterator[tuple[Path, str, Tensor]]:
    """Yield the file and the name of each stored tensor, and the tensor on the meta device."""
    ignored = [*COMPUTED_BUFFERS]
    if config.tie_word_embeddings:
        ignored.append("lm_head.weight")

    for path in weight_files(folder):
        with as_user_error(f"{path} could not be read", first_line), safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a dictionary
                if key.endswith(tuple(ignored)):
                    continue
                values = file.get_slice(key)
                dtype = _DTYPES.get(values.get_dtype())
                if dtype is None:
                    raise UserError(
                        f"--to_gguf: {path} holds {key} as {values.get_dtype()}; it can write "
                        f"{', '.join(_DTYPES)}."
                    )
                yield path, key, torch.empty(values.get_shape(), dtype=dtype, device="meta")


def _rope_factors(config: "PreTrainedConfig") -> Tensor:
    """Return what llama.cpp divides the frequencies of Llama 3's rotary positions by, [D / 2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = 2 * len(scaled)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    factors: Tensor = 1 / (_rope_of(config)["rope_theta"] ** exponents) / scaled
    return factors


def _write(writer: "GGUFWriter", path: Path, weights: _Weights) -> None:
    """Write the file, one tensor after the other."""
    from gguf import GGMLQuantizationType

    # As bytes, because NumPy has no bfloat16.
    types = {dtype: GGMLQuantizationType[name] for name, dtype in _DTYPES.items()}
    for name, outline in weights.outlines.items():
        writer.add_tensor_info(
            name,
            tensor_shape=outline.view(torch.uint8).shape,
            tensor_dtype=np.dtype(np.uint8),
            tensor_nbytes=outline.nbytes,
            raw_dtype=types[outline.dtype],
        )
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name in weights.outlines:
        writer.write_tensor_data(weights.load(name).contiguous().view(torch.uint8).numpy())
    writer.close()


# --- settings


def _add_settings(writer: "GGUFWriter", config: "PreTrainedConfig", weights: _Weights) -> None:
    """Add the sizes of the model, its rotary positions and its dtype."""
    import gguf

    context = config.max_position_embeddings
    window = getattr(config, "sliding_window", None)
    if window:
        # llama.cpp attends to all positions. Up to the window, that is the same.
        context = min(context, window)
    writer.add_context_length(context)
    writer.add_vocab_size(len(weights.outlines[_EMBEDDINGS]))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(len(weights.outlines["blk.0.ffn_up.weight"]))

    heads = config.num_attention_heads
    writer.add_head_count(heads)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if hasattr(config, "conv_L_cache"):
        # A layer without key and value heads is a convolution.
        writer.add_head_count_kv(
            [0 if kind == "conv" else key_heads for kind in config.layer_types]
        )
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(key_heads)

    if hasattr(config, "layer_norm_epsilon"):
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "rms_norm_eps", None) or config.norm_eps)

    rope = _rope_of(config)
    if rope:
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        writer.add_key_length(head_size)
        writer.add_value_length(head_size)
        writer.add_rope_dimension_count(head_size)
        writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])

    file_types = {
        torch.float32: gguf.LlamaFileType.ALL_F32,
        torch.float16: gguf.LlamaFileType.MOSTLY_F16,
        torch.bfloat16: gguf.LlamaFileType.MOSTLY_BF16,
    }
    writer.add_file_type(file_types[weights.outlines[_EMBEDDINGS].dtype])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
