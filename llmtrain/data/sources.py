"""A source: records in a fixed order, with a fingerprint.

By the fingerprint, rows that were made from a source are found in the cache without reading its
records. :mod:`llmtrain.data.dataset_names` opens the source that a flag names, and
:mod:`llmtrain.data.recipe_records` one of a recipe that has its own data.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from llmtrain.data.readers import Record, shown
from llmtrain.errors import UserError

Fields: TypeAlias = dict[str, Any]  # the fields of a record, as they are in its source


@dataclass(frozen=True)
class SplitChoice:
    """The flags that say what is read of a data set.

    Attributes:
        split: the split to read.
        is_named: whether a folder of files is read as a data set with splits, because the user
            named a split.
        data_flag: the flag that names the data set.
        split_flag: the flag that names the split.
        text_suffixes: the suffixes of files that are read as text, whatever they are.
    """

    split: str = "train"
    is_named: bool = False
    data_flag: str = "--dataset"
    split_flag: str = "--dataset_train_split"
    text_suffixes: Sequence[str] = ()


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
