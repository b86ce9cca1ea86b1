"""The source that a name in ``--dataset`` or ``--eval_dataset`` stands for."""

from functools import partial
from pathlib import Path

from llmtrain.data import builtin
from llmtrain.data.file_sources import file_source, found_source, saved_files, saved_splits
from llmtrain.data.hub import folder_source, has_hub_layout, hub_source
from llmtrain.data.readers import READABLE, is_readable, numbered
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.errors import UserError, first_line
from llmtrain.files import local_path

_TRAIN_SPLIT = SplitChoice()


def open_source(name: str, choice: SplitChoice = _TRAIN_SPLIT) -> Source:
    """Return the source with a name in ``--dataset`` or ``--eval_dataset``.

    A name that is neither a path nor builtin is taken for a data set on the Hugging Face hub. The
    hub is asked only when its records are read.

    Args:
        name: a file, a folder, a glob, a builtin data set, or a data set on the hub, which may be
            followed by ``@REVISION`` and ``:CONFIGURATION``.
        choice: the split to read, and the flag that names the source.

    Raises:
        UserError: if there is no such path or builtin data set.
    """
    if name.startswith("builtin:"):
        return _builtin(name, choice)

    try:
        source = _local_source(local_path(name, f"{choice.data_flag} "), choice)
    except (OSError, RuntimeError) as error:
        # The name is too long, or it begins with a ~user that does not exist.
        raise UserError(f"{choice.data_flag} {name[:80]}: {first_line(error)}.") from None

    if source is not None:
        return source
    if _looks_local(name, choice):
        raise UserError(
            f"{choice.data_flag} {name}: no file ending in {READABLE} was found; check the path "
            f"from {Path.cwd()}, or read other files as text with --text_suffixes."
        )
    return hub_source(name, choice)


def _builtin(name: str, choice: SplitChoice) -> Source:
    if name not in builtin.CORPORA:
        names = ", ".join(builtin.CORPORA)
        raise UserError(f"{choice.data_flag} {name} does not exist; use one of {names}.")
    make = builtin.CORPORA[name]
    return Source(
        name,
        fingerprint=partial(builtin.fingerprint, name),
        records=lambda _: numbered(make(), f"{name}, document"),
        flag=choice.data_flag,
    )


def _local_source(name: str, choice: SplitChoice) -> Source | None:
    """Return the source in a file, folder or glob, or ``None`` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return saved_splits(name, path, choice)
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return file_source(name, saved_files(path), choice)
        if choice.is_named or has_hub_layout(path):
            return folder_source(name, path, None, choice)

    source = found_source(name, choice)
    if source is not None:
        return source

    head, _, configuration = name.rpartition(":")
    folder = Path(head).expanduser()
    if head and folder.is_dir():
        return folder_source(name, folder, configuration, choice)
    return None


def _looks_local(name: str, choice: SplitChoice) -> bool:
    """Return whether a name can only be a path."""
    return (
        is_readable(Path(name), choice.text_suffixes)
        or name.startswith((".", "/", "~"))
        or any(character in name for character in "*?[")
        or Path(name).exists()
    )
