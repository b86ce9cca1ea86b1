"""Sources in files: a file, a folder, a glob, or a folder of ``datasets.save_to_disk``."""

import glob
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from llmtrain.data.text_files import split_suffix
from llmtrain.errors import UserError, first_line
from llmtrain.file_digests import file_digest

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")


def file_source(name: str, paths: list[Path], choice: SplitChoice) -> Source:
    """Return the records of files, in the order of the list."""
    kinds = {path: split_suffix(path).kind for path in paths}
    kinds |= {path: ".txt" for path, kind in kinds.items() if kind in choice.text_suffixes}
    return Source(
        name,
        fingerprint=partial(_fingerprint_of_files, kinds),
        records=partial(_read_files, kinds),
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


def found_source(name: str, choice: SplitChoice) -> Source | None:
    """Return the records of a file, folder or glob; ``None`` if no file can be read."""
    path = Path(name).expanduser()
    if path.is_file():
        matches = {path}
    elif path.is_dir():
        matches = _without_descriptions(set(visible_files(path)), choice.text_suffixes)
    else:
        # Path.glob takes no absolute patterns.
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207
        matches = {match for match in map(Path, names) if match.is_file()}

    readable = sorted(file for file in matches if is_readable(file, choice.text_suffixes))
    unread = Counter(suffix_of(file) for file in sorted(matches.difference(readable)))
    if readable:
        return replace(file_source(name, readable, choice), unread_files=unread)
    if path.is_file():
        raise UserError(
            f"{choice.data_flag} {name}: cannot read '{suffix_of(path)}' files; convert it to one "
            f"of {READABLE}, or read it as text with --text_suffixes."
        )
    return None


def visible_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder and its subfolders, but no hidden ones, such as those of git."""
    for path in folder.rglob("*"):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            yield path


def _without_descriptions(paths: set[Path], text_suffixes: Sequence[str]) -> set[Path]:
    """Leave out files that describe the data of a folder.

    A README.md is a document like others if all files are text.
    """
    described = {path for path in paths if path.name not in _DESCRIPTIONS}
    are_records = any(
        is_readable(path) and suffix_of(path) not in (".txt", ".md", *text_suffixes)
        for path in described
    )
    if not are_records:
        return described
    return {path for path in described if path.name.lower() != "readme.md"}


def _fingerprint_of_files(kinds: Mapping[Path, str]) -> str:
    """Hash the content of files and their kinds, but no names. So a data set may be moved."""
    digest = hashlib.sha256()
    for path, kind in kinds.items():
        digest.update((kind + split_suffix(path).compression).encode() + digest_of(path))
    return digest.hexdigest()


def digest_of(path: Path) -> bytes:
    """Return the sha256 of a file's content; see :func:`llmtrain.file_digests.file_digest`."""
    try:
        return file_digest(path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None


def _read_files(kinds: Mapping[Path, str], field: str | None) -> Iterator[Record]:
    for path, kind in kinds.items():
        yield from read_file(path, kind, field)


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
