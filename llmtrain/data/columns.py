"""The names that fields have in the data, as ``--columns`` gives them for all data sets."""

from __future__ import annotations  # so that the flags do not import the sources

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from llmtrain.data.formats import RECORD_FIELDS
from llmtrain.errors import UserError

if TYPE_CHECKING:
    from llmtrain.data.readers import Record
    from llmtrain.data.sources import Source


def parse_columns(words: Sequence[str]) -> dict[str, str]:
    """Return the name of each field in the data by its name in a format.

    Raises:
        UserError: if a word is not ``OURS=THEIRS``, or if a name is used twice.
    """
    columns: dict[str, str] = {}
    for word in words:
        # The name in the data may have equals signs of its own.
        ours, _, theirs = word.partition("=")
        dataset = ours.rpartition(":")[0]
        if dataset:
            raise UserError(
                f"--columns {word}: OURS=THEIRS is for all data sets, and cannot be for {dataset} "
                "only; rename the field in a copy of that data set."
            )
        if ours not in RECORD_FIELDS or not theirs:
            raise UserError(
                f"--columns {word}: write OURS=THEIRS, such as prompt=question, with one of "
                f"{', '.join(RECORD_FIELDS)} on the left."
            )
        if ours in columns:
            raise UserError(f"--columns {word}: {ours} is set twice; remove one of them.")
        if theirs in columns.values():
            raise UserError(f"--columns {word}: the field {theirs} is used twice; remove one.")
        columns[ours] = theirs
    return columns


def rename_columns(sources: Sequence[Source], columns: Mapping[str, str]) -> list[Source]:
    """Return sources whose fields have our names.

    A source that has none of the fields stays as it is: it may hold text, or have our names. The
    first record of each source decides.

    Raises:
        UserError: with the place of a record that has only some of the fields, or of the first
            record of all if no source has any.
    """
    if not columns:
        return [*sources]  # no record needs to be read

    names = set(columns.values())
    has_fields = [bool(source.first and names & source.first.fields.keys()) for source in sources]
    renamed_sources = []
    for source, has_some in zip(sources, has_fields, strict=True):
        # If no source has any of the fields, the first record of all says what it has instead.
        if source.first and (has_some or not any(has_fields)):
            _check_fields(source.first, columns)
        renamed_sources.append(_with_columns(source, columns) if has_some else source)
    return renamed_sources


def _check_fields(record: Record, columns: Mapping[str, str]) -> None:
    """Raise :class:`UserError` if a record lacks a field to rename."""
    for ours, theirs in columns.items():
        if theirs not in record.fields:
            names = ", ".join(map(str, record.fields))
            raise UserError(
                f"{record.place}: no field '{theirs}' for --columns {ours}={theirs}; the record "
                f"has {names}."
            )


def _with_columns(source: Source, columns: Mapping[str, str]) -> Source:
    """Rename the fields of a source. A field that has the new name of another one is left out."""
    names = {*columns, *columns.values()}

    def records(_: str | None) -> Iterator[Record]:
        for record in source.records(None):
            fields = {name: value for name, value in record.fields.items() if name not in names}
            for ours, theirs in columns.items():
                if theirs in record.fields:
                    fields[ours] = record.fields[theirs]
            yield record._replace(fields=fields)

    return replace(source, records=records)
