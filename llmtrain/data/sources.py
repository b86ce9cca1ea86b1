"""A source: records in a fixed order, with a fingerprint.

By the fingerprint, rows that were made from a source are found in the cache without reading its
records. :mod:`llmtrain.data.dataset_names` opens the source that a flag names.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from llmtrain.data.readers import Record, numbered, shown
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.once_per_machine import once_per_machine

if TYPE_CHECKING:
    import datasets

Fields: TypeAlias = dict[str, Any]  # the fields of a record, as they are in its source
# What a recipe passes: a function that yields records, a datasets.Dataset, or a list.
PythonRecords: TypeAlias = Callable[[], Iterable[str | Fields]] | Iterable[str | Fields]


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
                "the text with --text_field, or the fields of conversations with --columns, such "
                "as prompt=question completion=answer."
            )

        text = fields[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field '{field}' is {shown(text)}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: field '{field}' holds half of a surrogate pair, which is not valid text."
            ) from None
        yield text


def dataset_source(name: str, load: Callable[[], "datasets.Dataset"], place: str) -> Source:
    """Return the rows of a ``datasets.Dataset``.

    Args:
        name: the name of the source.
        load: returns the data set, the same one each time.
        place: what error messages write before the number of a row.
    """

    def fingerprint() -> str:
        return hashlib.sha256(load()._fingerprint.encode()).hexdigest()

    def records(field: str | None) -> Iterator[Record]:
        dataset = load()
        if field in dataset.column_names:
            dataset = dataset.select_columns([field])
        return numbered(dataset, place, field)

    return Source(name, fingerprint, records, has_artificial_nulls=True)


def records_source(records: PythonRecords, fingerprint: str | None = None) -> Source:
    """Return the records that a recipe has in Python.

    Args:
        records: a ``datasets.Dataset``, a function that yields texts or dictionaries of fields, or
            a list of these. They must always be the same, in the same order.
        fingerprint: a name that the recipe changes whenever it changes the records. Without it, all
            records are read at each start, to notice changes; see :func:`once_per_machine`.

    Raises:
        UserError: if ``records`` is something else, or if it can be read only once.
    """
    datasets = sys.modules.get("datasets")  # whoever has such an object has imported its module
    if datasets is not None and isinstance(records, datasets.Dataset):
        source = dataset_source("records", lambda: records, place="records, row")
    else:
        is_streamed = datasets is not None and isinstance(records, datasets.IterableDataset)
        source = _iterated_source(records, is_streamed)
    if fingerprint is None:
        return source
    # Other recipes may use the same name.
    digest = hashlib.sha256(f"{_definition_of(records)} {fingerprint}".encode()).hexdigest()
    return replace(source, fingerprint=lambda: digest)


def _iterated_source(records: PythonRecords, is_streamed: bool) -> Source:
    """Return the records that a function or an iteration yields.

    If they come from a ``datasets.IterableDataset``, nulls may stand for absent keys.
    """
    if callable(records):
        function = records
    elif is_streamed or isinstance(records, list | tuple):
        function = functools.partial(iter, records)
    else:
        raise UserError(
            f"tokenize(records=...) cannot read a {type(records).__name__}, because it reads "
            "records several times, in one order; pass a datasets.Dataset, a list of texts or of "
            "dictionaries, or a function that returns or yields them."
        )
    name = getattr(records, "__name__", "records")  # of a function; some callables have none

    def digest_of_records() -> str:
        digest = hashlib.sha256()
        for record in function():
            digest.update(json_text(record, default=repr).encode() + b"\n")
        return digest.hexdigest()

    @functools.cache
    def fingerprint() -> str:
        if isinstance(records, list | tuple):  # which is read at once
            return digest_of_records()
        return once_per_machine(f"fingerprint of {_definition_of(records)}", digest_of_records)

    return Source(
        name,
        fingerprint,
        records=lambda field: numbered(function(), f"{name}, record", field),
        has_artificial_nulls=is_streamed,
    )


def _definition_of(records: object) -> str:
    """Return where a function is defined, or the class of something else."""
    code = getattr(records, "__code__", None)
    if code is None:
        return type(records).__qualname__
    return f"{code.co_filename}:{code.co_firstlineno}"
