"""The conversations or preference records of a source, divided into training and eval data."""

import array
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from tqdm import tqdm

from llmtrain.console import can_show_bars
from llmtrain.data.config import DataConfig, RowConfig
from llmtrain.data.formats import Conversation, PreferenceRecord
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import Split, hash_fraction
from llmtrain.data.sources import Fields, Source
from llmtrain.errors import UserError
from llmtrain.files import json_text

R = TypeVar("R", Conversation, PreferenceRecord)
T = TypeVar("T")


class _Closable(Protocol):
    def close(self) -> None:
        """Delete all temporary files."""


C = TypeVar("C", bound=_Closable)


class ReadRecord(NamedTuple, Generic[R]):
    """A readable record.

    Attributes:
        number: its number in the source, from 0. Unreadable records are counted, too.
        place: the file and the line or row, for error messages.
        split: the split that it belongs to.
        record: the conversation or the preference record.
    """

    number: int
    place: str
    split: Split
    record: R


class Records(Generic[R]):
    """The records of a source, each of which is training or eval data.

    A record is eval data if the hash of its prompt is below a limit, so all answers to a prompt are
    in the same split. The limit is ``--eval_fraction``, unless that would choose no record or far
    too many; see :func:`eval_limit_of`. Then the limit depends on all hashes, so it is known only
    after all records were read; see :meth:`settle_limit`.

    Args:
        source: the records, as fields.
        read: turns the fields of a record into a conversation or a preference record, or raises
            :class:`BadRecord`.
        config: holds the share of the eval data.
        chat: says what to do with bad records.
        only_split: the split of all records; ``None`` divides them by their hashes.

    Attributes:
        unreadable: the number of records that the last pass over the source could not read.
        first_fault: the place of the first bad record that was skipped, and what is wrong with it;
            empty if there is none.
    """

    def __init__(
        self,
        source: Source,
        read: Callable[[Fields], R],
        config: DataConfig,
        chat: RowConfig,
        only_split: Split | None = None,
    ) -> None:
        self.source = source
        self.chat = chat
        self.only_split = only_split
        self.unreadable = 0
        self.first_fault = ""
        self._read: Callable[[Fields], R] = read
        self._eval_fraction = config.eval_fraction
        self._limit = config.eval_fraction
        self._hashes: array.array[float] = array.array("d")

    def __iter__(self) -> Iterator[ReadRecord[R]]:
        """Yield the readable records, in the order of the source."""
        self.unreadable = 0
        self._hashes = array.array("d")
        for number, (place, fields) in enumerate(self.source.records(None)):
            try:
                record = self._read(fields)
            except BadRecord as error:
                self.refuse(place, error)
                self.unreadable += 1
                continue
            yield ReadRecord(number, place, self._split_of(record), record)

        if self.unreadable and not self._hashes:
            source = f"{self.source.flag} {self.source.name}"
            if self.unreadable == 1:
                raise UserError(f"{source}: the only record was skipped: {self.first_fault}.")
            raise UserError(
                f"{source}: all {self.unreadable:,} records were skipped; the first one is bad: "
                f"{self.first_fault}."
            )
        if not self._hashes:
            raise UserError(f"{self.source.flag} {self.source.name} holds no conversation.")

    def progress(self, items: Iterable[T]) -> Iterator[T]:
        """Yield one item for each record, and show a progress bar."""
        return iter(
            tqdm(
                items,
                total=self.source.count(),
                desc="rendering",
                unit=" records",
                leave=False,
                disable=not can_show_bars(),
            )
        )

    def encode_settled(self, encode_once: Callable[[], C]) -> C:
        """Encode all records, and again if their splits are others than the first pass assumed.

        That happens to few records, or to many copies of one.

        Args:
            encode_once: passes over all records, and returns what it has made of them.
        """
        encoded = encode_once()
        if self.settle_limit():
            encoded.close()
            encoded = encode_once()
        return encoded

    def settle_limit(self) -> bool:
        """Choose the limit for the records that were read, after all of them were.

        Returns:
            Whether the limit has changed, so that records may belong to the other split.
        """
        before = self._limit
        if self.only_split is None:
            self._limit = eval_limit_of(self._hashes, self._eval_fraction)
        return self._limit != before

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the text of every message in one split, or in both."""
        if split is not None:
            for _ in self:  # read all hashes
                pass
            self.settle_limit()

        for read in self:
            if split not in (None, read.split):
                continue
            for message in read.record.messages:
                # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
                text = message["content"].encode(errors="ignore").decode()
                if text:
                    yield text

    def refuse(self, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if self.chat.on_bad_row == "error":
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

    def _split_of(self, record: R) -> Split:
        """Return the split of a record, and remember its hash."""
        hashed = _hash_of(record)
        self._hashes.append(hashed)
        if self.only_split is not None:
            return self.only_split
        return "eval" if hashed < self._limit else "train"


def eval_limit_of(hashes: Sequence[float], fraction: float) -> float:
    """Return the limit below which the hash of a record makes it eval data.

    The limit is ``fraction``, unless that would choose no record or far too many. Then it is a
    limit that chooses about ``fraction`` of them. Records with the same prompt have the same hash
    and stay in the same split.

    Args:
        hashes: the hash of each record, in [0, 1).
        fraction: the share of eval data, in [0, 1).
    """
    chosen = sum(number < fraction for number in hashes)
    largest = min(len(hashes) * max(0.5, 2 * fraction), len(hashes) - 1)
    if not fraction or 0 < chosen <= largest:
        return fraction

    ascending = sorted(hashes)
    count = min(math.ceil(len(hashes) * fraction), len(hashes) - 1)
    for number in ascending[count:]:
        if number > ascending[0]:
            return number
    return 0.0  # all prompts are the same


def _hash_of(record: Conversation | PreferenceRecord) -> float:
    """Hash the prompt of a record to a number in [0, 1).

    The prompt of a conversation is what comes before its first answer. A conversation that begins
    with an answer is hashed as a whole.
    """
    if isinstance(record, PreferenceRecord):
        prompt = record.prompt
    else:
        first_answer = 0
        while record.messages[first_answer]["role"] != "assistant":
            first_answer += 1
        prompt = record.messages[:first_answer] or record.messages
    return hash_fraction(json_text(prompt, sort_keys=True, default=str))
