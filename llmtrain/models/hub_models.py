"""Models in a folder or on the hub: loading one, its files, and its commit."""

import contextlib
import hashlib
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmtrain.errors import as_user_error
from llmtrain.files import read_hashed
from llmtrain.json_types import JsonObject
from llmtrain.models.hub_safety import DATA_ONLY, refuse_hub_attention, refuse_pickles

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    revision = str(options.get("revision", "main"))
    refuse_pickles(name, revision)
    options = {**DATA_ONLY, "use_safetensors": True, **options}
    if "attn_implementation" not in options:
        with contextlib.suppress(OSError, ValueError):  # loading the model reports what is wrong
            code = {"trust_remote_code": options["trust_remote_code"]}
            configuration = AutoConfig.from_pretrained(name, revision=revision, **code)
            refuse_hub_attention(configuration, name)
    return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(name, **options))


def local_folder(name: str, revision: str = "main") -> Path:
    """Return the local folder with a model's files.

    If ``name`` is a hub name, the files are downloaded unless the cache has them. ``revision`` is a
    branch, tag or commit there.

    Raises:
        UserError: if the hub does not provide them.
    """
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with as_user_error(f"{name} is no folder, and the hub did not provide it"):
        patterns = ["model*.safetensors", "*.json"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def commit_of(name: str, revision: str = "main") -> str:
    """Return the commit of a branch or tag on the hub, or in the cache if there is no hub.

    It raises whatever the hub's library raises if neither has the model.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        path = hf_hub_download(name, "config.json", revision=revision)
    except EntryNotFoundError:
        path = hf_hub_download(name, "adapter_config.json", revision=revision)
    return Path(path).parent.name


def origin_of(name: str, revision: str = "main") -> JsonObject:
    """Identify a model: by a hash of the weights and the configuration in its folder.

    A hub name is identified by the commit of its revision.
    """
    if Path(name).is_dir():
        files = [*sorted(Path(name).glob("*.safetensors")), *Path(name).glob("config.json")]
        hashes = [read_hashed(path)["sha256"] for path in files]
        return {"sha256": hashlib.sha256("".join(hashes).encode()).hexdigest()}
    return {"name": name, "commit": commit_of(name, revision)}
