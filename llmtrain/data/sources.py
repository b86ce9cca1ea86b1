"""Where text comes from: files, the running Python's own documentation, a dataset of the Hugging Face hub, a function.

A source yields records in a fixed order, each with its place for whoever must mend it, and can name its content cheaply
(``fingerprint``), so that a prepared data set is found again without reading it twice.
"""

import codecs
import csv
import glob
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from llmtrain.data import builtin
from llmtrain.data.cache import file_digest
from llmtrain.data.config import DataConfig
from llmtrain.errors import UserError, first_line, hub_said

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".csv")


class Record(NamedTuple):
    place: str  # the file and line, or row
    fields: dict[str, Any]


class Source(Protocol):
    @property
    def name(self) -> str:
        """As ``--dataset`` has it."""

    def fingerprint(self) -> str:
        """Hex digest that changes when the records may have changed."""

    def records(self, field: str | None = None) -> Iterator[Record]:
        """All records, in a fixed order, with all their fields or one alone. Raises :class:`UserError` naming the file
        and line of bad input."""


def documents(source: Source, field: str) -> Iterator[str]:
    """The texts of a source. Raises :class:`UserError` where one has none."""
    for place, fields in source.records(field):
        yield _text(fields[field], place, field)


def open_source(name: str, config: DataConfig) -> Source:
    """Find what one name of ``--dataset`` means; a :class:`UserError` says what was looked for."""
    if name.startswith("builtin:"):
        return Builtin(name.removeprefix("builtin:"))
    try:
        paths = _find_files(name)
    except (OSError, RuntimeError) as error:  # a name too long, a home folder of nobody
        raise UserError(f"--dataset {name[:80]}: {first_line(error)}.") from None
    if paths:
        return Files(name, tuple(paths))
    looks_local = _suffix(Path(name)) in SUFFIXES or name.startswith((".", "/", "~")) or any(c in name for c in "*?[")
    if looks_local or Path(name).exists():
        raise UserError(
            f"--dataset {name}: found no file ending in {' '.join(SUFFIXES)}; check the path from {Path.cwd()}."
        )
    return Hub(name, config.dataset_config_name)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if _suffix(p) in SUFFIXES and p.is_file())
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(f"--dataset {name}: cannot read '{path.suffix}' files; it takes {' '.join(SUFFIXES)}.")
        return [path]
    found = {Path(match) for match in glob.glob(str(path), recursive=True)}  # noqa: PTH207 - absolute patterns too
    return sorted(p for p in found if _suffix(p) in SUFFIXES and p.is_file())


@dataclass(frozen=True)
class Builtin:
    corpus: str

    def __post_init__(self) -> None:
        if self.corpus not in builtin.CORPORA:
            known = " and ".join(f"builtin:{name}" for name in builtin.CORPORA)
            raise UserError(f"--dataset builtin:{self.corpus} does not exist; there are {known}.")

    @property
    def name(self) -> str:
        return f"builtin:{self.corpus}"

    def fingerprint(self) -> str:
        return builtin.fingerprint(self.corpus)

    def records(self, field: str | None = None) -> Iterator[Record]:
        for number, fields in enumerate(builtin.CORPORA[self.corpus]()):
            place = f"{self.name}, document {number}"
            if field not in (None, *fields):
                raise UserError(_no_field(place, str(field), list(fields)))
            yield Record(place, fields)


@dataclass(frozen=True)
class Files:
    name: str
    paths: tuple[Path, ...]

    def fingerprint(self) -> str:
        # content, not names: a moved data set is the same data set
        total = hashlib.sha256()
        for path in self.paths:
            try:
                total.update(_suffix(path).encode() + file_digest(path))
            except OSError as error:
                raise UserError(f"{path}: {error.strerror}.") from None
        return total.hexdigest()

    def records(self, field: str | None = None) -> Iterator[Record]:
        for path in self.paths:
            reader = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}.get(_suffix(path))
            try:
                if reader is None:  # the whole file is one text, whatever the field is called
                    yield Record(str(path), {field or "text": _decode(path.read_bytes(), path)})
                else:
                    yield from reader(path, field)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}.") from None


@dataclass(frozen=True)
class Hub:
    name: str
    config_name: str | None

    def _load(self):  # type: ignore[no-untyped-def]
        import datasets  # heavy, and only hub names need it here

        try:
            return datasets.load_dataset(self.name, self.config_name, split="train")
        except Exception as error:  # the hub has many ways to say no
            raise UserError(
                f"--dataset {self.name}: no file or folder of that name here, and the hub answered: {hub_said(error)}"
            ) from None

    def fingerprint(self) -> str:
        return hashlib.sha256(self._load()._fingerprint.encode()).hexdigest()

    def records(self, field: str | None = None) -> Iterator[Record]:
        dataset = self._load()
        if field is not None:
            if field not in dataset.column_names:
                raise UserError(_no_field(self.name, field, dataset.column_names))
            dataset = dataset.select_columns([field])
        for i, fields in enumerate(dataset):
            yield Record(f"{self.name}, row {i}", fields)


@dataclass(frozen=True)
class Made:
    """What a function yields: texts, or records with fields."""

    make: Callable[[], Iterable[str | dict[str, Any]]]

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", "records")

    def fingerprint(self) -> str:
        """Of the content: whoever changes the function, or what it reads, need not think of a cache."""
        total = hashlib.sha256()
        for record in self.make():
            total.update(json.dumps(record, default=repr).encode() + b"\n")
        return total.hexdigest()

    def records(self, field: str | None = None) -> Iterator[Record]:
        for number, record in enumerate(self.make()):
            place = f"{self.name}(), record {number}"
            fields = {field or "text": record} if isinstance(record, str) else record
            if not isinstance(fields, dict):
                raise UserError(f"{place} is {json.dumps(record, default=repr)[:40]}, neither text nor fields.")
            if field not in (None, *fields):
                raise UserError(_no_field(place, str(field), list(fields)))
            yield Record(place, fields)


def _decode(raw: bytes, path: Path, first_line: int = 1) -> str:
    if first_line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        line = first_line + raw.count(b"\n", 0, error.start)
        raise UserError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8; convert the file first."
        ) from None


def _no_field(place: str, field: str, fields: list[str]) -> str:
    return f"{place}: no field '{field}'; it has {', '.join(map(str, fields))} - name one with --text_field."


def _text(value: object, place: str, field: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: field '{field}' is {json.dumps(value, default=repr)[:40]}, not text.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise UserError(f"{place}: field '{field}' holds half of a surrogate pair, which is no text.") from None
    return value


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", first_line(error))  # without the line that json counts, always 1
                raise UserError(f"{path}, line {number}: not JSON ({reason}).") from None
            if not isinstance(record, dict):
                raise UserError(f"{path}, line {number}: {line.strip()[:40]!r} is not a JSON object.")
            if field is not None and field not in record:
                raise UserError(_no_field(f"{path}, line {number}", field, list(record)))
            yield Record(f"{path}, line {number}", record)


def _read_csv(path: Path, field: str | None) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if reader.fieldnames is None:
                return
            if field not in (None, *reader.fieldnames):
                raise UserError(_no_field(str(path), str(field), list(reader.fieldnames)))
            for record in reader:
                if None in record:
                    raise UserError(
                        f"{path}, line {reader.line_num}: more fields than the header has; quote text with commas."
                    )
                yield Record(f"{path}, line {reader.line_num}", record)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.reader.line_num}: not CSV ({error}).") from None
    except UnicodeDecodeError:
        _decode(path.read_bytes(), path)  # says which line
        raise


def _read_parquet(path: Path, field: str | None) -> Iterator[Record]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if field not in (None, *file.schema_arrow.names):
                raise UserError(_no_field(str(path), str(field), file.schema_arrow.names))
            row = 0
            for batch in file.iter_batches(columns=None if field is None else [field]):
                for fields in batch.to_pylist():
                    yield Record(f"{path}, row {row}", fields)
                    row += 1
    except UnicodeDecodeError:
        which = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {which} is not UTF-8.") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file ({error}).") from None
