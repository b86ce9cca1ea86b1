"""Sources that ``datasets`` loads: data sets of the Hugging Face hub, and folders in its layout."""

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from llmtrain.console import can_show_bars
from llmtrain.data.readers import Record, numbered
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.data.text_files import digest_of, visible_files
from llmtrain.errors import UserError, hub_error
from llmtrain.files import json_text

if TYPE_CHECKING:
    import datasets

# Files of a data set on the hub: SPLIT-00000-of-00001.parquet. Its README.md lists other files.
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.parquet")
_CONFIGURATIONS = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?configs:")


def has_hub_layout(folder: Path) -> bool:
    """Return whether the files of a folder are named as in a data set on the hub."""
    for shards in (folder, folder / "data"):
        if any(_SHARD.fullmatch(path.name) for path in shards.glob("*.parquet")):
            return True
    readme = folder / "README.md"
    return readme.is_file() and bool(_CONFIGURATIONS.match(readme.read_text(errors="replace")))


def folder_source(
    name: str, folder: Path, configuration: str | None, choice: SplitChoice
) -> Source:
    """Return a split of a folder, as ``datasets`` loads it."""
    if configuration == "":
        raise UserError(f"{choice.data_flag} {name}: write FOLDER or FOLDER:CONFIGURATION.")
    load = partial(
        _load_splits,
        name,
        str(folder),
        configuration=configuration,
        revision=None,
        choice=choice,
        failure=f"{choice.data_flag} {name} cannot be loaded",
    )
    source = _split_source(name, load, choice)
    fingerprint = partial(_fingerprint_of_folder, folder, [configuration, choice.split])
    return replace(source, fingerprint=fingerprint)


def _fingerprint_of_folder(folder: Path, selection: list[str | None]) -> str:
    """Hash the names and the content of all files in a folder.

    Args:
        folder: the folder. ``datasets`` ignores its hidden files.
        selection: the configuration and the split that are read.
    """
    digest = hashlib.sha256(json_text(selection).encode())
    for path in sorted(visible_files(folder)):
        relative = path.relative_to(folder)
        digest.update(os.fsencode(relative) + b"\0" + digest_of(path))
    return digest.hexdigest()


def hub_source(name: str, choice: SplitChoice) -> Source:
    """Return a split of a data set on the hub, NAME@REVISION:CONFIGURATION or a part of that."""
    head, colon, configuration = name.partition(":")
    path, at, revision = head.partition("@")
    if not path or (colon and not configuration) or (at and not revision):
        raise UserError(
            f"{choice.data_flag} {name}: write NAME, NAME:CONFIGURATION, NAME@REVISION or "
            "NAME@REVISION:CONFIGURATION."
        )
    if revision and Path(path).is_dir():
        raise UserError(
            f"{choice.data_flag} {name}: {path} is a folder here, which has no revisions; leave "
            f"@{revision} out."
        )
    load = partial(
        _load_splits,
        name,
        path,
        configuration=configuration or None,
        revision=revision or None,
        choice=choice,
        failure=f"{choice.data_flag} {name} is not a file or folder, and the hub answered",
    )
    return _split_source(name, load, choice)


def _split_source(
    name: str, load: Callable[[], "datasets.DatasetDict"], choice: SplitChoice
) -> Source:
    """Return the rows of one split.

    Args:
        name: the name of the source.
        load: returns all splits; it is called once.
        choice: the split to read.
    """
    load_once = functools.cache(load)
    split = "" if choice.split == "train" else f"{choice.split} "
    source = dataset_source(
        name,
        load=lambda: load_once()[choice.split],
        place=f"{name}, {split}row",
        flag=choice.data_flag,
    )
    return replace(
        source,
        has_splits=True,
        other_splits=lambda: [str(split) for split in load_once() if split != choice.split],
    )


def dataset_source(
    name: str, load: Callable[[], "datasets.Dataset"], place: str, flag: str = "--dataset"
) -> Source:
    """Return the rows of a ``datasets.Dataset``.

    Args:
        name: the name of the source.
        load: returns the data set, the same one each time.
        place: what error messages write before the number of a row.
        flag: the flag that names the source.
    """

    def fingerprint() -> str:
        return hashlib.sha256(load()._fingerprint.encode()).hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        return numbered(dataset, place, field)

    return Source(name, fingerprint, records, flag=flag, has_artificial_nulls=True)


def _load_splits(
    name: str,
    path: str,
    *,
    configuration: str | None,
    revision: str | None,
    choice: SplitChoice,
    failure: str,
) -> "datasets.DatasetDict":
    """Load the splits of a data set on the hub or in a folder.

    Args:
        name: the name in ``--dataset`` or ``--eval_dataset``.
        path: the part of it that is the name on the hub, or the path of the folder.
        configuration: the configuration; ``None`` for the only one.
        revision: a branch, tag or commit on the hub; ``None`` for the newest commit.
        choice: the split that it must have.
        failure: the beginning of the error message if it cannot be loaded.

    Raises:
        UserError: if there is no such data set, configuration or split.
    """
    import datasets  # slow to import, and needed only here

    if not can_show_bars():
        datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration, revision=revision)
    except Exception as error:  # of many types
        # A file that cannot be parsed is the cause of "An error occurred while generating ...".
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = hub_error(cause or error)
        if isinstance(error, ValueError):
            reason = _wrong_configuration(path, configuration, revision) or reason
        raise UserError(f"{failure}: {reason}") from None

    if choice.split not in splits:
        similar = [split for split in splits if choice.split in split]
        example = [*similar, *splits, choice.split][0]
        raise UserError(
            f"{choice.data_flag} {name} has no split '{choice.split}', but {', '.join(splits)}; "
            f"choose one with {choice.split_flag} {example}."
        )
    return cast("datasets.DatasetDict", splits)


def _wrong_configuration(path: str, configuration: str | None, revision: str | None) -> str | None:
    """Return that the data set has other configurations, or ``None`` if that is not the error."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(path, revision=revision)
    except Exception:  # the first error says more
        return None
    if configuration in names or (configuration is None and len(names) < 2):
        return None
    missing = "it has several configurations"
    if configuration:
        missing = f"it has no configuration '{configuration}'"
    head = f"{path}@{revision}" if revision else path
    return f"{missing}; choose one of {', '.join(names)}, as {head}:{names[0]}."
