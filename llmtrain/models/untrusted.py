"""Model folders and hub names: input that nobody has vouched for.

No code of theirs is run unless ``--trust_remote_code`` says so, and no pickle is read.
"""

import hashlib
from logging import ERROR, getLogger
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmtrain.errors import UserError, refused_as
from llmtrain.files import read_hashed
from llmtrain.types import Facts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DATA_ONLY = {
    "trust_remote_code": False
}  # for every `from_pretrained`: else transformers asks on the terminal
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def load_causal_lm(name: str, **options: object) -> "PreTrainedModel":
    """Load a model from safetensors. Raises :class:`UserError` for pickles, and what transformers raises."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # it would stand in the middle of a text
    getLogger("transformers.integrations.hub_kernels").setLevel(
        ERROR
    )  # it tells of kernels that are not installed
    refuse_pickles(name)
    options = {**DATA_ONLY, "use_safetensors": True, **options}
    return cast("PreTrainedModel", AutoModelForCausalLM.from_pretrained(name, **options))


def refuse_pickles(name: str) -> None:
    """Raise :class:`UserError` for a folder whose weights are pickles alone: reading one can run any code."""
    folder = Path(name)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLES:
            raise UserError(
                f"{name} holds its weights as a pickle ({path.name}), which can run code when it is read, and not as "
                "safetensors; save it again with save_pretrained where you trust it."
            )


def local_folder(name: str) -> Path:
    """Return where the files of a model are: the folder itself, or the hub's snapshot, downloaded where need be."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    with refused_as(f"{name} is no folder, and could not be had from the hub"):
        return Path(snapshot_download(name, allow_patterns=["model*.safetensors", "*.json"]))


def origin_of(name: str, trust_remote_code: bool = False) -> Facts:
    """Return which model a name stands for: the hash of a folder's weights and configuration, or the hub's commit."""
    if Path(name).is_dir():
        files = [*sorted(Path(name).glob("*.safetensors")), *Path(name).glob("config.json")]
        hashes = [read_hashed(path)["sha256"] for path in files]
        return {"sha256": hashlib.sha256("".join(hashes).encode()).hexdigest()}
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return {"name": name, "commit": getattr(config, "_commit_hash", None)}
