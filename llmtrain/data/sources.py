"""Open a source: what a name in ``--dataset`` stands for, or the records of a recipe.

By the fingerprint of a source, rows that were made from it are found in the cache without reading
its records.
"""

import contextlib
import functools
import glob
import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from llmtrain.console import can_show_bars
from llmtrain.data import builtin
from llmtrain.data.readers import (
    READABLE,
    Fields,
    Record,
    Source,
    kind_of,
    numbered,
    read_file,
    split_suffix,
    suffix_of,
)
from llmtrain.errors import UserError, first_line, hub_error
from llmtrain.file_digests import file_digest
from llmtrain.files import json_text, local_path
from llmtrain.once_per_machine import once_per_machine

if TYPE_CHECKING:
    import datasets

# What a recipe passes: a function that yields records, a datasets.Dataset, or a list.
PythonRecords: TypeAlias = Callable[[], Iterable[str | Fields]] | Iterable[str | Fields]

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# How files that are not read become files that are, by their suffix.
_CONVERSIONS = {
    ".tsv": "pandas.read_csv('{path}', sep='\\t', dtype=str, keep_default_na=False)"
    ".to_csv('{path.stem}.csv', index=False)",
    # Also of folders of save_to_disk.
    ".arrow": "datasets.load_dataset('arrow', data_files='{path.parent}/*.arrow', split='train')"
    ".to_parquet('{path.parent.name}.parquet')",
    ".bz2": "bunzip2 --keep '{path}'",
    ".xz": "unxz --keep '{path}'",
}
# Files of a data set on the hub: SPLIT-00000-of-00001.parquet. Its README.md lists other files.
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.parquet")
_CONFIGURATIONS = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?configs:")
# NAME@REVISION:CONFIGURATION. The name may begin with the one of a user, and a slash.
_HUB_NAME = re.compile(r"(\w[\w.-]*(?:/[\w.-]+)?)(?:@([^:]+))?(?::(.+))?")


@dataclass(frozen=True)
class SplitChoice:
    """The flags that say what is read of a data set.

    Attributes:
        split: the split to read.
        is_named: whether a folder of files is read as a data set with splits, because the user
            named a split.
        data_flag: the flag that names the data set.
        split_flag: the flag that names the split.
        text_suffixes: the suffixes of files that are read as text, whatever they are.
    """

    split: str = "train"
    is_named: bool = False
    data_flag: str = "--dataset"
    split_flag: str = "--dataset_train_split"
    text_suffixes: Sequence[str] = ()


def open_source(name: str, choice: SplitChoice = SplitChoice()) -> Source:
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
        return _builtin_source(name, choice.data_flag)

    try:
        path = Path(local_path(name, f"{choice.data_flag} "))
        source = _local_source(name, path.expanduser(), choice)
    except (OSError, RuntimeError) as error:
        # The name is too long, or it begins with a ~user that does not exist.
        raise UserError(f"{choice.data_flag} {name[:80]}: {first_line(error)}.") from None
    if source is not None:
        return source

    match = _HUB_NAME.fullmatch(name)
    if match is None or kind_of(path, choice.text_suffixes) or Path(match[1]).exists():
        raise UserError(
            f"{choice.data_flag} {name}: no file ending in {READABLE} was found; check the path "
            f"from {Path.cwd()}, read other files as text with --text_suffixes, or name a data set "
            "of the hub as NAME@REVISION:CONFIGURATION."
        )
    return _split_source(name, match[1], choice, revision=match[2], configuration=match[3])


def _builtin_source(name: str, flag: str) -> Source:
    if name not in builtin.CORPORA:
        names = ", ".join(builtin.CORPORA)
        raise UserError(f"{flag} {name} does not exist; use one of {names}.")
    return Source(
        name,
        fingerprint=lambda: builtin.fingerprint(name),
        records=lambda _: numbered(builtin.CORPORA[name](), f"{name}, document"),
        flag=flag,
    )


# --- files and folders


def _local_source(name: str, path: Path, choice: SplitChoice) -> Source | None:
    """Return the source in a file, folder or glob, or ``None`` if there is none."""
    if path.is_dir() and (choice.is_named or _has_hub_layout(path)):
        return _split_source(name, str(path), choice)

    source = _file_source(name, path, choice)
    if source is not None:
        return source

    head, _, configuration = str(path).rpartition(":")
    if head and Path(head).is_dir():
        return _split_source(name, head, choice, configuration or None)
    return None


def _file_source(name: str, path: Path, choice: SplitChoice) -> Source | None:
    """Return the records of a file, folder or glob; ``None`` if no file can be read."""
    if path.is_file():
        matches = [path]
    elif path.is_dir():
        matches = [file for file in _visible_files(path) if file.name not in _DESCRIPTIONS]
    else:
        # Path.glob takes no absolute patterns.
        names = set(glob.iglob(str(path), recursive=True))  # noqa: PTH207
        matches = sorted(match for match in map(Path, names) if match.is_file())

    kinds = {file: kind_of(file, choice.text_suffixes) for file in matches}
    if path.is_dir() and not {None, ".txt", ".md"}.issuperset(kinds.values()):
        # Next to records, a README.md describes them. Next to texts, it is one of them.
        kinds = {file: kind for file, kind in kinds.items() if file.name.lower() != "readme.md"}
    unread = [file for file, kind in kinds.items() if kind is None]
    for file in unread:
        conversion = _CONVERSIONS.get(split_suffix(file)[0])
        if conversion is not None:
            raise UserError(
                f"{choice.data_flag} {name}: '{suffix_of(file)}' files are not read; convert them "
                f"to JSONL, CSV or Parquet: {conversion.format(path=file)}"
            )
    readable = {file: kind for file, kind in kinds.items() if kind is not None}
    if not readable:
        return None

    def records(field: str | None) -> Iterator[Record]:
        for file, kind in readable.items():
            yield from read_file(file, kind, field)

    # The fingerprint has no names. So a data set may be moved.
    labels = {file: kind + split_suffix(file)[1] for file, kind in readable.items()}
    return Source(
        name,
        fingerprint=lambda: _digest_of_files(labels),
        records=records,
        flag=choice.data_flag,
        has_artificial_nulls=".parquet" in readable.values(),
        unread_files=Counter(map(suffix_of, unread)),
    )


def _visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, but no hidden ones, such as those of git."""
    files = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            files.append(path)
    return files


def _digest_of_files(labels: Mapping[Path, str], selection: str = "") -> str:
    """Hash the content of files with a label for each, and what is read of them."""
    digest = hashlib.sha256(selection.encode())
    for path, label in labels.items():
        digest.update(os.fsencode(label) + b"\0" + file_digest(path))
    return digest.hexdigest()


# --- data sets that ``datasets`` loads


def _split_source(
    name: str,
    path: str,
    choice: SplitChoice,
    configuration: str | None = None,
    revision: str | None = None,
) -> Source:
    """Return a split of a data set on the hub or in a folder. It is loaded when it is needed.

    Args:
        name: the name of the source.
        path: the part of it that is the name on the hub, or the path of the folder.
        choice: the split to read.
        configuration: the configuration; ``None`` for the only one.
        revision: a branch, tag or commit on the hub; ``None`` for the newest commit.
    """

    @functools.cache
    def splits() -> "datasets.DatasetDict":
        loaded = _load_splits(path, configuration, revision, place=f"{choice.data_flag} {name}")
        if choice.split not in loaded:
            raise UserError(
                f"{choice.data_flag} {name} has no split '{choice.split}', but "
                f"{', '.join(loaded)}; choose one with {choice.split_flag}."
            )
        return loaded

    split = "" if choice.split == "train" else f"{choice.split} "
    source = replace(
        _dataset_source(name, lambda: splits()[choice.split], place=f"{name}, {split}row"),
        flag=choice.data_flag,
        has_splits=True,
        other_splits=lambda: [str(split) for split in splits() if split != choice.split],
    )
    folder = Path(path)
    if not folder.is_dir():
        return source

    def fingerprint() -> str:
        labels = {file: str(file.relative_to(folder)) for file in _visible_files(folder)}
        return _digest_of_files(labels, f"{configuration} {choice.split}")

    return replace(source, fingerprint=fingerprint)


def _dataset_source(name: str, load: Callable[[], "datasets.Dataset"], place: str) -> Source:
    """Return the rows of a ``datasets.Dataset``.

    Args:
        name: the name of the source.
        load: returns the data set, the same one each time.
        place: what error messages write before the number of a row.
    """

    def fingerprint() -> str:
        return hashlib.sha256(load()._fingerprint.encode()).hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        return numbered(dataset, place, field)

    return Source(name, fingerprint, records, has_artificial_nulls=True)


def _has_hub_layout(folder: Path) -> bool:
    """Return whether the files of a folder are named as in a data set on the hub."""
    files = [*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]
    if any(_SHARD.fullmatch(file.name) for file in files):
        return True
    readme = folder / "README.md"
    return readme.is_file() and bool(_CONFIGURATIONS.match(readme.read_text(errors="replace")))


def _load_splits(
    path: str, configuration: str | None, revision: str | None, place: str
) -> "datasets.DatasetDict":
    """Load the splits of a data set on the hub or in a folder.

    Raises:
        UserError: with the place (the flag and the name), if there is no such data set or
            configuration.
    """
    import datasets  # slow to import, and needed only here

    if not can_show_bars():
        datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(path, configuration, revision=revision)
    except Exception as error:  # of many types
        failure = "is not a file or folder, and the hub answered"
        if Path(path).is_dir():
            failure = "cannot be loaded"
        # A file that cannot be parsed is the cause of "An error occurred while generating ...".
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetsError) else None
        reason = hub_error(cause or error).rstrip(".")
        if isinstance(error, ValueError):  # also if a configuration is missing or wrong
            with contextlib.suppress(Exception):  # the first error says more
                names = datasets.get_dataset_config_names(path, revision=revision)
                reason += f"; the configurations, for NAME:CONFIGURATION, are {', '.join(names)}"
        raise UserError(f"{place} {failure}: {reason}.") from None
    return cast("datasets.DatasetDict", splits)


# --- records of a recipe


def records_source(records: PythonRecords, fingerprint: str | None = None) -> Source:
    """Return the records that a recipe has in Python.

    Args:
        records: a ``datasets.Dataset``, a function that yields texts or dictionaries of fields, or
            a list of these. They must always be the same, in the same order.
        fingerprint: a name that the recipe changes whenever it changes the records. Without it, all
            records are read at each start, to notice changes; see :func:`once_per_machine`.

    Raises:
        UserError: if ``records`` is something else, or if it can be read only once.
    """
    datasets = sys.modules.get("datasets")  # whoever has such an object has imported its module
    if datasets is not None and isinstance(records, datasets.Dataset):
        source = _dataset_source("records", lambda: records, place="records, row")
    else:
        is_streamed = datasets is not None and isinstance(records, datasets.IterableDataset)
        source = _iterated_source(records, is_streamed)
    if fingerprint is None:
        return source
    # Other recipes may use the same name.
    digest = hashlib.sha256(f"{_definition_of(records)} {fingerprint}".encode()).hexdigest()
    return replace(source, fingerprint=lambda: digest)


def _iterated_source(records: PythonRecords, is_streamed: bool) -> Source:
    """Return the records that a function or an iteration yields.

    If they come from a ``datasets.IterableDataset``, nulls may stand for absent keys.
    """
    if callable(records):
        function = records
    elif is_streamed or isinstance(records, list | tuple):
        function = functools.partial(iter, records)
    else:
        raise UserError(
            f"tokenize(records=...) cannot read a {type(records).__name__}, because it reads "
            "records several times, in one order; pass a datasets.Dataset, a list of texts or of "
            "dictionaries, or a function that returns or yields them."
        )
    name = getattr(records, "__name__", "records")  # of a function; some callables have none

    def digest_of_records() -> str:
        digest = hashlib.sha256()
        for record in function():
            digest.update(json_text(record, default=repr).encode() + b"\n")
        return digest.hexdigest()

    @functools.cache
    def fingerprint() -> str:
        if isinstance(records, list | tuple):  # which is read at once
            return digest_of_records()
        return once_per_machine(f"fingerprint of {_definition_of(records)}", digest_of_records)

    return Source(
        name,
        fingerprint,
        records=lambda field: numbered(function(), f"{name}, record", field),
        has_artificial_nulls=is_streamed,
    )


def _definition_of(records: object) -> str:
    """Return where a function is defined, or the class of something else."""
    code = getattr(records, "__code__", None)
    if code is None:
        return type(records).__qualname__
    return f"{code.co_filename}:{code.co_firstlineno}"
