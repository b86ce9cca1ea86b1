"""Records and their sources, and the readers of files: text, JSON, JSON Lines, CSV, Parquet.

A compressed file is decompressed while it is read. docs/explanation/performance.md says why these
are not the readers of ``datasets``.
"""

import codecs
import csv
import functools
import glob
import hashlib
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias, cast

from llmtrain.console import pluralize, say
from llmtrain.errors import UserError, first_line
from llmtrain.files import hashes_of, json_text

# Files beside the data of a folder that hold counts and types.
_DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json")
# The most characters in a field of CSV: a quote that is never closed must not fill the memory.
_MAX_FIELD_LENGTH = 1 << 28
_SHOWN_CHARACTERS = 40  # of a value that an error message quotes
_ROWS_PER_BATCH = 1000  # rows of a parquet file that become Python objects at a time
# The formats of compressed files, as pyarrow names them.
_CODECS = {".gz": "gzip", ".zst": "zstd"}

Split: TypeAlias = Literal["train", "eval"]
Fields: TypeAlias = dict[str, Any]  # the fields of a record, as they are in its source


class Record(NamedTuple):
    """A record and its place.

    Attributes:
        place: the file and the line or row, for error messages.
        fields: the fields.
    """

    place: str
    fields: Fields


@dataclass(frozen=True)
class Source:
    """Records in a fixed order.

    Attributes:
        name: the name of the source in ``--dataset`` or ``--eval_dataset``.
        fingerprint: returns a hex digest that changes whenever the records may have changed.
        records: yields the records. If it is called with the name of a field, it may leave out all
            other fields, and texts without fields become the field of this name.
        flag: the flag that names the source, for error messages.
        has_splits: whether the records are a split that a flag chooses.
        has_artificial_nulls: whether the records come from Arrow's structs, where every struct of a
            column has the keys of all of them. A null may then stand for an absent key. If only
            some files of a source are such, it is true for all.
        format: the format of the records.
        only_split: the split of all records; ``None`` to divide them.
        needs_template: whether the records are more than prompts with texts as completions. The
            first one decides. Text has no prompts, and needs no template.
        rows: the rows of a set that was prepared before, which has no records.
        token_files: files of tokens. Their records are known once there is a tokenizer.
    """

    name: str
    fingerprint: Callable[[], str]
    records: Callable[[str | None], Iterator[Record]]
    flag: str = "--dataset"
    has_splits: bool = False
    has_artificial_nulls: bool = False
    format: str = "text"
    only_split: Split | None = None
    needs_template: bool = False
    rows: Any = None  # a Tokenized
    token_files: Sequence[Path] = ()

    @property
    def splits(self) -> Sequence[Split]:
        """The splits that the source has rows in."""
        return ("train", "eval") if self.only_split is None else (self.only_split,)

    @functools.cached_property
    def first(self) -> Record | None:
        """The first record, or ``None`` if there is none. It is read only once."""
        return next(self.records(None), None)


def kind_of(path: Path, text_suffixes: Collection[str] = ()) -> str | None:
    """Return the suffix of the files that are read as this one is, ``None`` if it cannot be read.

    Args:
        path: the file, of which only the name matters.
        text_suffixes: the suffixes of files that are read as text, whatever they are.
    """
    suffix = path.suffix.lower()
    is_compressed = suffix in _CODECS
    if is_compressed:  # as .jsonl.gz
        suffix = Path(path.stem).suffix.lower()
    if suffix in text_suffixes:
        return ".txt"
    is_readable = suffix in _READERS and not (is_compressed and suffix == ".parquet")
    return suffix if is_readable else None


def shown(value: object) -> str:
    """Return the beginning of a value as JSON, for an error message."""
    return json_text(value, default=repr)[:_SHOWN_CHARACTERS]


def numbered(records: Iterable[object], place: str, field: str | None = None) -> Iterator[Record]:
    """Yield records with their places.

    Args:
        records: texts, or dictionaries of fields.
        place: followed by the number of a record, this is the record's place.
        field: the name of the field that a text becomes; by default ``text``.

    Raises:
        UserError: if a record is neither text nor a dictionary.
    """
    for number, record in enumerate(records):
        fields = {field or "text": record} if isinstance(record, str) else record
        if not isinstance(fields, dict):
            raise UserError(
                f"{place} {number} is {shown(record)}, neither text nor a dictionary of fields."
            )
        yield Record(f"{place} {number}", fields)


# --- files, folders and globs


def file_source(name: str, path: Path, flag: str, text_suffixes: Sequence[str]) -> Source | None:
    """Return the records of a file, folder or glob; ``None`` if no file can be read.

    Args:
        name: the name of the source.
        path: its path.
        flag: the flag that names the source.
        text_suffixes: the suffixes of files that are read as text, whatever they are.
    """
    if path.is_file():
        matches = [path]
    elif path.is_dir():
        matches = [file for file in visible_files(path) if file.name not in _DESCRIPTIONS]
    else:
        # Path.glob takes no absolute patterns.
        names = set(glob.iglob(str(path), recursive=True))  # noqa: PTH207
        matches = sorted(match for match in map(Path, names) if match.is_file())

    kinds = {file: kind_of(file, text_suffixes) for file in matches}
    if path.is_dir() and not {None, ".txt", ".md"}.issuperset(kinds.values()):
        # Next to records, a README.md describes them. Next to texts, it is one of them.
        kinds = {file: kind for file, kind in kinds.items() if file.name.lower() != "readme.md"}
    unread = [file for file, kind in kinds.items() if kind is None]
    readable = {file: kind for file, kind in kinds.items() if kind is not None}
    if not readable:
        return None
    if unread:
        say(
            "data",
            f"{name}: {pluralize(len(unread), 'file')} not read, such as {unread[0].name}; "
            "--text_suffixes names suffixes to read as text",
        )

    def records(field: str | None) -> Iterator[Record]:
        for file, kind in readable.items():
            try:
                yield from _READERS[kind](file, field)
            except OSError as error:
                reason = error.strerror or first_line(error).rstrip(".")
                raise UserError(
                    f"{file} cannot be read, or is damaged: {reason}; copy or download it again."
                ) from None

    return Source(
        name,
        # It depends on no names. So a data set may be moved.
        fingerprint=lambda: digest_of_files(readable),
        records=records,
        flag=flag,
        has_artificial_nulls=".parquet" in readable.values(),
    )


def visible_files(folder: Path) -> list[Path]:
    """Return the files in a folder and its subfolders, but no hidden ones, such as those of git."""
    files = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not is_hidden:
            files.append(path)
    return files


def digest_of_files(labels: Mapping[Path, str], selection: str = "") -> str:
    """Hash the content of files with a label for each, and what is read of them."""
    digest = hashlib.sha256(selection.encode())
    for label, content in zip(labels.values(), hashes_of(labels), strict=True):
        digest.update(os.fsencode(label) + b"\0" + bytes.fromhex(content["sha256"]))
    return digest.hexdigest()


def _open(path: Path) -> BinaryIO:
    """Open a file, which is decompressed if its name says that it is compressed."""
    compression = _CODECS.get(path.suffix.lower())
    if compression is None:
        return path.open("rb")
    import pyarrow

    stream = pyarrow.input_stream(path, compression=compression)
    return cast(BinaryIO, io.BufferedReader(stream))


def _text_of(path: Path) -> str:
    """Return the content of a file."""
    with _open(path) as file:
        return _decode(file.read(), path, first_line=1)


def _lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with their line breaks."""
    with _open(path) as file:
        for number, raw in enumerate(file, start=1):
            yield _decode(raw, path, first_line=number)


def _decode(raw: bytes, path: Path, first_line: int) -> str:
    """Return bytes as text, without the mark at the beginning of a file.

    Raises:
        UserError: with the number of a line that is not UTF-8.
    """
    if first_line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"{path}, line {line}: byte {raw[error.start]:#04x} is not UTF-8; convert the file "
            "with iconv."
        ) from None


# --- the kinds of files


def _read_text(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the file as one record, whose only field has the requested name."""
    yield Record(str(path), {field or "text": _text_of(path)})


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    for number, line in enumerate(_lines_of(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:  # also of numbers with too many digits
            raise UserError(f"{place}: not JSON ({_json_reason(error)}).") from None
        if not isinstance(fields, dict):
            raise UserError(f"{place}: {shown(fields)} is not a JSON object.")
        yield Record(place, fields)


def _read_json(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the records of an array, of the array under the key ``data``, or of JSON Lines."""
    text = _text_of(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = _json_reason(error)
        if reason == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(path, field)
            return
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not JSON ({reason}).") from None

    del text  # the values take more memory still
    values = content.get("data") if isinstance(content, dict) else content
    if not isinstance(values, list) or not values:
        raise UserError(
            f"{path} holds {shown(content)}, not an array with records; put them into [ and ], "
            "under the key 'data', or on the lines of a .jsonl file."
        )
    yield from numbered(values, f"{path}, record", field)


def _json_reason(error: Exception) -> str:
    """Return why a text is not JSON, without the line and column that the parser adds."""
    return first_line(error).partition(": line ")[0]


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(_MAX_FIELD_LENGTH)
    reader = csv.DictReader(_lines_of(path), strict=True)
    try:
        names = [name for name in reader.fieldnames or [] if name]
        if len(set(names)) < len(names):
            raise UserError(f"{path}: two columns have the same name; rename or remove one.")
        for fields in reader:
            place = f"{path}, line {reader.line_num}"
            if None in fields:
                raise UserError(
                    f"{place}: the line has more fields than the header; put text with commas in "
                    "quotes."
                )
            yield Record(place, fields)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not CSV ({error}).") from None


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
                for fields in batch.to_pylist():
                    yield Record(f"{path}, row {row}", fields)
                    row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}, row {row} or later: not Parquet, or damaged "
            f"({first_line(error).rstrip('.')}); copy or download it again."
        ) from None


_READERS = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,  # which compresses its columns itself
}
# The files that can be read, for error messages.
READABLE = f"{' '.join(_READERS)} (all but .parquet also with {' '.join(_CODECS)})"
