"""Read the records of a file: text, JSON, JSON Lines, CSV, TSV, Parquet or Arrow.

docs/explanation/performance.md says why these are not the readers of ``datasets``.
"""

import csv
import functools
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from llmtrain.console import say
from llmtrain.data import text_files
from llmtrain.data.text_files import CODECS, decode, lines_of, open_bytes, split_suffix
from llmtrain.errors import UserError, first_line
from llmtrain.files import json_text

if TYPE_CHECKING:
    import pyarrow

_SHOWN_CHARACTERS = 40  # of a value that an error message quotes
_ROWS_PER_BATCH = 1000  # rows of a parquet or Arrow file that become Python objects at a time
_ARROW_FILE_MAGIC = b"ARROW1"  # the first bytes of an IPC file; an IPC stream has others
_LARGE_JSON = 1_000_000_000  # characters of an array from which the log names JSON Lines
# A JSON object on the first line, and the beginning of another one after it.
_JSON_LINES = re.compile(r"[ \t\n\r]*(\{.*)\n[ \t\n\r]*\{")


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
    return suffix.kind in _READERS and not (suffix.compression and suffix.kind in _ARROW_KINDS)


def count_records(path: Path) -> int | None:
    """Count the records of a file without parsing it, for a progress bar.

    Returns:
        About how many there are; ``None`` if that would take as long as reading the file.
    """
    suffix = split_suffix(path)
    if suffix.kind == ".parquet":
        return _parquet_rows(path)
    if suffix.compression or suffix.kind not in _LINE_KINDS:
        return None
    with path.open("rb") as file:
        blocks = iter(functools.partial(file.read, 1 << 20), b"")
        return sum(block.count(b"\n") for block in blocks)


def suffix_of(path: Path) -> str:
    """Return the end of a file's name in lower case, such as ``.jsonl`` or ``.jsonl.gz``."""
    return "".join(split_suffix(path))


def has_artificial_nulls(path: Path) -> bool:
    """Return whether nulls in a file may stand for absent keys, as in the structs of Arrow."""
    return split_suffix(path).kind in _ARROW_KINDS


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

    if _is_json_lines(text):
        yield from _read_jsonl(path, field)
        return
    if len(text) > _LARGE_JSON:
        _advise_json_lines(path)
    values = _values_of(text, path)
    del text  # the values take more memory still
    if not values:
        raise UserError(f"{path}: the array is empty; it must hold records.")
    yield from numbered(values, f"{path}, record", field)


def _is_json_lines(text: str) -> bool:
    """Return whether a text has a JSON object on its first line, and another one after it."""
    match = _JSON_LINES.match(text)
    if match is None:
        return False
    try:
        return isinstance(json.loads(match[1]), dict)
    except (ValueError, RecursionError):
        return False


@functools.cache
def _advise_json_lines(path: Path) -> None:
    """Log once that JSON Lines take less time and memory than an array."""
    say(
        "data",
        f"{path} is one large array, which is parsed whole before its first record is known; a "
        ".jsonl file, with a record on each line, is read line by line",
    )


def _values_of(text: str, path: Path) -> list[object]:
    """Return the values of a JSON array, or of the array under the key ``data`` of an object."""
    try:
        content = json.loads(text, object_pairs_hook=_object_of)
    except (ValueError, RecursionError) as error:
        # Other errors, such as a number with too many digits, have no place.
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{line}: not JSON ({_json_reason(error)}).") from None
    if isinstance(content, list):
        return content
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {shown(content)}, not an array of records.")
    if isinstance(content.get("data"), list):
        return list(content["data"])

    lists = [key for key, value in content.items() if isinstance(value, list)]
    if lists:
        raise UserError(
            f"{path} is an object with lists under {', '.join(map(repr, lists))}; records are read "
            "from an array, or from the key 'data'. Rename the key, or keep only its list."
        )
    raise UserError(
        f"{path} is one object, not an array of records; put records into [ and ], or write one on "
        "each line of a .jsonl file."
    )


def _read_csv(path: Path, field: str | None, delimiter: str) -> Iterator[Record]:
    csv.field_size_limit(text_files.MAX_LINE_LENGTH)
    kind = "CSV" if delimiter == "," else "TSV"
    separators = "commas" if delimiter == "," else "tabs"
    try:
        with (
            open_bytes(path) as raw_file,
            io.TextIOWrapper(raw_file, encoding="utf-8-sig", newline="") as file,
        ):
            reader = csv.DictReader(lines_of(file, path), delimiter=delimiter, strict=True)
            _check_columns(reader.fieldnames or [], path)
            for fields in reader:
                place = f"{path}, line {reader.line_num}"
                if None in fields:
                    raise UserError(
                        f"{place}: the line has more fields than the header; put text with "
                        f"{separators} in quotes."
                    )
                yield Record(place, fields)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not {kind} ({error}).") from None
    except UnicodeDecodeError:
        _find_bad_encoding(path)
        raise


def _find_bad_encoding(path: Path) -> None:
    """Raise :class:`UserError` for the first line of a file that is not UTF-8."""
    with open_bytes(path) as file:
        for number, raw in enumerate(lines_of(file, path), start=1):
            decode(raw, path, number)


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow.parquet

    def batches() -> Iterator["pyarrow.RecordBatch"]:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_columns(file.schema_arrow.names, path)
            columns = [field] if field in file.schema_arrow.names else None
            yield from file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns)

    yield from _rows(batches(), path, field)


def _parquet_rows(path: Path) -> int | None:
    """Return the number of rows of a parquet file; ``None`` if it cannot be read."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(path).num_rows)
    except (pyarrow.ArrowException, OSError):
        return None  # reading the file will report what is wrong with it


def _read_arrow(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the rows of an IPC file or an IPC stream, which have the same suffix."""
    import pyarrow

    def batches() -> Iterator["pyarrow.RecordBatch"]:
        with path.open("rb") as start:
            is_file = start.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC
        with pyarrow.OSFile(str(path)) as source:
            if is_file:
                reader = pyarrow.ipc.open_file(source)
                stored = (reader.get_batch(i) for i in range(reader.num_record_batches))
            else:
                stored = iter(pyarrow.ipc.open_stream(source))
            for batch in stored:
                _check_columns(batch.schema.names, path)
                selected = batch.select([field]) if field in batch.schema.names else batch
                for first in range(0, len(selected), _ROWS_PER_BATCH):
                    yield selected.slice(first, _ROWS_PER_BATCH)

    yield from _rows(batches(), path, field)


def _rows(
    batches: Iterator["pyarrow.RecordBatch"], path: Path, field: str | None
) -> Iterator[Record]:
    """Yield the rows of Arrow batches as records."""
    import pyarrow

    row = 0
    try:
        for batch in batches:
            for fields in batch.to_pylist():
                yield Record(f"{path}, row {row}", fields)
                row += 1
    except UnicodeDecodeError:
        column = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {column} is not UTF-8.") from None
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, not of the content
        kind = _ARROW_KINDS[split_suffix(path).kind]
        raise UserError(
            f"{path} is not {kind}, or it is damaged ({first_line(error).rstrip('.')}); copy or "
            "download it again."
        ) from None


_READERS: dict[str, Reader] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": partial(_read_csv, delimiter=","),
    ".tsv": partial(_read_csv, delimiter="\t"),
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
_LINE_KINDS = (".jsonl", ".ndjson", ".csv", ".tsv")
# These compress their columns themselves.
_ARROW_KINDS = {".parquet": "a parquet file", ".arrow": "an Arrow file"}
_TEXT_KINDS = [kind for kind in _READERS if kind not in _ARROW_KINDS]
# The files that can be read, for error messages.
READABLE = f"{' '.join(_TEXT_KINDS)} (also with {' '.join(CODECS)}) {' '.join(_ARROW_KINDS)}"
