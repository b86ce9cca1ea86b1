"""Model folders and hub names as untrusted input.

Their code runs only with ``--trust_remote_code``, and so do compiled kernels of the hub. No pickle
is ever read.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from llmtrain.errors import UserError
from llmtrain.model_folders import is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# For every `from_pretrained`: without it, transformers asks on the terminal whether to run code.
DATA_ONLY = {"trust_remote_code": False}

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def is_hub_kernel(attention: str | None) -> bool:
    """Return whether transformers would download an attention as a compiled kernel from the hub."""
    return "/" in (attention or "")


def refuse_hub_attention(config: "PreTrainedConfig", name: str) -> None:
    """Raise :class:`UserError` if a model's configuration asks for a compiled kernel of the hub.

    Args:
        config: the configuration of the model, or of a part of it.
        name: the folder or hub name of the model.
    """
    attention: str | None = config._attn_implementation
    if is_hub_kernel(attention):
        raise UserError(
            f"{name}: its config.json asks for the attention {attention}, a program on the hub; "
            "choose another one with --attn_implementation sdpa, or remove it from config.json."
        )
    for key in config.sub_configs:
        part = getattr(config, key, None)
        if part is not None:
            refuse_hub_attention(part, name)


def refuse_pickles(name: str, revision: str = "main") -> None:
    """Raise :class:`UserError` if a model or an adapter has weights only as pickles.

    Reading a pickle can run any code. transformers is told to read models from safetensors files
    only. For an adapter there is no such switch: peft reads a pickle if one file is missing.
    """
    folder = Path(name)
    if not folder.is_dir():
        _refuse_pickled_adapter_of_hub(name, revision)
        return

    weights = _ADAPTER_WEIGHTS if is_adapter(folder) else "*.safetensors"
    if any(folder.glob(weights)):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise _pickled(name, path.name)


def _refuse_pickled_adapter_of_hub(name: str, revision: str) -> None:
    """Raise :class:`UserError` if a hub name is an adapter without safetensors file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils.peft_utils import find_adapter_config_file

    # Loading the model reports all other errors.
    with contextlib.suppress(OSError, ValueError):
        if find_adapter_config_file(name, revision=revision) is None:
            return
        try:
            hf_hub_download(name, _ADAPTER_WEIGHTS, revision=revision)
        except EntryNotFoundError:  # also if the hub cannot be reached and the cache lacks the file
            raise _pickled(name, "adapter_model.bin") from None


def _pickled(name: str, file_name: str) -> UserError:
    return UserError(
        f"{name} holds its weights as a pickle ({file_name}), which can run code when it is read; "
        "if you trust it, convert it to safetensors with save_pretrained."
    )
