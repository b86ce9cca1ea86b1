"""Where text comes from: files, the running Python's own documentation, a data set of the Hugging Face hub, a function.

A source yields records in a fixed order, each with its place for whoever must mend it. Its fingerprint changes when the
records may have changed, so that the rows that were made of it are found again without reading it twice.
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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from llmtrain.data import builtin
from llmtrain.data.cache import file_digest
from llmtrain.errors import UserError, first_line, hub_said

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet", ".csv")
Fields: TypeAlias = dict[str, Any]  # of a record, as its source has them
MakesRecords: TypeAlias = Callable[[], Iterable[str | Fields]]


class Record(NamedTuple):
    """The fields of a record, and its place: the file and line, or row."""

    place: str
    fields: Fields


def documents(source: "Source", field: str) -> Iterator[str]:
    """Yield the texts of a source; raises :class:`UserError` with the place of a record that has none."""
    for place, fields in source.records(field):
        if field not in fields:
            known = ", ".join(map(str, fields))
            raise UserError(f"{place}: no field '{field}'; it has {known} - name one with --text_field.")
        text = fields[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field '{field}' is {json.dumps(text, default=repr)[:40]}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(f"{place}: field '{field}' holds half of a surrogate pair, which is no text.") from None
        yield text


def open_source(name: str) -> "Source":
    """Find what one name of ``--dataset`` means; a :class:`UserError` says what was looked for."""
    if name.startswith("builtin:"):
        if name not in builtin.CORPORA:
            raise UserError(f"--dataset {name} does not exist; there are {' and '.join(builtin.CORPORA)}.")
        return Builtin(name)
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
    return Hub(name)


def _suffix(path: Path) -> str:
    return path.suffix.lower()


def _find_files(name: str) -> list[Path]:
    path = Path(name).expanduser()
    if path.is_file():
        if _suffix(path) not in SUFFIXES:
            raise UserError(f"--dataset {name}: cannot read '{path.suffix}' files; it takes {' '.join(SUFFIXES)}.")
        return [path]
    matching = glob.iglob(str(path), recursive=True)  # noqa: PTH207 - absolute patterns too
    found = path.rglob("*") if path.is_dir() else {*map(Path, matching)}
    return sorted(path for path in found if _suffix(path) in SUFFIXES and path.is_file())


@dataclass(frozen=True)
class Builtin:
    """A corpus that every Python has."""

    name: str

    def fingerprint(self) -> str:
        return builtin.fingerprint(self.name)

    def records(self, field: str | None = None) -> Iterator[Record]:
        for number, fields in enumerate(builtin.CORPORA[self.name]()):
            yield Record(f"{self.name}, document {number}", fields)


@dataclass(frozen=True)
class Files:
    """Files, in the order of their paths."""

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
            try:
                if reader := _READERS.get(_suffix(path)):
                    yield from reader(path, field)
                else:  # the whole file is one text, whatever the field is called
                    yield Record(str(path), {field or "text": _decode(path.read_bytes(), path)})
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}.") from None


@dataclass(frozen=True)
class Hub:
    """The training split of a data set of the hub."""

    name: str  # with :CONFIGURATION where it has several

    def _load(self) -> "datasets.Dataset":
        import datasets  # heavy, and only hub names need it here

        path, _, configuration = self.name.partition(":")
        try:
            loaded: datasets.Dataset = datasets.load_dataset(path, configuration or None, split="train")
        except Exception as error:  # the hub has many ways to say no
            raise UserError(
                f"--dataset {self.name}: no file or folder of that name here, and the hub answered: {hub_said(error)}"
            ) from None
        return loaded

    def fingerprint(self) -> str:
        return hashlib.sha256(self._load()._fingerprint.encode()).hexdigest()

    def records(self, field: str | None = None) -> Iterator[Record]:
        dataset = self._load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        for row, fields in enumerate(dataset):
            yield Record(f"{self.name}, row {row}", fields)


@dataclass(frozen=True)
class Made:
    """The records that a function yields: texts, or fields."""

    make: MakesRecords

    @property
    def name(self) -> str:
        return getattr(self.make, "__name__", "records")  # not every callable has a name

    def fingerprint(self) -> str:
        """Return a digest of the content: whoever changes the function, or what it reads, need not think of a cache."""
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
            yield Record(place, fields)


Source: TypeAlias = Builtin | Files | Hub | Made


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


def _read_jsonl(path: Path, field: str | None) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            place, line = f"{path}, line {number}", _decode(raw, path, number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = first_line(error).partition(": line ")[0]  # without the line that json counts, always 1
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
                if None in fields:
                    raise UserError(f"{place}: more fields than the header has; quote text with commas.")
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
            batches = file.iter_batches(columns=[field] if field in file.schema_arrow.names else None)
            for row, fields in enumerate(fields for batch in batches for fields in batch.to_pylist()):
                yield Record(f"{path}, row {row}", fields)
    except UnicodeDecodeError:
        which = f"field '{field}'" if field else "a field"
        raise UserError(f"{path}, row {row} or one of the next: {which} is not UTF-8.") from None
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is not a parquet file ({error}).") from None


_READERS = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}
