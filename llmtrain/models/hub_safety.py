"""Model folders and hub names as untrusted input.

Their code runs only with ``--trust_remote_code``, and so do compiled kernels of the hub. No pickle
is ever read.
"""

import contextlib
import hashlib
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmtrain.errors import UserError, as_user_error
from llmtrain.files import read_hashed
from llmtrain.json_types import JsonObject
from llmtrain.model_folders import is_adapter

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# For every `from_pretrained`: without it, transformers asks on the terminal whether to run code.
DATA_ONLY = {"trust_remote_code": False}

_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_causal_lm(name: str, **options: object) -> "PreTrainedModel":
    """Load a causal LM from safetensors files.

    It raises whatever transformers raises, too.

    Args:
        name: the folder or hub name of the model.
        options: further arguments of ``from_pretrained``.

    Raises:
        UserError: if the weights are pickles, or if the configuration asks for a kernel of the hub.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # The progress bar would appear in the middle of generated text.
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    # It warns about kernels that are not installed.
    getLogger("transformers.integrations.hub_kernels").setLevel(ERROR)

    refuse_pickles(name)
    options = {**DATA_ONLY, "use_safetensors": True, **options}
    if "attn_implementation" not in options:
        with contextlib.suppress(OSError, ValueError):  # loading the model reports what is wrong
            code = {"trust_remote_code": options["trust_remote_code"]}
            refuse_hub_attention(AutoConfig.from_pretrained(name, **code), name)
    return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(name, **options))


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


def refuse_pickles(name: str) -> None:
    """Raise :class:`UserError` if a model or an adapter has weights only as pickles.

    Reading a pickle can run any code. transformers is told to read models from safetensors files
    only. For an adapter there is no such switch: peft reads a pickle if one file is missing.
    """
    folder = Path(name)
    if not folder.is_dir():
        _refuse_pickled_adapter_of_hub(name)
        return

    weights = _ADAPTER_WEIGHTS if is_adapter(folder) else "*.safetensors"
    if any(folder.glob(weights)):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise _pickled(name, path.name)


def _refuse_pickled_adapter_of_hub(name: str) -> None:
    """Raise :class:`UserError` if a hub name is an adapter without safetensors file."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError
    from transformers.utils.peft_utils import find_adapter_config_file

    # Loading the model reports all other errors.
    with contextlib.suppress(OSError, ValueError):
        if find_adapter_config_file(name) is None:
            return
        try:
            hf_hub_download(name, _ADAPTER_WEIGHTS)
        except EntryNotFoundError:  # also if the hub cannot be reached and the cache lacks the file
            raise _pickled(name, "adapter_model.bin") from None


def _pickled(name: str, file_name: str) -> UserError:
    return UserError(
        f"{name} holds its weights as a pickle ({file_name}), which can run code when it is read; "
        "if you trust it, convert it to safetensors with save_pretrained."
    )


def local_folder(name: str) -> Path:
    """Return the local folder with a model's files.

    If ``name`` is a hub name, the files are downloaded unless the cache has them.

    Raises:
        UserError: if the hub does not provide them.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with as_user_error(f"{name} is no folder, and the hub did not provide it"):
        return Path(snapshot_download(name, allow_patterns=["model*.safetensors", "*.json"]))


def commit_of(name: str) -> str:
    """Return the commit of a model on the hub, or of its copy in the cache if there is no hub.

    It raises whatever the hub's library raises if neither has the model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = hf_hub_download(name, "config.json")
    except EntryNotFoundError:
        path = hf_hub_download(name, "adapter_config.json")
    return Path(path).parent.name


def origin_of(name: str) -> JsonObject:
    """Identify a model: by a hash of the weights and the configuration in its folder.

    A hub name is identified by its commit.
    """
    if Path(name).is_dir():
        files = [*sorted(Path(name).glob("*.safetensors")), *Path(name).glob("config.json")]
        hashes = [read_hashed(path)["sha256"] for path in files]
        return {"sha256": hashlib.sha256("".join(hashes).encode()).hexdigest()}
    return {"name": name, "commit": commit_of(name)}
