"""Sources of records: files, the running Python, a data set on the Hugging Face hub, or a function.

A source has a fingerprint, by which rows that were made from it are found in the cache without
reading its records.
"""

import codecs
import csv
import glob
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

from llmtrain.data import builtin
from llmtrain.data.cache import file_digest
from llmtrain.errors import UserError, as_user_error, first_line

if TYPE_CHECKING:
    import datasets

Fields: TypeAlias = dict[str, Any]  # the fields of a record, as they are in its source
RecordFunction: TypeAlias = Callable[[], Iterable[str | Fields]]

_SHOWN_CHARACTERS = 40  # of a value that an error message quotes


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
        name: the name of the source in ``--dataset``.
        fingerprint: returns a hex digest that changes whenever the records may have changed.
        records: yields the records. If it is called with the name of a field, it may leave out all
            other fields.
        has_artificial_nulls: whether the records come from Parquet or Arrow, where an absent key of
            an object and ``None`` cannot be told apart.
    """

    name: str
    fingerprint: Callable[[], str]
    records: Callable[[str | None], Iterator[Record]]
    has_artificial_nulls: bool = False


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
                "the text with --text_field."
            )

        text = fields[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field '{field}' is {_shown(text)}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: field '{field}' holds half of a surrogate pair, which is not valid text."
            ) from None
        yield text


def _shown(value: object) -> str:
    """Return the beginning of a value as JSON, for an error message."""
    return json.dumps(value, default=repr)[:_SHOWN_CHARACTERS]


def open_source(name: str) -> Source:
    """Return the source with a name in ``--dataset``.

    A name that is neither a path nor builtin is taken for a data set on the Hugging Face hub. The
    hub is asked only when its records are read.

    Raises:
        UserError: if there is no such path or builtin data set.
    """
    if name.startswith("builtin:"):
        return _builtin(name)

    try:
        paths = _find_files(name)
    except (OSError, RuntimeError) as error:
        # The name is too long, or it begins with a ~user that does not exist.
        raise UserError(f"--dataset {name[:80]}: {first_line(error)}.") from None

    if paths:
        return Source(
            name,
            fingerprint=partial(_fingerprint_of_files, paths),
            records=partial(_read_files, paths),
            has_artificial_nulls=any(_suffix(path) == ".parquet" for path in paths),
        )
    if _looks_local(name):
        raise UserError(
            f"--dataset {name}: no file ending in {' '.join(SUFFIXES)} was found; check the path "
            f"from {Path.cwd()}."
        )
    return _hub(name)


def _builtin(name: str) -> Source:
    if name not in builtin.CORPORA:
        names = ", ".join(builtin.CORPORA)
        raise UserError(f"--dataset {name} does not exist; use one of {names}.")
    make = builtin.CORPORA[name]
    return Source(
        name,
        fingerprint=partial(builtin.fingerprint, name),
        records=lambda _: _numbered(make(), f"{name}, document"),
    )


def _looks_local(name: str) -> bool:
    """Return whether a name can only be a path."""
    return (
        _suffix(Path(name)) in SUFFIXES
        or name.startswith((".", "/", "~"))
        or any(character in name for character in "*?[")
        or Path(name).exists()
    )


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _find_files(name: str) -> list[Path]:
    """Return the readable files of a file, folder or glob, sorted."""
    path = Path(name).expanduser()
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(
                f"--dataset {name}: cannot read '{path.suffix}' files; convert it to one of "
                f"{' '.join(SUFFIXES)}."
            )
        return [path]

    if path.is_dir():
        matches = set(path.rglob("*"))
    else:
        # Path.glob takes no absolute patterns.
        names = glob.iglob(str(path), recursive=True)  # noqa: PTH207
        matches = set(map(Path, names))
    return sorted(path for path in matches if _suffix(path) in SUFFIXES and path.is_file())


def _hub(name: str) -> Source:
    """Return the training split of a data set on the hub, NAME or NAME:CONFIGURATION."""

    def load() -> "datasets.Dataset":
        import datasets  # slow to import, and needed only here

        path, _, configuration = name.partition(":")
        with as_user_error(f"--dataset {name} is not a file or folder, and the hub answered"):
            return cast(
                "datasets.Dataset",
                datasets.load_dataset(path, configuration or None, split="train"),
            )

    def fingerprint() -> str:
        return hashlib.sha256(load()._fingerprint.encode()).hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        return _numbered(dataset, f"{name}, row")

    return Source(name, fingerprint, records, has_artificial_nulls=True)


def function_source(function: RecordFunction) -> Source:
    """Return the records that a function yields: texts, or dictionaries of fields."""
    name = getattr(function, "__name__", "records")  # some callables have no name

    def fingerprint() -> str:
        # A hash of the records, because a function whose name stays the same may have changed.
        digest = hashlib.sha256()
        for record in function():
            digest.update(json.dumps(record, default=repr).encode() + b"\n")
        return digest.hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        return _numbered(function(), f"{name}(), record", field)

    return Source(name, fingerprint, records)


def _numbered(
    records: Iterable[str | Fields], place: str, field: str | None = None
) -> Iterator[Record]:
    """Yield records with their places.

    Args:
        records: texts, or dictionaries of fields.
        place: followed by the number of a record, this is the record's place.
        field: the name of the field that a text becomes; by default ``text``.
    """
    for number, record in enumerate(records):
        fields = {field or "text": record} if isinstance(record, str) else record
        if not isinstance(fields, dict):
            raise UserError(
                f"{place} {number} is {_shown(record)}, neither text nor a dictionary of fields."
            )
        yield Record(f"{place} {number}", fields)


def _fingerprint_of_files(paths: list[Path]) -> str:
    """Hash the content of files, but not their names. So a data set may be moved."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            digest.update(_suffix(path).encode() + file_digest(path))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}.") from None
    return digest.hexdigest()


def _read_files(paths: list[Path], field: str | None) -> Iterator[Record]:
    for path in paths:
        read = _READERS.get(_suffix(path), _read_text)
        try:
            yield from read(path, field)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}.") from None


def _read_text(path: Path, field: str | None) -> Iterator[Record]:
    """Yield the file as one record, whose only field has the requested name."""
    yield Record(str(path), {field or "text": _decode(path.read_bytes(), path)})


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
            f"{path}, line {line}: byte {byte:#04x} is not UTF-8; convert the file first."
        ) from None


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}, line {number}"
            line = _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                # json adds the number of the line within its input, which is always 1.
                reason = first_line(error).partition(": line ")[0]
                raise UserError(f"{place}: not JSON ({reason}).") from None
            if not isinstance(fields, dict):
                shown = line.strip()[:_SHOWN_CHARACTERS]
                raise UserError(f"{place}: {shown!r} is not a JSON object.")
            yield Record(place, fields)


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
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
        _decode(path.read_bytes(), path)  # raises an error that names the line
        raise


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            columns = [field] if field in file.schema_arrow.names else None
            for batch in file.iter_batches(columns=columns):
                for fields in batch.to_pylist():
                    yield Record(f"{path}, row {row}", fields)
                    row += 1
    except UnicodeDecodeError:
        column = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {column} is not UTF-8.") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file ({error}).") from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
SUFFIXES = (".txt", ".md", *_READERS)
