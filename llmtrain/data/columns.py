"""Sources whose fields have our names, as ``--columns`` says."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from llmtrain.data.column_names import ColumnNames
from llmtrain.data.readers import Record
from llmtrain.data.sources import Fields, Source
from llmtrain.errors import UserError


def rename_columns(sources: Sequence[Source], names: ColumnNames) -> list[Source]:
    """Return sources whose fields have our names.

    A source that has none of the fields stays as it is, unless a word names it: it may hold text,
    or have our names. The first record of each source decides.

    Raises:
        UserError: with the place of a record that has only some of the fields; or with the first
            record of all if no source has the fields that are for all sources.
    """
    renamed_sources: list[Source] = []
    common_names = names.renamed("")
    is_common_name_used = False
    unchanged: list[Record] = []  # the first record of each source that stays as it is
    for source in sources:
        columns = names.renamed(source.name)
        first = source.first if columns else None
        if first is None:
            renamed_sources.append(source)
            continue

        used = {ours: theirs for ours, theirs in columns.items() if theirs in first.fields}
        is_named = any(column.ours != "text" for column in names.of_dataset(source.name))
        if used or is_named:
            _check_columns(first, columns)
            renamed_sources.append(_with_columns(source, columns))
            is_common_name_used |= bool(used.items() & common_names.items())
        else:
            renamed_sources.append(source)
            unchanged.append(first)

    if not is_common_name_used:
        for first in unchanged:
            _check_columns(first, common_names)
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
