"""The records of a source, in two splits: documents, conversations or preference records."""

import array
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.readers import Fields, Source, shown
from llmtrain.errors import UserError
from llmtrain.files import json_text

Split: TypeAlias = Literal["train", "eval"]
R = TypeVar("R", str, Conversation, PreferenceRecord)

# More eval data than this share, or than twice --eval_fraction, are far too many.
_LARGEST_EVAL_SHARE = 0.5


class Measures(NamedTuple):
    """The properties of a record that its split depends on.

    Attributes:
        hash: the hash of its content, in [0, 1); NaN if the record is bad.
        bytes: UTF-8 bytes of a document.
        characters: characters of a document.
    """

    hash: float
    bytes: int = 0
    characters: int = 0


class ReadRecord(NamedTuple, Generic[R]):
    """A record of a source.

    Attributes:
        number: its number in the source, from 0.
        place: the file and the line or row, for error messages.
        measures: the properties that its split depends on.
        record: the document, conversation or preference record; ``None`` if the record is bad.
    """

    number: int
    place: str
    measures: Measures
    record: R | None


class Division(NamedTuple):
    """The splits of the records of a source. Each array is bool [records].

    Attributes:
        is_train: whether a record is training data. Bad records are, too. Records after the first
            ``max_train_samples`` are in no split.
        is_eval: whether it is eval data.
        is_cut: whether the end of a document is eval data, and the rest of it training data.
    """

    is_train: np.ndarray
    is_eval: np.ndarray
    is_cut: np.ndarray

    def is_in(self, split: Split) -> np.ndarray:
        """Return whether each record has something in a split, bool [records]."""
        return self.is_train if split == "train" else self.is_eval


@dataclass
class Records(Generic[R]):
    """The records of a source, each of which is training or eval data.

    A record is eval data if the hash of its prompt is below a limit. So all answers to a prompt are
    in the same split, and a record keeps its split if others are added. But the limit depends on
    all hashes if there are few. So the splits are known after a pass over all records: the one that
    encodes them, or :attr:`division` if they are needed before.

    Attributes:
        source: the records, as fields.
        read_fields: turns the fields of a record into a document, a conversation or a preference
            record, or raises :class:`BadRecord`.
        eval_fraction: the share of the eval data.
        only_split: the split of all records; ``None`` divides them by their hashes.
        max_train_samples: how many training records are used, the first ones; ``None`` for all.
        skips_bad: leave bad records out instead of stopping.
        field: the only field that is needed; ``None`` for all.
        first_fault: the place of the first bad record that was skipped, and what is wrong with it;
            empty if there is none.
    """

    source: Source
    read_fields: Callable[[Fields], R]
    eval_fraction: float
    only_split: Split | None = None
    max_train_samples: int | None = None
    skips_bad: bool = False
    field: str | None = None
    first_fault: str = ""

    def read(self, division: Division | None = None) -> Iterator[ReadRecord[R]]:
        """Yield the records in the order of the source, also those that are bad.

        Args:
            division: the splits, if they are known. Then records of no split are left out.

        Raises:
            UserError: if a record is bad and must not be skipped, or if the number of records is
                not the one that was divided.
        """
        count = 0
        for number, (place, fields) in enumerate(self.source.records(self.field)):
            count += 1
            if division is not None:
                if number == len(division.is_train):
                    raise self.source.changed()
                if not division.is_train[number] and not division.is_eval[number]:
                    continue
            try:
                record = self.read_fields(fields)
            except BadRecord as error:
                self.refuse(place, error)
                yield ReadRecord(number, place, Measures(hash=np.nan), record=None)
            else:
                yield ReadRecord(number, place, self.measure(record), record)

        if division is not None and count < len(division.is_train):
            raise self.source.changed()

    @cached_property
    def division(self) -> Division:
        """The splits. Unlike :meth:`divide`, this reads all records."""
        measures = array.array("d")
        for read in self.read():
            measures.extend(read.measures)
        return self.divide(measures)

    def divide(self, measures: "array.array[float]") -> Division:
        """Return the splits of all records.

        Args:
            measures: the :class:`Measures` of all records, one number after the other.

        Raises:
            UserError: if there is no record.
        """
        hashes = np.array(measures).reshape(-1, len(Measures._fields))[:, 0]
        if not len(hashes):
            raise UserError(f"{self.source.flag} {self.source.name} holds no conversation.")
        limit = _eval_limit(hashes[~np.isnan(hashes)], self.eval_fraction)
        is_eval = hashes < limit  # NaN is not below the limit
        if self.only_split is not None:
            is_eval = np.full(len(hashes), self.only_split == "eval")
        return Division(
            is_train=_first_of(~is_eval, self.max_train_samples),
            is_eval=is_eval,
            is_cut=np.zeros_like(is_eval),
        )

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield all texts in one split, or in both."""
        if split is None:
            for read in self.read():
                if read.record is not None:
                    yield from self.texts_of(read.record)
            return

        for read in self.read(self.division):
            if read.record is not None and self.division.is_in(split)[read.number]:
                is_cut = self.division.is_cut[read.number]
                yield from self.texts_of(read.record, split if is_cut else None)

    def refuse(self, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if not self.skips_bad:
            raise UserError(
                f"{place}: {error}; fix it, or leave such records out with --on_bad_row skip."
            ) from None
        self.first_fault = self.first_fault or f"{place}: {error}"

    def place_of(self, number: int) -> str:
        """Return the place of a record. This reads the source again, up to the record."""
        for i, record in enumerate(self.source.records(self.field)):
            if i == number:
                return record.place
        return self.source.name  # the source has changed

    def measure(self, record: R) -> Measures:
        """Return the properties that the split of a record depends on."""
        assert not isinstance(record, str), "these are Documents"
        hashed = record.prompt or record.messages  # the latter if it begins with an answer
        return Measures(_hash(json_text(hashed, sort_keys=True, default=str).encode()))

    def texts_of(self, record: R, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of a record; only those of a split, if the record is cut."""
        assert not isinstance(record, str), "these are Documents"
        for message in record.messages:
            # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
            text = message["content"].encode(errors="ignore").decode()
            if text:
                yield text


class Documents(Records[str]):
    """The texts of a source.

    A document is eval data if its hash is below ``--eval_fraction``. So adding other documents does
    not move it to the other split. If a split is then almost empty, as with a handful of documents,
    the eval data are the end of the longest document instead, and of its copies.
    """

    def divide(self, measures: "array.array[float]") -> Division:
        """Return the splits of all documents; see :class:`Records`."""
        hashes, bytes, characters = np.array(measures).reshape(-1, len(Measures._fields)).T
        if not bytes.sum():
            raise UserError(f"{self.source.flag} {self.source.name} holds no text.")
        is_eval = hashes < self.eval_fraction
        is_cut = np.zeros_like(is_eval)
        largest = bytes.sum() * max(_LARGEST_EVAL_SHARE, 2 * self.eval_fraction)
        if self.only_split is not None:
            is_eval = np.full(len(hashes), self.only_split == "eval")
        elif self.eval_fraction and not 0 < bytes[is_eval].sum() <= largest:
            is_cut = hashes == hashes[np.argmax(characters)]
            is_eval = is_cut
        return Division(
            is_train=_first_of(~is_eval | is_cut, self.max_train_samples),
            is_eval=is_eval,
            is_cut=is_cut,
        )

    def cut(self, text: str, split: Split) -> str:
        """Return the part of a document in a split, if the document is cut."""
        start = int(len(text) * (1 - self.eval_fraction))
        return text[:start] if split == "train" else text[start:]

    def measure(self, record: str) -> Measures:
        """Return the hash and the size of a document."""
        encoded = record.encode()
        return Measures(_hash(encoded), bytes=len(encoded), characters=len(record))

    def texts_of(self, record: str, split: Split | None = None) -> Iterator[str]:
        """Yield a document, or its part in a split."""
        yield record if split is None else self.cut(record, split)

    def refuse(self, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError`: no document is skipped."""
        raise UserError(f"{place}: {error}.") from None


def text_of(fields: Fields, field: str) -> str:
    """Return the text of a record.

    Raises:
        BadRecord: if the record has no such field, or no valid text in it.
    """
    if field not in fields:
        names = ", ".join(map(str, fields))
        raise BadRecord(
            f"no field '{field}'; the record has {names}. Rename fields with --columns: that of "
            "a text, such as text=body, or those of conversations, such as prompt=question "
            "completion=answer"
        )
    text = fields[field]
    if not isinstance(text, str):
        raise BadRecord(f"field '{field}' is {shown(text)}, not text")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRecord(
            f"field '{field}' holds half of a surrogate pair, which is not valid text"
        ) from None
    return text


def _hash(text: bytes) -> float:
    """Hash a text to a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text).digest()[:6], "big") / 2**48


def _first_of(is_selected: np.ndarray, count: int | None) -> np.ndarray:
    """Return which records are the first ``count`` selected ones, bool [records].

    Args:
        is_selected: whether each record is selected, bool [records].
        count: how many; ``None`` for all selected ones.
    """
    if count is None:
        return is_selected
    is_first: np.ndarray = is_selected & (np.cumsum(is_selected) <= count)
    return is_first


def _eval_limit(hashes: np.ndarray, fraction: float) -> float:
    """Return the limit below which the hash of a record makes it eval data.

    The limit is ``fraction``, unless that would choose no record or far too many. Then it is a
    limit that chooses about ``fraction`` of them. Records with the same prompt have the same hash
    and stay in the same split.

    Args:
        hashes: float64 [records], the hash of each record, in [0, 1).
        fraction: the share of eval data, in [0, 1).
    """
    count = len(hashes)
    if not count:
        return fraction
    chosen = int((hashes < fraction).sum())
    largest = min(count * max(_LARGEST_EVAL_SHARE, 2 * fraction), count - 1)
    if not fraction or 0 < chosen <= largest:
        return fraction

    ascending = np.sort(hashes)
    wanted = min(math.ceil(count * fraction), count - 1)
    # With the smallest hash as the limit, no record would be chosen.
    limits = ascending[wanted:][ascending[wanted:] > ascending[0]]
    return float(limits[0]) if len(limits) else 0.0  # 0 if all prompts are the same
