"""Which folder the name of a model refers to: a run's, a checkpoint's or a model's."""

from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.files import local_path, read_object


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / "adapter_config.json").exists()


def note_on_base(folder: Path) -> str:
    """Return what to change before an adapter is published whose base is a folder of this machine.

    The text is empty for an adapter whose base is on the hub, and for a model.
    """
    base = str(read_object(folder / "adapter_config.json").get("base_model_name_or_path", ""))
    if not Path(base).is_absolute():
        return ""
    return (
        f"{folder}/adapter_config.json names its base by a path of this machine, {base}; before "
        "you publish the adapter, set base_model_name_or_path there to the name of the base on the "
        "hub, or publish the merged model: llmtrain export --merge"
    )


def holds_model(folder: Path) -> bool:
    """Return whether a folder holds a model, or an adapter."""
    return (folder / "config.json").exists() or is_adapter(folder)


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
    if holds_model(folder):
        return name

    # The numbers in the names are padded with zeros, so the newest checkpoint comes first.
    checkpoints = sorted(folder.glob("checkpoints/step-*/model"), reverse=True)
    for candidate in [folder / "model", *checkpoints]:
        if holds_model(candidate):
            return str(candidate)
    raise UserError(f"{name} holds no model yet: no config.json, no model/ and no checkpoint.")


def tokenizer_folder(name: str) -> str:
    """Return the folder whose tokenizer a name refers to.

    For a run or a checkpoint, that is its model folder. Any other name is returned as it is.

    Raises:
        UserError: if a run holds no model yet.
    """
    folder = Path(name)
    holds_models = (folder / "model").is_dir() or (folder / "checkpoints").is_dir()
    has_tokenizer = (folder / "tokenizer.json").exists()
    return model_folder(name) if holds_models and not has_tokenizer else local_path(name)


def is_of_checkpoint(folder: Path) -> bool:
    """Return whether a model folder belongs to a checkpoint, not to a finished run."""
    return folder.absolute().parent.name.startswith("step-")
