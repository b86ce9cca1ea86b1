"""The names that fields have in the data, as ``--columns`` gives them.

A word is ``OURS=THEIRS`` for all data sets, or ``DATASET:OURS=THEIRS`` for one of them.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from llmtrain.data.formats import RECORD_FIELDS
from llmtrain.errors import UserError

# Names of data sets and of fields may have colons and equals signs of their own, as in
# builtin:python-docs or year=2026/a.jsonl. So the first of our names before "=" divides a word.
_WORD = re.compile(
    rf"(?:(?P<dataset>.+?):)??(?P<ours>{'|'.join(RECORD_FIELDS)})=(?P<theirs>.+)", re.DOTALL
)


@dataclass(frozen=True)
class Column:
    """A word of ``--columns``.

    Attributes:
        dataset: the name of the data set; empty for all data sets.
        ours: the name of the field in a format of this package.
        theirs: its name in the data.
    """

    dataset: str
    ours: str
    theirs: str

    def __str__(self) -> str:
        prefix = f"{self.dataset}:" if self.dataset else ""
        return f"{prefix}{self.ours}={self.theirs}"


@dataclass(frozen=True)
class ColumnNames:
    """The value of ``--columns``. A word with a data set wins over one without."""

    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "ColumnNames":
        """Parse the words of the flag.

        Raises:
            UserError: if a word is not ``OURS=THEIRS`` or ``DATASET:OURS=THEIRS``, or if a name is
                used twice.
        """
        return cls(tuple(map(_parse_word, words)))

    def __post_init__(self) -> None:
        for column in self.columns:
            self._check_used_once(column.dataset)

    def of_dataset(self, dataset: str) -> list[Column]:
        """Return the words that name a data set."""
        return [column for column in self.columns if column.dataset == dataset]

    def of_all_datasets(self) -> list[Column]:
        """Return the words that name no data set."""
        return self.of_dataset("")

    def renamed(self, dataset: str) -> dict[str, str]:
        """Return the names of fields in a data set by our names, without that of the text."""
        names = self._names(dataset)
        names.pop("text", None)
        return names

    def text(self, dataset: str) -> str | None:
        """Return the name of the field that holds the text of a data set, if there is a word."""
        return self._names(dataset).get("text")

    def _names(self, dataset: str) -> dict[str, str]:
        columns = [*self.of_all_datasets(), *self.of_dataset(dataset)]
        return {column.ours: column.theirs for column in columns}

    def _check_used_once(self, dataset: str) -> None:
        """Raise :class:`UserError` if a name of a data set's fields is used twice."""
        ours: set[str] = set()
        for column in self.of_dataset(dataset):
            if column.ours in ours:
                raise UserError(
                    f"--columns {column}: {column.ours} is set twice; remove one of them."
                )
            ours.add(column.ours)

        theirs = list(self._names(dataset).values())
        for column in reversed(self.of_dataset(dataset)):
            if theirs.count(column.theirs) > 1:
                raise UserError(
                    f"--columns {column}: the field {column.theirs} is used twice; remove one."
                )


def _parse_word(word: str) -> Column:
    match = _WORD.fullmatch(word)
    if match is not None:
        return Column(match["dataset"] or "", match["ours"], match["theirs"])

    head, _, theirs = word.partition("=")
    ours = head.rpartition(":")[2]
    if not ours or not theirs or ours in RECORD_FIELDS:
        raise UserError(
            f"--columns {word}: write OURS=THEIRS, such as prompt=question, or DATASET:OURS=THEIRS."
        )
    raise UserError(
        f"--columns {word}: no format has a field '{ours}'; write OURS=THEIRS, with one of "
        f"{', '.join(RECORD_FIELDS)} on the left."
    )
