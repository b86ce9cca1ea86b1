"""Records and their sources, and the readers of files: text, JSON, JSON Lines, CSV, Parquet.

A compressed file is decompressed while it is read. docs/explanation/performance.md says why these
are not the readers of ``datasets``.
"""

import codecs
import csv
import functools
import io
import itertools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text

# The most bytes in a line of JSON Lines or CSV, and characters in a field of CSV. A file without
# line breaks is then an error, before it fills the memory.
MAX_LINE_LENGTH = 1 << 28
_SHOWN_CHARACTERS = 40  # of a value that an error message quotes
_ROWS_PER_BATCH = 1000  # rows of a parquet file that become Python objects at a time
# The formats of compressed files, as pyarrow names them.
_CODECS = {".gz": "gzip", ".zst": "zstd"}

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
            other fields.
        flag: the flag that names the source, for error messages.
        has_splits: whether the records are a split that a flag chooses.
        other_splits: returns the names of the splits that are not read. It may load the data set.
        has_artificial_nulls: whether the records come from Arrow's structs, where every struct of a
            column has the keys of all of them. A null may then stand for an absent key. If only
            some files of a source are such, it is true for all.
        unread_files: how many files of a folder or glob are not read, by suffix.
    """

    name: str
    fingerprint: Callable[[], str]
    records: Callable[[str | None], Iterator[Record]]
    flag: str = "--dataset"
    has_splits: bool = False
    other_splits: Callable[[], list[str]] = lambda: []
    has_artificial_nulls: bool = False
    unread_files: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def first(self) -> Record | None:
        """The first record, or ``None`` if there is none. It is read only once."""
        return next(self.records(None), None)

    def changed(self) -> UserError:
        """Return the error that one pass over the records has read others than another pass."""
        return UserError(
            f"{self.flag} {self.name}: the number of records changed while they were read; start "
            "again when nothing writes to the data."
        )


_Reader: TypeAlias = Callable[[Path, str | None], Iterator[Record]]


def read_file(path: Path, kind: str, field: str | None) -> Iterator[Record]:
    """Yield the records of a file.

    Args:
        path: the file.
        kind: a result of :func:`kind_of`: the file is read as files with this suffix are.
        field: the name of the field that is needed; other fields may be left out. Texts without
            fields become the field of this name, by default ``text``.

    Raises:
        UserError: with the file, and the line, row or record that cannot be read.
    """
    try:
        yield from _READERS[kind](path, field)
    except OSError as error:
        if error.errno is not None:  # of the file system
            raise UserError(f"{path}: {error.strerror}.") from None
        raise UserError(
            f"{path} is damaged ({first_line(error).rstrip('.')}); copy or download it again."
        ) from None


def split_suffix(path: Path) -> tuple[str, str]:
    """Return the end of a file's name in lower case, as (".jsonl", ".gz") or (".jsonl", "")."""
    suffix = path.suffix.lower()
    if suffix not in _CODECS:
        return suffix, ""
    return Path(path.stem).suffix.lower(), suffix


def suffix_of(path: Path) -> str:
    """Return the end of a file's name in lower case, such as ``.jsonl`` or ``.jsonl.gz``."""
    return "".join(split_suffix(path))


def kind_of(path: Path, text_suffixes: Collection[str] = ()) -> str | None:
    """Return the suffix of the files that are read as this one is, ``None`` if it cannot be read.

    Args:
        path: the file, of which only the name matters.
        text_suffixes: the suffixes of files that are read as text, whatever they are.
    """
    suffix, compression = split_suffix(path)
    if suffix in text_suffixes:
        return ".txt"
    if suffix not in _READERS or (compression and suffix == ".parquet"):
        return None
    return suffix


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


# --- bytes and lines


def _open(path: Path) -> BinaryIO:
    """Open a file for reading, and decompress it if its name says that it is compressed."""
    _, compression = split_suffix(path)
    if not compression:
        return path.open("rb")
    if path.stat().st_size == 0:
        raise OSError("it is empty")  # pyarrow reads it as an empty text
    import pyarrow

    stream = pyarrow.input_stream(path, compression=_CODECS[compression])
    return cast(BinaryIO, io.BufferedReader(stream))


def _lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a file, with their line breaks.

    Raises:
        UserError: with the number of a line that is not UTF-8, or longer than ``MAX_LINE_LENGTH``.
    """
    with _open(path) as file:
        for number in itertools.count(start=1):
            raw = file.readline(MAX_LINE_LENGTH + 1)
            if not raw:
                return
            if len(raw) > MAX_LINE_LENGTH:
                raise UserError(
                    f"{path}, line {number}: the line is longer than {MAX_LINE_LENGTH:,} bytes; "
                    "write each record on a line of its own, or split the record."
                )
            yield _decode(raw, path, number)


def _decode(raw: bytes, path: Path, line: int = 1) -> str:
    """Decode UTF-8.

    Args:
        raw: the content of a file, or one line of it.
        path: the file.
        line: the number of the first line in ``raw``, from 1.

    Raises:
        UserError: with the number of the line that is not UTF-8.
    """
    if line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line += raw.count(b"\n", 0, error.start)
        byte = raw[error.start]
        raise UserError(
            f"{path}, line {line}: byte {byte:#04x} is not UTF-8; convert the file with iconv."
        ) from None


# --- the kinds of files


def _read_text(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the file as one record, whose only field has the requested name."""
    with _open(path) as file:
        raw = file.read()
    yield Record(str(path), {field or "text": _decode(raw, path)})


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    for number, line in enumerate(_lines_of(path), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{place}: not JSON ({error.msg}).") from None
        if not isinstance(fields, dict):
            start = line.strip()[:_SHOWN_CHARACTERS]
            raise UserError(f"{place}: {start!r} is not a JSON object.")
        yield Record(place, fields)


def _read_json(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the records of an array, of the array under the key ``data``, or of JSON Lines."""
    with _open(path) as file:
        text = _decode(file.read(), path)

    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            yield from _read_jsonl(path, field)
            return
        raise UserError(f"{path}, line {error.lineno}: not JSON ({error.msg}).") from None

    del text  # the values take more memory still
    values = content.get("data") if isinstance(content, dict) else content
    if not isinstance(values, list) or not values:
        raise UserError(
            f"{path} holds {shown(content)}, not an array with records; put them into [ and ], "
            "under the key 'data', or on the lines of a .jsonl file."
        )
    yield from numbered(values, f"{path}, record", field)


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(MAX_LINE_LENGTH)
    reader = csv.DictReader(_lines_of(path), strict=True)
    try:
        for name, count in Counter(reader.fieldnames).items():
            if name and count > 1:  # spreadsheets write empty columns without names
                raise UserError(
                    f"{path}: the column '{name}' is there twice; rename or remove one."
                )
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


_READERS: dict[str, _Reader] = {
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
