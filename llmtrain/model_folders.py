"""Which folder the name of a model refers to, and which of its files may be read.

A model folder is untrusted input. transformers and peft read what its JSON files name, also in
other folders, and they read pickles, which can run code. So a folder is checked before they see it.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmtrain.errors import UserError, as_user_error, first_line, short_repr
from llmtrain.files import JsonObject, local_path, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# For every `from_pretrained`: without it, transformers asks on the terminal whether to run code.
DATA_ONLY = {"trust_remote_code": False}
# The file with the weights of an adapter, as peft calls it.
ADAPTER_WEIGHTS = "adapter_model.safetensors"
# Patterns of the files of tokenizers, new and old.
_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
# Entries of JSON files that make transformers or peft read further files, in any folder.
_NAMES_OF_FILES = {
    "config*.json": ("transformers_weights",),
    "tokenizer_config.json": ("fast_tokenizer_files", "gguf_file", "merges", "vocab"),
    "adapter_config.json": ("adapters", "prompt_tuning_init_state_dict_path", "shadow_model"),
}
_HUB_SECONDS = 100.0  # for the hub to send something


def limit_hub_waits() -> None:
    """Let requests to the hub fail if no answer comes. Its library has no time limit for most."""
    from huggingface_hub import get_session

    def limit(request: Any) -> None:
        seconds = request.extensions["timeout"]
        for phase, own_limit in seconds.items():
            seconds[phase] = own_limit or _HUB_SECONDS

    get_session().event_hooks["request"].append(limit)


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / "adapter_config.json").exists()


def model_folder(name: str) -> str:
    """Return the model folder that a name refers to.

    For a run folder, that is the finished model, or else the model of the newest checkpoint. For a
    checkpoint, it is its model. A model folder or a hub name is returned as it is.

    Raises:
        UserError: if there is no such folder, or if it holds no model yet.
    """
    folder = Path(name)
    if not folder.is_dir():
        if name.startswith((".", "/", "~")):
            raise UserError(f"{name} is not a folder; check the path.")
        return local_path(name)
    # The numbers in the names are padded with zeros, so the newest checkpoint comes first.
    checkpoints = sorted(folder.glob("checkpoints/step-*/model"), reverse=True)
    for candidate in [folder, folder / "model", *checkpoints]:
        if (candidate / "config.json").exists() or is_adapter(candidate):
            return name if candidate == folder else str(candidate)
    raise UserError(f"{name} holds no model yet: no config.json, no model/ and no checkpoint.")


def tokenizer_folder(name: str) -> str:
    """Return the folder whose tokenizer a name refers to.

    For a run or a checkpoint, that is its model folder. Any other name is returned as it is.

    Raises:
        UserError: if a run holds no model yet.
    """
    folder = Path(name)
    holds_models = (folder / "model").is_dir() or (folder / "checkpoints").is_dir()
    if holds_models and not (folder / "tokenizer.json").exists():
        return model_folder(name)
    return local_path(name)


def folder_with(name: str, file: str, revision: str = "main") -> Path:
    """Return the folder that a file of a model is in, for a hub name that of its snapshot."""
    from huggingface_hub import hf_hub_download

    if not Path(name).exists():
        with contextlib.suppress(OSError, ValueError):  # the hub does not have it
            return Path(hf_hub_download(name, file, revision=revision)).parent
    return Path(name)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder holds the files of a tokenizer."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def tokenizer_of(name: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer of a model folder or hub name.

    Raises:
        UserError: if no tokenizer can be loaded.
    """
    from transformers import AutoTokenizer

    folder = Path(name)
    # Without any file, AutoTokenizer makes an empty tokenizer for some families.
    if folder.is_dir() and not has_tokenizer(folder):
        raise UserError(
            f"{name} holds no tokenizer, so it cannot write text; copy the files of one there, "
            "unless its rows were made without one."
        )
    check_names_of_files(folder_with(name, "tokenizer_config.json"))
    with as_user_error(f"{name}: no model with a tokenizer could be loaded"):
        return cast("PreTrainedTokenizerFast", AutoTokenizer.from_pretrained(name, **DATA_ONLY))


def is_of_checkpoint(folder: Path) -> bool:
    """Return whether a model folder belongs to a checkpoint, not to a finished run."""
    return folder.absolute().parent.name.startswith("step-")


def folder_beside(folder: Path, kind: str) -> Path:
    """Return where a changed copy of a model folder is written, such as ``merged`` of a run.

    It is never in a checkpoint, which holds only the files of its manifest.
    """
    if folder.name != "model":
        folder = folder.absolute()
        return folder.with_name(f"{folder.name}-{kind}")
    if is_of_checkpoint(folder):
        checkpoint = folder.absolute().parent
        return checkpoint.parent.parent / f"{kind}-{checkpoint.name}"
    return folder.with_name(kind)


def check_model_files(folder: Path) -> None:
    """Check the files of a model or an adapter, which transformers or peft is to load.

    Raises:
        UserError: if they would read a pickle, or a file outside the folder, or if
            ``generation_config.json`` is wrong.
    """
    check_names_of_files(folder)
    stop_token_ids(folder)
    has_weights = bool(weight_files(folder))
    if is_adapter(folder):
        # peft reads a pickle if this file is missing. There is no switch for that.
        has_weights = (folder / ADAPTER_WEIGHTS).exists()
    for path in sorted(folder.glob("*")):
        # A class of transformers reads this one whatever is next to it.
        if path.suffix in _PICKLES and (not has_weights or path.name == "spk_dict.pt"):
            raise UserError(
                f"{folder} holds its weights as a pickle ({path.name}), which can run code when it "
                "is read; if you trust it, convert it to safetensors with save_pretrained."
            )


def check_names_of_files(folder: Path) -> None:
    """Raise :class:`UserError` if a JSON file names other files, which a library would read."""
    for pattern, keys in _NAMES_OF_FILES.items():
        for path in folder.glob(pattern):
            settings = read_object(path)
            for key in keys:
                if settings.get(key) not in (None, "mirror"):  # a shadow model without files
                    raise UserError(
                        f"{path}: the entry {key} names other files, which are not read; remove "
                        "it, or use another model."
                    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that transformers would load. A folder may hold other tensors, too.

    Raises:
        UserError: if the index cannot be read, or names anything but safetensors files of the
            folder.
    """
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))

    weight_map: Any = _read_settings(index).get("weight_map")
    values = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
    names = {str(value) for value in values}
    unknown = names - {path.name for path in folder.glob("*.safetensors")}
    if unknown:
        raise UserError(
            f"{index} names {short_repr(min(unknown))}, which is no safetensors file of its "
            "folder; download the model again, or use another one."
        )
    return [folder / name for name in sorted(names)]


def stop_token_ids(folder: Path) -> list[int]:
    """Return the tokens at which a model stops generating, from its ``generation_config.json``.

    Raises:
        UserError: if the file is wrong.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return []
    eos_token_id = _read_settings(path).get("eos_token_id")
    token_ids = as_token_ids(eos_token_id)
    if any(type(token_id) is not int for token_id in token_ids):
        raise UserError(
            f"{path}: eos_token_id is {short_repr(eos_token_id)}; write the number of a token, or "
            "a list of such numbers."
        )
    return token_ids


def as_token_ids(eos_token_id: "int | list[int] | None") -> list[int]:
    """Return the tokens in an ``eos_token_id``, which transformers stores as a number or a list."""
    if eos_token_id is None:
        return []
    return eos_token_id if isinstance(eos_token_id, list) else [eos_token_id]


def vocabulary_of(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the largest token id, plus 1. Ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def _read_settings(path: Path) -> JsonObject:
    """Return the JSON object in a file of a model.

    Raises:
        UserError: if it holds none.
    """
    with as_user_error(f"{path} is no JSON object", first_line):
        return {**json.loads(path.read_text(encoding="utf-8"))}
