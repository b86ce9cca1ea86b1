"""Sources in files: a file, a folder, a glob, or a folder of ``datasets.save_to_disk``."""

import glob
import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from llmtrain.data.readers import (
    READABLE,
    Record,
    count_records,
    has_artificial_nulls,
    is_readable,
    read_file,
    shown,
    suffix_of,
)
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.errors import UserError, first_line
from llmtrain.file_digests import file_digest

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


def file_source(name: str, paths: list[Path], choice: SplitChoice) -> Source:
    """Return the records of files, in the order of the list."""
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


def find_files(name: str, choice: SplitChoice) -> list[Path]:
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
        digest.update(suffix_of(path).encode() + digest_of(path))
    return digest.hexdigest()


def digest_of(path: Path) -> bytes:
    """Return the sha256 of a file's content; see :func:`llmtrain.file_digests.file_digest`."""
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None


def _read_files(paths: list[Path], field: str | None) -> Iterator[Record]:
    for path in paths:
        yield from read_file(path, field)


def saved_splits(name: str, folder: Path, choice: SplitChoice) -> Source:
    """Return a split of a ``DatasetDict`` that was saved."""
    splits = [str(split) for split in _saved_value(folder / "dataset_dict.json", "splits")]
    if choice.split not in splits:
        raise choice.missing(name, splits)
    source = file_source(name, saved_files(folder / choice.split), choice)
    return replace(source, has_splits=True, other_splits=lambda: choice.others(splits))


def saved_files(folder: Path) -> list[Path]:
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
