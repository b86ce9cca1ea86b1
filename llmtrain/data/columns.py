"""Records whose fields are renamed by ``--columns``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llmtrain.data.readers import Record
from llmtrain.data.sources import Fields, Source
from llmtrain.errors import UserError


def rename_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> list[Source]:
    """Return sources whose fields are renamed.

    A source that has none of these fields stays as it is: it may hold text, or have the usual
    names. The first record of each source decides.

    Args:
        sources: the data sets of a run.
        columns: the name of a field in the sources, by its new name.

    Raises:
        UserError: with the place of a record that has only some of the fields; or with the first
            record of all if no source has them.
    """
    if not columns:
        return list(sources)

    renamed_sources: list[Source] = []
    is_any_renamed = False
    first_records = [source.first() for source in sources]
    for source, first in zip(sources, first_records, strict=True):
        is_renamed = first is not None and any(name in first.fields for name in columns.values())
        if first is not None and is_renamed:
            _check_columns(first, columns)
            is_any_renamed = True
        renamed_sources.append(_with_columns(source, columns) if is_renamed else source)

    if not is_any_renamed:
        for first in first_records:
            if first is not None:
                _check_columns(first, columns)
    return renamed_sources


def _check_columns(record: Record, columns: Mapping[str, str]) -> None:
    """Raise :class:`UserError` if a record lacks a field to rename."""
    for ours, theirs in columns.items():
        if theirs not in record.fields:
            names = ", ".join(map(str, record.fields))
            raise UserError(
                f"{record.place}: no field '{theirs}' for --columns {ours}={theirs}; the record "
                f"has {names}."
            )


def _with_columns(source: Source, columns: Mapping[str, str]) -> Source:
    def records(_: str | None) -> Iterator[Record]:
        for place, fields in source.records(None):
            yield Record(place, _renamed(fields, columns))

    return replace(source, records=records)


def _renamed(fields: Fields, columns: Mapping[str, str]) -> Fields:
    """Rename the fields of a record. A field that has the new name of another one is left out."""
    sources = set(columns.values())
    renamed = {
        name: value for name, value in fields.items() if name not in sources and name not in columns
    }
    for ours, theirs in columns.items():
        if theirs in fields:
            renamed[ours] = fields[theirs]
    return renamed
