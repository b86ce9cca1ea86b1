"""The source of a recipe that has its own data: a function, a list or a ``datasets.Dataset``."""

import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeAlias

from llmtrain.data.hub import dataset_source
from llmtrain.data.readers import Record, numbered
from llmtrain.data.sources import Fields, Source
from llmtrain.errors import UserError
from llmtrain.files import json_text
from llmtrain.once_per_machine import once_per_machine

RecordFunction: TypeAlias = Callable[[], Iterable[str | Fields]]
# What a recipe passes: a function that yields records, a datasets.Dataset, or a list.
PythonRecords: TypeAlias = RecordFunction | Iterable[str | Fields]


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
    source = _unnamed_source(records)
    if fingerprint is None:
        return source
    # Other recipes may use the same name. Nulls with another meaning make other rows.
    named = [_identity(records), source.has_artificial_nulls, fingerprint]
    digest = hashlib.sha256(json_text(named).encode()).hexdigest()
    return replace(source, fingerprint=lambda: digest)


def _unnamed_source(records: PythonRecords) -> Source:
    """Return a source whose fingerprint follows the content of the records."""
    if callable(records):
        # Some callables have no name.
        name = getattr(records, "__name__", "records")
        return _iterated_source(
            records, name, place=f"{name}(), record", identity=_identity_of_function(records)
        )

    datasets = sys.modules.get("datasets")  # whoever has such an object has imported its module
    if datasets is not None and isinstance(records, datasets.Dataset):
        return dataset_source("records", lambda: records, place="records, row")

    advice = "pass a datasets.Dataset, a list of texts or of dictionaries, or a function"
    kind = type(records).__name__
    # Iterating over a mapping or a table of pandas yields names, and a set has no order.
    is_named = isinstance(records, str | bytes | set | frozenset) or hasattr(records, "keys")
    if is_named or not hasattr(records, "__iter__"):
        raise UserError(f"tokenize(records=...) cannot read a {kind}; {advice}.")
    if iter(records) is records:
        raise UserError(
            f"tokenize(records=...) reads the records several times, but a {kind} can be read only "
            "once; pass a list, or a function that returns it anew."
        )

    is_list = isinstance(records, list | tuple)  # which is read at once
    return _iterated_source(
        lambda: records,
        "records",
        place="records, record",
        identity=None if is_list else _identity(records),
        is_streamed=datasets is not None and isinstance(records, datasets.IterableDataset),
    )


def _identity_of_function(function: RecordFunction) -> str | None:
    """Return a text that tells a function from others; ``None`` if that is not certain.

    Functions that one function makes differ only in the values that they hold.
    """
    try:
        values = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
        if isinstance(function, functools.partial):
            values += [_identity(function.func), function.args, function.keywords]
        return f"{_identity(function)} {json_text(values)}"
    except (TypeError, ValueError):  # a value that is no JSON, or that is not set yet
        return None


def _identity(records: object) -> str:
    """Return the names of a function, or of the class of an object, and where it is defined."""
    named = records if hasattr(records, "__qualname__") else type(records)
    code = getattr(records, "__code__", None)
    line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{named.__module__} {named.__qualname__} {line}"


def _iterated_source(
    function: RecordFunction,
    name: str,
    place: str,
    identity: str | None,
    is_streamed: bool = False,
) -> Source:
    """Return the records that a function yields.

    Args:
        function: yields texts, or dictionaries of fields.
        name: the name of the source.
        place: what error messages write before the number of a record.
        identity: tells the function from others, so that one process on each machine can read its
            records for the fingerprint. ``None``: each process reads them.
        is_streamed: whether they come from a ``datasets.IterableDataset``, so that nulls may stand
            for absent keys.
    """

    def digest_of_records() -> str:
        # A hash of the records, because a function whose name stays the same may have changed.
        # Nulls with another meaning make other rows.
        digest = hashlib.sha256(b"streamed\n" if is_streamed else b"")
        for record in function():
            digest.update(json_text(record, default=repr).encode() + b"\n")
        return digest.hexdigest()

    @functools.cache
    def fingerprint() -> str:
        if identity is None:
            return digest_of_records()
        return once_per_machine(f"fingerprint of {identity}", digest_of_records)

    def records(field: str | None) -> Iterator[Record]:
        return numbered(function(), place, field)

    return Source(name, fingerprint, records, has_artificial_nulls=is_streamed)
