"""Sources of text: files, the running Python's own documentation, a data set of the Hugging Face hub, a function.

By its fingerprint the rows that were made of a source are found again without reading its records.
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
from llmtrain.errors import UserError, first_line, refused_as, require

if TYPE_CHECKING:
    import datasets

Fields: TypeAlias = dict[str, Any]  # of a record, as its source has them
MakesRecords: TypeAlias = Callable[[], Iterable[str | Fields]]


class Record(NamedTuple):
    """The fields of a record, and its place: the file and line, or row."""

    place: str
    fields: Fields


@dataclass(frozen=True)
class Source:
    """Records in a fixed order, each with its place for whoever must mend it."""

    name: str  # as --dataset has it
    fingerprint: Callable[[], str]  # a hex digest that changes when the records may have changed
    records: Callable[
        [str | None], Iterator[Record]
    ]  # with the named field, where they have it, or with all


def documents(source: Source, field: str) -> Iterator[str]:
    """Yield the texts of a source; raises :class:`UserError` with the place of a record that has none."""
    for place, fields in source.records(field):
        if field not in fields:
            known = ", ".join(map(str, fields))
            raise UserError(
                f"{place}: no field '{field}'; it has {known} - name one with --text_field."
            )
        text = fields[field]
        if not isinstance(text, str):
            raise UserError(
                f"{place}: field '{field}' is {json.dumps(text, default=repr)[:40]}, not text."
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: field '{field}' holds half of a surrogate pair, which is no text."
            ) from None
        yield text


def open_source(name: str) -> Source:
    """Find what one name of ``--dataset`` means; a :class:`UserError` says what was looked for."""
    if name.startswith("builtin:"):
        known = " and ".join(builtin.CORPORA)
        require(name in builtin.CORPORA, f"--dataset {name} does not exist; there are {known}.")
        corpus = builtin.CORPORA[name]
        return Source(
            name,
            partial(builtin.fingerprint, name),
            lambda _: _numbered(corpus(), f"{name}, document"),
        )
    try:
        paths = _find_files(name)
    except (OSError, RuntimeError) as error:  # a name too long, a home folder of nobody
        raise UserError(f"--dataset {name[:80]}: {first_line(error)}.") from None
    if paths:
        return Source(name, partial(_fingerprint_of_files, paths), partial(_read_files, paths))
    looks_local = (
        _suffix(Path(name)) in SUFFIXES
        or name.startswith((".", "/", "~"))
        or any(c in name for c in "*?[")
    )
    if looks_local or Path(name).exists():
        where = f"check the path from {Path.cwd()}"
        raise UserError(f"--dataset {name}: found no file ending in {' '.join(SUFFIXES)}; {where}.")
    return _hub(name)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(
                f"--dataset {name}: cannot read '{path.suffix}' files; it takes {' '.join(SUFFIXES)}."
            )
        return [path]
    matching = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - absolute patterns too
    found = path.rglob("*") if path.is_dir() else {*map(Path, matching)}
    return sorted(path for path in found if _suffix(path) in SUFFIXES and path.is_file())


def _hub(name: str) -> Source:
    """Return the training split of a data set of the hub, NAME or NAME:CONFIGURATION."""

    def load() -> "datasets.Dataset":
        import datasets  # heavy, and only hub names need it here

        path, _, configuration = name.partition(":")
        with refused_as(
            f"--dataset {name}: no file or folder of that name here, and the hub answered"
        ):
            return cast(
                "datasets.Dataset",
                datasets.load_dataset(path, configuration or None, split="train"),
            )

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        return _numbered(
            dataset.select_columns([field]) if field in dataset.column_names else dataset,
            f"{name}, row",
        )

    return Source(name, lambda: hashlib.sha256(load()._fingerprint.encode()).hexdigest(), records)


def made(make: MakesRecords) -> Source:
    """Return the records that a function yields: texts, or fields."""
    name = getattr(make, "__name__", "records")  # not every callable has a name

    def fingerprint() -> (
        str
    ):  # of the content: whoever changes the function need not think of a cache
        total = hashlib.sha256()
        for record in make():
            total.update(json.dumps(record, default=repr).encode() + b"\n")
        return total.hexdigest()

    return Source(name, fingerprint, lambda field: _numbered(make(), f"{name}(), record", field))


def _numbered(
    records: Iterable[str | Fields], place: str, field: str | None = None
) -> Iterator[Record]:
    for number, record in enumerate(records):
        fields = {field or "text": record} if isinstance(record, str) else record
        if not isinstance(fields, dict):
            raise UserError(
                f"{place} {number} is {json.dumps(record, default=repr)[:40]}, neither text nor fields."
            )
        yield Record(f"{place} {number}", fields)


def _fingerprint_of_files(paths: list[Path]) -> str:
    # content, not names: a moved data set is the same data set
    total = hashlib.sha256()
    for path in paths:
        try:
            total.update(_suffix(path).encode() + file_digest(path))
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}.") from None
    return total.hexdigest()


def _read_files(paths: list[Path], field: str | None) -> Iterator[Record]:
    for path in paths:
        try:
            if reader := _READERS.get(_suffix(path)):
                yield from reader(path, field)
            else:  # the whole file is one text, whatever the field is called
                yield Record(str(path), {field or "text": _decode(path.read_bytes(), path)})
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}.") from None


def _decode(raw: bytes, path: Path, first_line: int = 1) -> str:
    if first_line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line, byte = first_line + raw.count(b"\n", 0, error.start), raw[error.start]
        raise UserError(
            f"{path}, line {line}: byte {byte:#04x} is not UTF-8; convert the file first."
        ) from None


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place, line = f"{path}, line {number}", _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = first_line(error).partition(": line ")[
                    0
                ]  # without the line that json counts, always 1
                raise UserError(f"{place}: not JSON ({reason}).") from None
            if not isinstance(fields, dict):
                raise UserError(f"{place}: {line.strip()[:40]!r} is not a JSON object.")
            yield Record(place, fields)


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            for fields in reader:
                place = f"{path}, line {reader.line_num}"
                require(
                    None not in fields,
                    f"{place}: more fields than the header has; quote text with commas.",
                )
                yield Record(place, fields)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not CSV ({error}).") from None
    except UnicodeDecodeError:
        _decode(path.read_bytes(), path)  # says which line
        raise


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    row = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            batches = file.iter_batches(
                columns=[field] if field in file.schema_arrow.names else None
            )
            for row, fields in enumerate(
                fields for batch in batches for fields in batch.to_pylist()
            ):
                yield Record(f"{path}, row {row}", fields)
    except UnicodeDecodeError:
        which = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {which} is not UTF-8.") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file ({error}).") from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
SUFFIXES = (".txt", ".md", *_READERS)
