"""The conversations or preference records of a source, in two splits."""

import array
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.readers import Fields, Source
from llmtrain.data.splits import Split, eval_limit_of, first_of, hash_of
from llmtrain.errors import UserError

R = TypeVar("R", Conversation, PreferenceRecord)


class ReadRecord(NamedTuple, Generic[R]):
    """A readable record.

    Attributes:
        number: its number in the source, from 0. Unreadable records are counted, too.
        place: the file and the line or row, for error messages.
        record: the conversation or the preference record.
    """

    number: int
    place: str
    record: R


class Records(Generic[R]):
    """The records of a source, each of which is training or eval data.

    A record is eval data if the hash of its prompt is below a limit, so all answers to a prompt are
    in the same split. The limit depends on all hashes; see
    :func:`llmtrain.data.splits.eval_limit_of`. So a pass over all records comes first: the one that
    renders them, unless a split is needed before.

    Args:
        source: the records, as fields.
        read: turns the fields of a record into a conversation or a preference record, or raises
            :class:`BadRecord`.
        eval_fraction: the share of the eval data.
        skips_bad: leave bad records out instead of stopping.
        only_split: the split of all records; ``None`` divides them by their hashes.
        max_train_samples: how many training records are used, the first ones; ``None`` for all.

    Attributes:
        first_fault: the place of the first bad record that was skipped, and what is wrong with it;
            empty if there is none.
    """

    def __init__(
        self,
        source: Source,
        read: Callable[[Fields], R],
        eval_fraction: float,
        skips_bad: bool,
        only_split: Split | None = None,
        max_train_samples: int | None = None,
    ) -> None:
        self.source = source
        self.only_split = only_split
        self.first_fault = ""
        self._read: Callable[[Fields], R] = read
        self._eval_fraction = eval_fraction
        self._skips_bad = skips_bad
        self._max_train_samples = max_train_samples
        self._hashes: np.ndarray | None = None  # float64 [records]; NaN if it is unreadable

    def __iter__(self) -> Iterator[ReadRecord[R]]:
        """Yield the readable records, in the order of the source."""
        hashes = array.array("d")
        earlier_hashes = self._hashes
        for number, (place, fields) in enumerate(self.source.records(None)):
            if earlier_hashes is not None and number == len(earlier_hashes):
                raise self.source.changed()
            try:
                record = self._read(fields)
            except BadRecord as error:
                self.refuse(place, error)
                hashes.append(np.nan)
                continue
            hashes.append(hash_of(record))
            yield ReadRecord(number, place, record)

        if earlier_hashes is not None and len(hashes) < len(earlier_hashes):
            raise self.source.changed()
        self._hashes = np.array(hashes)
        if np.isnan(self._hashes).all():
            raise self._nothing_readable(len(hashes))

    def used(self) -> Iterator[ReadRecord[R]]:
        """Yield the readable records of both splits, as :meth:`is_in` has them."""
        if self._max_train_samples is None:  # then these are all records
            yield from self
            return
        is_used = self.is_in("train") | self.is_in("eval")
        for read in self:
            if is_used[read.number]:
                yield read

    @property
    def is_readable(self) -> np.ndarray:
        """Whether each record can be read, bool [records]."""
        is_readable: np.ndarray = ~np.isnan(self._hashes_of_all())
        return is_readable

    def is_in(self, split: Split) -> np.ndarray:
        """Return whether each record belongs to a split, bool [records].

        If records are divided, unreadable ones count as training data. Training records after the
        first ``max_train_samples`` are in no split.
        """
        hashes = self._hashes_of_all()
        if self.only_split is not None:
            is_eval = np.full(len(hashes), self.only_split == "eval")
        else:
            limit = eval_limit_of(hashes[~np.isnan(hashes)], self._eval_fraction)
            is_eval = hashes < limit  # false for NaN
        return is_eval if split == "eval" else first_of(~is_eval, self._max_train_samples)

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the text of every message in one split, or in both."""
        is_selected = None if split is None else self.is_in(split)
        for read in self:
            if is_selected is not None and not is_selected[read.number]:
                continue
            for message in read.record.messages:
                # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
                text = message["content"].encode(errors="ignore").decode()
                if text:
                    yield text

    def refuse(self, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if not self._skips_bad:
            raise UserError(
                f"{place}: {error}; fix it, or leave such records out with --on_bad_row skip."
            ) from None
        self.first_fault = self.first_fault or f"{place}: {error}"

    def place_of(self, number: int) -> str:
        """Return the place of a record. This reads the source again, up to the record."""
        for i, record in enumerate(self.source.records(None)):
            if i == number:
                return record.place
        return self.source.name  # the source has changed

    def _hashes_of_all(self) -> np.ndarray:
        """Return the hash of each record, after a pass over all of them."""
        if self._hashes is None:
            for _ in self:
                pass
        assert self._hashes is not None, "a pass over all records sets them"
        return self._hashes

    def _nothing_readable(self, count: int) -> UserError:
        source = f"{self.source.flag} {self.source.name}"
        if not count:
            return UserError(f"{source} holds no conversation.")
        if count == 1:
            return UserError(f"{source}: the only record was skipped: {self.first_fault}.")
        return UserError(
            f"{source}: all {count:,} records were skipped; the first one is bad: "
            f"{self.first_fault}."
        )
