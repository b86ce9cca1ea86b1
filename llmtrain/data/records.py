"""The records of a source, in two splits: documents, conversations or preference records."""

import array
import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.readers import Fields, Source, Split, shown
from llmtrain.errors import UserError
from llmtrain.files import json_text

R = TypeVar("R", str, Conversation, PreferenceRecord)
Chat = TypeVar("Chat", Conversation, PreferenceRecord)

# More eval data than this share, or than twice --eval_fraction, are far too many.
_LARGEST_EVAL_SHARE = 0.5


class ReadRecord(NamedTuple, Generic[R]):
    """A record of a source.

    Attributes:
        number: its number in the source, from 0.
        place: the file and the line or row, for error messages.
        record: the document, conversation or preference record.
    """

    number: int
    place: str
    record: R


@dataclass
class Records(ABC, Generic[R]):
    """The records of a source, each of which is training or eval data.

    A record is eval data if the hash of its content is below ``--eval_fraction``. So a record keeps
    its split if others are added. But if that chooses no eval data or far too many, as with a
    handful of records, the splits depend on all records. So they are known after the first pass.

    Attributes:
        source: the records, as fields.
        read_fields: turns the fields of a record into a document, a conversation or a preference
            record, or raises :class:`BadRecord`.
        eval_fraction: the share of the eval data.
        only_split: the split of all records; ``None`` divides them by their hashes.
        max_train_samples: how many training records are used, the first ones; ``None`` for all.
        skips_bad: leave bad records out instead of stopping.
        field: the only field that is needed; ``None`` for all.
        bad: the numbers of the bad records that were skipped.
        first_fault: the place of the first of them, and what is wrong with it.
        is_in: whether each record has something in a split, bool [records]; empty before the first
            pass. Bad records are training data. Records after the first ``max_train_samples`` are
            in no split.
        is_cut: whether the eval data are the ends of documents, whose beginnings are training data.
        unit: a word for the records.
        bad_row_hint: what to do about a bad record.
    """

    source: Source
    read_fields: Callable[[Fields], R]
    eval_fraction: float
    only_split: Split | None = None
    max_train_samples: int | None = None
    skips_bad: bool = False
    field: str | None = None
    bad: set[int] = dataclasses.field(default_factory=set)
    first_fault: str = ""
    is_in: dict[Split, np.ndarray] = dataclasses.field(default_factory=dict)
    is_cut: bool = False
    unit: ClassVar[str]
    bad_row_hint: ClassVar[str] = ""

    def read(self) -> Iterator[ReadRecord[R]]:
        """Yield the records in the order of the source, without bad ones.

        Records of no split are left out if the splits are known. If not, they are at the end.

        Raises:
            UserError: if a record is bad and must not be skipped, if there is none, or if the
                number of records is another one than in the pass before.
        """
        is_used = None
        if self.is_in:
            is_used = self.is_in["train"] | self.is_in["eval"]
        measures = array.array("d")  # the hash and the size of each record
        count = 0
        for number, (place, fields) in enumerate(self.source.records(self.field)):
            count += 1
            if is_used is not None:
                if number == len(is_used):
                    raise self.source.changed()
                if not is_used[number]:
                    continue
            try:
                record = self.read_fields(fields)
            except BadRecord as error:
                self.refuse(number, place, error)
                measures.extend((np.nan, 0))
                continue
            if is_used is None:
                measures.extend(self.measure(record))
            yield ReadRecord(number, place, record)

        if is_used is None:
            self._divide(*np.array(measures).reshape(-1, 2).T)
        elif count < len(is_used):
            raise self.source.changed()

    def divide(self) -> None:
        """Read all records, so that their splits are known, unless they are."""
        if not self.is_in:
            for _ in self.read():
                pass

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield all texts in one split, or in both."""
        if split is not None:
            self.divide()
        for number, _, record in self.read():
            if split is None or self.is_in[split][number]:
                is_cut = self.is_cut and self.is_in["eval"][number]
                yield from self.texts_of(record, split if is_cut else None)

    def refuse(self, number: int, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if not self.skips_bad:
            raise UserError(f"{place}: {error}{self.bad_row_hint}.") from None
        self.bad.add(number)
        self.first_fault = self.first_fault or f"{place}: {error}"

    @abstractmethod
    def measure(self, record: R) -> tuple[float, int]:
        """Return the hash of a record, in [0, 1), and its size as a part of the eval data."""

    @abstractmethod
    def texts_of(self, record: R, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of a record; only those of a split, if the record is cut."""

    @abstractmethod
    def choose_eval(self, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return which records are eval data if the fraction does not choose well.

        Args:
            hashes: float64 [records], NaN if a record is bad.
            sizes: float64 [records], 0 if a record is bad.

        Returns:
            bool [records].
        """

    def _divide(self, hashes: np.ndarray, sizes: np.ndarray) -> None:
        """Choose the split of each record; see :meth:`choose_eval` for the arguments."""
        total = sizes.sum()
        if not total and not self.bad:
            raise UserError(f"{self.source.flag} {self.source.name} holds no {self.unit}.")
        is_eval = hashes < self.eval_fraction  # NaN is not below the fraction
        largest = min(total * max(_LARGEST_EVAL_SHARE, 2 * self.eval_fraction), total - 1)
        if self.only_split is not None:
            is_eval = np.full(len(hashes), self.only_split == "eval")
        elif self.eval_fraction and total and not 0 < sizes[is_eval].sum() <= largest:
            is_eval = self.choose_eval(hashes, sizes)

        is_train = ~is_eval | self.is_cut
        if self.max_train_samples is not None:
            is_train &= np.cumsum(is_train) <= self.max_train_samples
        self.is_in = {"train": is_train, "eval": is_eval}


class ChatRecords(Records[Chat]):
    """The conversations or preference records of a source.

    The hash is that of the prompt, so all answers to a prompt are in the same split.
    """

    unit = "conversation"
    bad_row_hint = "; fix it, or leave such records out with --on_bad_row skip"

    def measure(self, record: Chat) -> tuple[float, int]:
        """Return the hash of the prompt, and 1."""
        hashed = record.prompt or record.messages  # the latter if it begins with an answer
        return _hash(json_text(hashed, sort_keys=True, default=str).encode()), 1

    def texts_of(self, record: Chat, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of the messages. No record is cut."""
        for message in record.messages:
            # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
            text = message["content"].encode(errors="ignore").decode()
            if text:
                yield text

    def choose_eval(self, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Choose the records with the smallest hashes, about ``--eval_fraction`` of them."""
        ascending = np.sort(hashes[~np.isnan(hashes)])
        wanted = min(math.ceil(len(ascending) * self.eval_fraction), len(ascending) - 1)
        # With the smallest hash as the limit, no record would be chosen.
        limits = ascending[wanted:][ascending[wanted:] > ascending[0]]
        limit = limits[0] if len(limits) else 0.0  # 0 if all prompts are the same
        is_eval: np.ndarray = hashes < limit
        return is_eval


class Documents(Records[str]):
    """The texts of a source. No document is skipped."""

    unit = "text"

    def measure(self, record: str) -> tuple[float, int]:
        """Return the hash of a document, and the number of its characters."""
        return _hash(record.encode()), len(record)

    def texts_of(self, record: str, split: Split | None = None) -> Iterator[str]:
        """Yield a document, or its part in a split."""
        yield record if split is None else self.cut(record, split)

    def choose_eval(self, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Choose the end of the longest document, and of its copies."""
        self.is_cut = True
        is_eval: np.ndarray = hashes == hashes[np.argmax(sizes)]
        return is_eval

    def cut(self, text: str, split: Split) -> str:
        """Return the part of a document in a split, if the document is cut."""
        start = int(len(text) * (1 - self.eval_fraction))
        return text[:start] if split == "train" else text[start:]


def text_of(fields: Fields, field: str) -> str:
    """Return the text of a record.

    Raises:
        BadRecord: if the record has no such field, or no valid text in it.
    """
    if field not in fields:
        names = ", ".join(map(str, fields))
        raise BadRecord(
            f"no field '{field}'; the record has {names}. Rename fields with --columns, such as "
            "text=body, or prompt=question completion=answer"
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
