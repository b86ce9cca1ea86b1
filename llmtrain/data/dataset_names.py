"""The source that a name in ``--dataset`` or ``--eval_dataset`` stands for."""

import glob
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from llmtrain.data import builtin
from llmtrain.data.hub import folder_source, has_hub_layout, hub_source
from llmtrain.data.readers import READABLE, Record, is_readable, numbered, read_file, suffix_of
from llmtrain.data.sources import Source, SplitChoice
from llmtrain.data.text_files import digest_of, split_suffix, visible_files
from llmtrain.errors import UserError, first_line
from llmtrain.files import local_path

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# How files that are not read become files that are, by their suffix.
_CONVERSIONS = {
    ".tsv": "pandas.read_csv('{path}', sep='\\t', dtype=str, keep_default_na=False)"
    ".to_csv('{target}.csv', index=False)",
    ".arrow": "datasets.load_dataset('arrow', data_files='{path}', split='train')"
    ".to_parquet('{target}.parquet')",
    ".bz2": "bunzip2 --keep '{path}'",
    ".xz": "unxz --keep '{path}'",
}
# The same for folders of save_to_disk, by a file in them.
_SAVED_ROWS = {
    "dataset_dict.json": "datasets.load_from_disk('{path}')['train'].to_parquet('train.parquet')",
    "state.json": "datasets.load_from_disk('{path}').to_parquet('train.parquet')",
}
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


def _local_source(name: str, choice: SplitChoice) -> Source | None:
    """Return the source in a file, folder or glob, or ``None`` if there is none."""
    path = Path(name).expanduser()
    if path.is_dir():
        for file_name, conversion in _SAVED_ROWS.items():
            if (path / file_name).is_file():
                raise UserError(
                    f"{choice.data_flag} {name}: folders of save_to_disk are not read; write the "
                    f"rows as Parquet: {conversion.format(path=path)}"
                )
        if choice.is_named or has_hub_layout(path):
            return folder_source(name, path, None, choice)

    source = _file_source(name, path, choice)
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


def _file_source(name: str, path: Path, choice: SplitChoice) -> Source | None:
    """Return the records of a file, folder or glob; ``None`` if no file can be read."""
    if path.is_file():
        matches = {path}
    elif path.is_dir():
        matches = _without_descriptions(set(visible_files(path)), choice.text_suffixes)
    else:
        # Path.glob takes no absolute patterns.
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207
        matches = {match for match in map(Path, names) if match.is_file()}

    readable = sorted(file for file in matches if is_readable(file, choice.text_suffixes))
    unread = sorted(matches.difference(readable))
    for file in unread:
        conversion = _CONVERSIONS.get(split_suffix(file).kind)
        if conversion is not None:
            raise UserError(
                f"{choice.data_flag} {name}: '{suffix_of(file)}' files are not read; convert them "
                f"to JSONL, CSV or Parquet: {conversion.format(path=file, target=file.stem)}"
            )
    if path.is_file() and unread:
        raise UserError(
            f"{choice.data_flag} {name}: cannot read '{suffix_of(path)}' files; convert it to one "
            f"of {READABLE}, or read it as text with --text_suffixes."
        )
    if not readable:
        return None

    kinds = {file: split_suffix(file).kind for file in readable}
    kinds |= {file: ".txt" for file, kind in kinds.items() if kind in choice.text_suffixes}
    return Source(
        name,
        fingerprint=partial(_fingerprint_of_files, kinds),
        records=partial(_read_files, kinds),
        flag=choice.data_flag,
        has_artificial_nulls=".parquet" in kinds.values(),
        unread_files=Counter(map(suffix_of, unread)),
    )


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


def _read_files(kinds: Mapping[Path, str], field: str | None) -> Iterator[Record]:
    for path, kind in kinds.items():
        yield from read_file(path, kind, field)
