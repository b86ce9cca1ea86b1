"""The dtypes in which the folders of models hold their weights."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from llmtrain.errors import UserError, as_user_error, first_line
from llmtrain.files import JsonObject, read_object
from llmtrain.model_folders import weight_files

# The dtypes that a finished model may have, by the names of the flags and of config.json.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


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

    if read_object(folder / "config.json").get("quantization_config"):
        return StoredDtypes(torch.bfloat16)
    dtypes = [*by_name.values()] or [torch.float32]
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
                f"of {dtype_name(tensor.dtype)}; use llmtrain export --dtype bfloat16."
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
    name = dtype_name(dtype)

    def rename(part: JsonObject) -> JsonObject:
        for key in ("dtype", "torch_dtype"):  # the latter before transformers 5
            if isinstance(part.get(key), str):
                part[key] = name
        return part

    changed = json.loads(json.dumps(config), object_hook=rename)
    return {**changed, "dtype": name}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ``config.json``."""
    return str(dtype).removeprefix("torch.")
