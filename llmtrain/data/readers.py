"""Read the records of a file: text, JSON, JSON Lines, CSV or Parquet.

docs/explanation/performance.md says why these are not the readers of ``datasets``.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from llmtrain.data import text_files
from llmtrain.data.text_files import CODECS, decode, lines_of, open_bytes, split_suffix
from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text

_SHOWN_CHARACTERS = 40  # of a value that an error message quotes
_ROWS_PER_BATCH = 1000  # rows of a parquet file that become Python objects at a time


class Record(NamedTuple):
    """A record and its place.

    Attributes:
        place: the file and the line or row, for error messages.
        fields: the fields.
    """

    place: str
    fields: dict[str, Any]


Reader: TypeAlias = Callable[[Path, str | None], Iterator[Record]]


def read_file(path: Path, kind: str, field: str | None) -> Iterator[Record]:
    """Yield the records of a file that :func:`is_readable` accepts.

    Args:
        path: the file.
        kind: a suffix: the file is read as files with it are.
        field: the name of the field that is needed; other fields may be left out. Texts without
            fields become the field of this name, by default ``text``.

    Raises:
        UserError: with the file, and the line, row or record that cannot be read.
    """
    try:
        yield from _READERS[kind](path, field)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or first_line(error)}.") from None


def is_readable(path: Path, text_suffixes: Collection[str] = ()) -> bool:
    """Return whether the end of a file's name says that it can be read, if need be as text."""
    suffix = split_suffix(path)
    if suffix.kind in text_suffixes:
        return True
    return suffix.kind in _READERS and not (suffix.compression and suffix.kind == ".parquet")


def suffix_of(path: Path) -> str:
    """Return the end of a file's name in lower case, such as ``.jsonl`` or ``.jsonl.gz``."""
    return "".join(split_suffix(path))


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


def _read_text(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the file as one record, whose only field has the requested name."""
    with open_bytes(path) as file:
        raw = file.read()
    yield Record(str(path), {field or "text": decode(raw, path)})


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    with open_bytes(path) as file:
        for number, raw in enumerate(lines_of(file, path), start=1):
            place = f"{path}, line {number}"
            line = decode(raw, path, number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line, object_pairs_hook=_object_of)
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: not JSON ({_json_reason(error)}).") from None
            if not isinstance(fields, dict):
                start = line.strip()[:_SHOWN_CHARACTERS]
                raise UserError(f"{place}: {start!r} is not a JSON object.")
            yield Record(place, fields)


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, whose keys must differ."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"the key '{name}' is there twice")
    return fields


def _check_columns(names: Iterable[str], path: Path) -> None:
    """Raise :class:`UserError` if two columns of a table have one name."""
    for name, count in Counter(names).items():
        if name and count > 1:  # spreadsheets write empty columns without names
            raise UserError(f"{path}: the column '{name}' is there twice; rename or remove one.")


def _json_reason(error: Exception) -> str:
    """Return why a text is not JSON, without the line and column that the parser adds."""
    return first_line(error).partition(": line ")[0]


def _read_json(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the records of an array, of the array under the key ``data``, or of JSON Lines."""
    with open_bytes(path) as file:
        text = decode(file.read(), path)

    try:
        content = json.loads(text, object_pairs_hook=_object_of)
    except (ValueError, RecursionError) as error:
        if first_line(error).startswith("Extra data") and text.lstrip().startswith("{"):
            yield from _read_jsonl(path, field)
            return
        # Other errors, such as a number with too many digits, have no place.
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not JSON ({_json_reason(error)}).") from None

    del text  # the values take more memory still
    values = content.get("data") if isinstance(content, dict) else content
    if not isinstance(values, list):
        raise UserError(
            f"{path} holds {shown(content)}, not an array of records; put records into [ and ], "
            "under the key 'data', or on the lines of a .jsonl file."
        )
    if not values:
        raise UserError(f"{path}: the array is empty; it must hold records.")
    yield from numbered(values, f"{path}, record", field)


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(text_files.MAX_LINE_LENGTH)
    try:
        with (
            open_bytes(path) as raw_file,
            io.TextIOWrapper(raw_file, encoding="utf-8-sig", newline="") as file,
        ):
            reader = csv.DictReader(lines_of(file, path), strict=True)
            _check_columns(reader.fieldnames or [], path)
            for fields in reader:
                place = f"{path}, line {reader.line_num}"
                if None in fields:
                    raise UserError(
                        f"{place}: the line has more fields than the header; put text with commas "
                        "in quotes."
                    )
                yield Record(place, fields)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not CSV ({error}).") from None
    except UnicodeDecodeError:
        with open_bytes(path) as raw_file:  # once more, to find the line
            for number, raw in enumerate(lines_of(raw_file, path), start=1):
                decode(raw, path, number)
        raise


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, path)
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
                for fields in batch.to_pylist():
                    yield Record(f"{path}, row {row}", fields)
                    row += 1
    except UnicodeDecodeError:
        column = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {column} is not UTF-8.") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, not of the content
        raise UserError(
            f"{path} is not a parquet file, or it is damaged ({first_line(error).rstrip('.')}); "
            "copy or download it again."
        ) from None


_READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,  # which compresses its columns itself
}
# The files that can be read, for error messages.
READABLE = f"{' '.join(_READERS)} (all but .parquet also with {' '.join(CODECS)})"
