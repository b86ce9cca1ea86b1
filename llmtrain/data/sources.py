"""Sources of records: files, the running Python, a data set on the Hugging Face hub, or a function.

A source has a fingerprint, by which rows that were made from it are found in the cache without
reading its records.
"""

import functools
import glob
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from llmtrain.console import can_show_bars
from llmtrain.data import builtin
from llmtrain.data.cache import file_digest
from llmtrain.data.readers import (
    READABLE,
    Record,
    count_records,
    has_artificial_nulls,
    is_readable,
    numbered,
    read_file,
    shown,
    suffix_of,
)
from llmtrain.errors import UserError, first_line, hub_error
from llmtrain.files import json_text

if TYPE_CHECKING:
    import datasets

Fields: TypeAlias = dict[str, Any]  # the fields of a record, as they are in its source
RecordFunction: TypeAlias = Callable[[], Iterable[str | Fields]]
# What a recipe with its own data passes: a function that yields them, a datasets.Dataset, a list.
PythonRecords: TypeAlias = RecordFunction | Iterable[str | Fields]

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# Files of a data set on the hub: SPLIT-00000-of-00001.parquet. Its README.md lists other files.
_SHARD = re.compile(r".+-\d{5}-of-\d{5}\.parquet")
_CONFIGURATIONS = re.compile(r"\A---\s*\n(?:(?!---).*\n)*?configs:")


@dataclass(frozen=True)
class SplitChoice:
    """The split that is read of a data set that has splits, and the flags that it comes from.

    Attributes:
        data_flag: the flag that names the data set.
        split_flag: the flag that names the split.
        default: the split to read if the user named none.
        value: the split that the user named.
    """

    data_flag: str = "--dataset"
    split_flag: str = "--dataset_train_split"
    default: str = "train"
    value: str | None = None

    @property
    def split(self) -> str:
        """The split to read."""
        return self.value or self.default


_TRAIN_SPLIT = SplitChoice()


@dataclass(frozen=True)
class Source:
    """Records in a fixed order.

    Attributes:
        name: the name of the source in ``--dataset`` or ``--eval_dataset``.
        fingerprint: returns a hex digest that changes whenever the records may have changed.
        records: yields the records. If it is called with the name of a field, it may leave out all
            other fields.
        flag: the flag that names the source, for error messages.
        has_splits: whether the records are a split that a flag chooses.
        other_splits: returns the names of the splits that are not read. It may load the data set.
        has_artificial_nulls: whether the records come from Arrow's structs, where every struct of a
            column has the keys of all of them. A null may then stand for an absent key. If only
            some files of a source are such, it is true for all.
        count: returns about how many records there are, for a progress bar; ``None`` if counting
            would take as long as reading.
    """

    name: str
    fingerprint: Callable[[], str]
    records: Callable[[str | None], Iterator[Record]]
    flag: str = "--dataset"
    has_splits: bool = False
    other_splits: Callable[[], list[str]] = list
    has_artificial_nulls: bool = False
    count: Callable[[], int | None] = lambda: None

    def first(self) -> Record | None:
        """Return the first record, or ``None`` if there is none. It is read only once."""
        return self._first_record

    @functools.cached_property
    def _first_record(self) -> Record | None:
        return next(self.records(None), None)


def documents(source: Source, field: str) -> Iterator[str]:
    """Yield the text of each record.

    Args:
        source: the records.
        field: the name of the field that holds the text.

    Raises:
        UserError: with the place of a record that has no such field, or no valid text in it.
    """
    for place, fields in source.records(field):
        if field not in fields:
            names = ", ".join(map(str, fields))
            raise UserError(
                f"{place}: no field '{field}'; the record has {names}. Name the field that holds "
                "the text with --text_field, or the fields of conversations with --columns, such "
                "as prompt=question completion=answer."
            )

        text = fields[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field '{field}' is {shown(text)}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: field '{field}' holds half of a surrogate pair, which is not valid text."
            ) from None
        yield text


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
        source = _local_source(name, choice)
    except (OSError, RuntimeError) as error:
        # The name is too long, or it begins with a ~user that does not exist.
        raise UserError(f"{choice.data_flag} {name[:80]}: {first_line(error)}.") from None

    if source is not None:
        return source
    if _looks_local(name):
        raise UserError(
            f"{choice.data_flag} {name}: no file ending in {READABLE} was found; check the path "
            f"from {Path.cwd()}."
        )
    return _hub_source(name, choice)


def rename_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> list[Source]:
    """Return sources whose fields are renamed.

    A source that has none of these fields stays as it is: it may hold text, or have the usual
    names. The first record of each source decides.

    Args:
        sources: the data sets of a run.
        columns: the name of a field in the sources, by its new name.

    Raises:
        UserError: with the place of a record that has only some of the fields; or with the first
            record of all if no source has them.
    """
    if not columns:
        return list(sources)

    renamed_sources: list[Source] = []
    is_any_renamed = False
    first_records = [source.first() for source in sources]
    for source, first in zip(sources, first_records, strict=True):
        is_renamed = first is not None and any(name in first.fields for name in columns.values())
        if first is not None and is_renamed:
            _check_columns(first, columns)
            is_any_renamed = True
        renamed_sources.append(_with_columns(source, columns) if is_renamed else source)

    if not is_any_renamed:
        for first in first_records:
            if first is not None:
                _check_columns(first, columns)
    return renamed_sources


def _check_columns(record: Record, columns: Mapping[str, str]) -> None:
    """Raise :class:`UserError` if a record lacks a field to rename."""
    for ours, theirs in columns.items():
        if theirs not in record.fields:
            names = ", ".join(map(str, record.fields))
            raise UserError(
                f"{record.place}: no field '{theirs}' for --columns {ours}={theirs}; the record "
                f"has {names}."
            )


def _with_columns(source: Source, columns: Mapping[str, str]) -> Source:
    def records(_: str | None) -> Iterator[Record]:
        for place, fields in source.records(None):
            yield Record(place, _renamed(fields, columns))

    return replace(source, records=records)


def _renamed(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """Rename the fields of a record. A field that has the new name of another one is left out."""
    sources = set(columns.values())
    renamed = {
        name: value for name, value in fields.items() if name not in sources and name not in columns
    }
    for ours, theirs in columns.items():
        if theirs in fields:
            renamed[ours] = fields[theirs]
    return renamed


# --- builtin data sets and the recipe's own records


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


def records_source(records: PythonRecords) -> Source:
    """Return the records that a recipe has in Python.

    Args:
        records: a ``datasets.Dataset``, a function that yields texts or dictionaries of fields, or
            a list of these. They must always be the same, in the same order.

    Raises:
        UserError: if ``records`` is something else, or if it can be read only once.
    """
    if callable(records):
        # Some callables have no name.
        name = getattr(records, "__name__", "records")
        return _iterated_source(records, name, place=f"{name}(), record")

    datasets = sys.modules.get("datasets")  # whoever has such an object has imported its module
    if datasets is not None and isinstance(records, datasets.Dataset):
        return _dataset_source("records", lambda: records, place="records, row")

    advice = "pass a datasets.Dataset, a list of texts or of dictionaries, or a function"
    kind = type(records).__name__
    # Iterating over a mapping or a table of pandas yields names, and a set has no order.
    is_named = isinstance(records, str | bytes | set | frozenset) or hasattr(records, "keys")
    if is_named or not hasattr(records, "__iter__"):
        raise UserError(f"tokenize(records=...) cannot read a {kind}; {advice}.")
    if iter(records) is records:
        raise UserError(
            f"tokenize(records=...) reads the records several times, but a {kind} can be read only "
            "once; pass a list, or a function that returns it anew."
        )

    return _iterated_source(
        lambda: records,
        "records",
        place="records, record",
        is_streamed=datasets is not None and isinstance(records, datasets.IterableDataset),
    )


def _iterated_source(
    function: RecordFunction, name: str, place: str, is_streamed: bool = False
) -> Source:
    """Return the records that a function yields.

    Args:
        function: yields texts, or dictionaries of fields.
        name: the name of the source.
        place: what error messages write before the number of a record.
        is_streamed: whether they come from a ``datasets.IterableDataset``, so that nulls may stand
            for absent keys.
    """

    def fingerprint() -> str:
        # A hash of the records, because a function whose name stays the same may have changed.
        # Nulls with another meaning make other rows.
        digest = hashlib.sha256(b"streamed\n" if is_streamed else b"")
        for record in function():
            digest.update(json_text(record, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        return numbered(function(), place, field)

    return Source(name, fingerprint, records, has_artificial_nulls=is_streamed)


# --- files and folders


def _local_source(name: str, choice: SplitChoice) -> Source | None:
    """Return the source in a file, folder or glob, or ``None`` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "dataset_dict.json").is_file():
            return _saved_splits(name, path, choice)
        if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
            return _file_source(name, _saved_files(path), choice)
        if choice.value is not None or _has_hub_layout(path):
            return _folder_source(name, path, None, choice)

    paths = _find_files(name, choice)
    if paths:
        return _file_source(name, paths, choice)

    head, _, configuration = name.rpartition(":")
    folder = Path(head).expanduser()
    if head and folder.is_dir():
        return _folder_source(name, folder, configuration, choice)
    return None


def _file_source(name: str, paths: list[Path], choice: SplitChoice) -> Source:
    return Source(
        name,
        fingerprint=partial(_fingerprint_of_files, paths),
        records=partial(_read_files, paths),
        flag=choice.data_flag,
        has_artificial_nulls=any(map(has_artificial_nulls, paths)),
        count=partial(_count_records, paths),
    )


def _count_records(paths: list[Path]) -> int | None:
    """Return about how many records there are in files; ``None`` if one cannot be counted."""
    total = 0
    for path in paths:
        try:
            count = count_records(path)
        except OSError:  # reading the file will report what is wrong with it
            return None
        if count is None:
            return None
        total += count
    return total


def _looks_local(name: str) -> bool:
    """Return whether a name can only be a path."""
    return (
        is_readable(Path(name))
        or name.startswith((".", "/", "~"))
        or any(character in name for character in "*?[")
        or Path(name).exists()
    )


def _find_files(name: str, choice: SplitChoice) -> list[Path]:
    """Return the readable files of a file, folder or glob, sorted."""
    path = Path(name).expanduser()
    if path.is_file():
        if not is_readable(path):
            raise UserError(
                f"{choice.data_flag} {name}: cannot read '{suffix_of(path)}' files; convert it to "
                f"one of {READABLE}."
            )
        return [path]

    if path.is_dir():
        matches = _without_descriptions(set(path.rglob("*")))
    else:
        # Path.glob takes no absolute patterns.
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207
        matches = set(map(Path, names))
    return sorted(path for path in matches if is_readable(path) and path.is_file())


def _without_descriptions(paths: set[Path]) -> set[Path]:
    """Leave out files that describe the data of a folder.

    A README.md is a document like others if all files are text.
    """
    described = {path for path in paths if path.name not in _DESCRIPTIONS}
    are_records = any(
        is_readable(path) and suffix_of(path) not in (".txt", ".md") for path in described
    )
    if not are_records:
        return described
    return {path for path in described if path.name.lower() != "readme.md"}


def _fingerprint_of_files(paths: list[Path]) -> str:
    """Hash the content of files, but not their names. So a data set may be moved."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(suffix_of(path).encode() + _digest_of(path))
    return digest.hexdigest()


def _digest_of(path: Path) -> bytes:
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None


def _read_files(paths: list[Path], field: str | None) -> Iterator[Record]:
    for path in paths:
        yield from read_file(path, field)


# --- folders of datasets.save_to_disk


def _saved_splits(name: str, folder: Path, choice: SplitChoice) -> Source:
    """Return a split of a ``DatasetDict`` that was saved."""
    splits = [str(split) for split in _saved_value(folder / "dataset_dict.json", "splits")]
    if choice.split not in splits:
        raise _missing_split(name, splits, choice)
    source = _file_source(name, _saved_files(folder / choice.split), choice)
    return replace(source, has_splits=True, other_splits=lambda: _others(splits, choice))


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a ``Dataset`` that was saved, in the order of its rows."""
    files = _saved_value(folder / "state.json", "_data_files")
    names = [str(file.get("filename")) for file in files if isinstance(file, dict)]
    return [folder / name for name in names]


def _saved_value(path: Path, key: str) -> list[object]:
    """Return a list in one of the JSON files that ``save_to_disk`` writes."""
    try:
        value = json.loads(path.read_text())[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged or absent ({first_line(error)}); save the data set again with "
            "save_to_disk."
        ) from None
    if not isinstance(value, list):
        raise UserError(f"{path}: '{key}' is {shown(value)}, not a list; save the data set again.")
    return value


# --- data sets of the hub, and folders in its layout


def _has_hub_layout(folder: Path) -> bool:
    """Return whether the files of a folder are named as in a data set on the hub."""
    for shards in (folder, folder / "data"):
        if any(_SHARD.fullmatch(path.name) for path in shards.glob("*.parquet")):
            return True
    readme = folder / "README.md"
    return readme.is_file() and bool(_CONFIGURATIONS.match(readme.read_text(errors="replace")))


def _folder_source(
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
        folder: the folder. Hidden files are left out, because ``datasets`` ignores them.
        selection: the configuration and the split that are read.
    """
    digest = hashlib.sha256(json_text(selection).encode())
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not is_hidden:
            digest.update(relative.as_posix().encode() + b"\0" + _digest_of(path))
    return digest.hexdigest()


def _hub_source(name: str, choice: SplitChoice) -> Source:
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
    split = "" if choice.split == _TRAIN_SPLIT.split else f"{choice.split} "
    source = _dataset_source(
        name,
        load=lambda: load_once()[choice.split],
        place=f"{name}, {split}row",
        flag=choice.data_flag,
    )
    return replace(
        source,
        has_splits=True,
        other_splits=lambda: _others([str(split) for split in load_once()], choice),
    )


def _others(splits: list[str], choice: SplitChoice) -> list[str]:
    """Return the splits that are not read."""
    return [split for split in splits if split != choice.split]


def _dataset_source(
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

    return Source(
        name,
        fingerprint,
        records,
        flag=flag,
        has_artificial_nulls=True,
        count=lambda: len(load()),
    )


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
        raise _missing_split(name, [str(split) for split in splits], choice)
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


def _missing_split(name: str, splits: list[str], choice: SplitChoice) -> UserError:
    similar = [split for split in splits if choice.split in split]
    example = [*similar, *splits, choice.default][0]
    return UserError(
        f"{choice.data_flag} {name} has no split '{choice.split}', but {', '.join(splits)}; choose "
        f"one with {choice.split_flag} {example}."
    )
