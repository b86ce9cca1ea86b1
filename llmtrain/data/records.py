"""The records of a source, in two splits: documents, conversations or preference records."""

import array
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np
from tqdm import tqdm

from llmtrain.console import can_show_bars, check_interrupt
from llmtrain.data.config import DataConfig, PairConfig, RowConfig
from llmtrain.data.formats import (
    Conversation,
    PreferenceRecord,
    conversation_of,
    parse_columns,
    parse_extra_columns,
    preference_of,
)
from llmtrain.data.messages import BadRecord, tokens_of
from llmtrain.data.readers import Fields, Record, Source, Split, shown
from llmtrain.data.shards import shards_of
from llmtrain.errors import UserError
from llmtrain.files import json_text

Document: TypeAlias = str | np.ndarray  # its text, or its tokens, int32
R = TypeVar("R", Document, Conversation, PreferenceRecord)
Chat = TypeVar("Chat", Conversation, PreferenceRecord)
# Whether each record has something in a split, bool [records].
Splits: TypeAlias = dict[Split, np.ndarray]

# More eval data than this share, or than twice --eval_fraction, are far too many.
_LARGEST_EVAL_SHARE = 0.5


class ReadRecord(NamedTuple, Generic[R]):
    """A record of a source.

    Attributes:
        number: its number in the source, from 0.
        place: the file and the line or row, for error messages.
        record: the document, conversation or preference record.
        extra: its values in the extra columns, by name.
    """

    number: int
    place: str
    record: R
    extra: Fields = {}  # noqa: RUF012 - nobody changes it


@dataclass
class Records(Generic[R]):
    """The conversations or preference records of a source, or its :class:`Documents`.

    Each is training or eval data.

    A record is eval data if the hash of its content is below ``--eval_fraction``. So a record keeps
    its split if others are added. But if that chooses no eval data or far too many, as with a
    handful of records, the splits depend on all records. So :meth:`divide` reads all records before
    any of them is tokenised. It also finds the borders of shards.

    Attributes:
        source: the records, as fields.
        read_fields: turns the fields of a record into a document, a conversation or a preference
            record, or raises :class:`BadRecord`.
        eval_fraction: the share of the eval data.
        max_train_samples: how many training records are used, the first ones that can be read;
            ``None`` for all.
        skips_bad: leave bad records out instead of stopping.
        field: the only field that is needed; ``None`` for all.
        extra_columns: the field and the dtype of each extra column.
        bad: the bad records that were skipped, by their numbers: the place of each, and what is
            wrong with it.
        is_cut: whether some records have a part in each split.
        is_chosen_by_all: whether the eval data depend on all records.
        shard_scale: how many times smaller shards are than usual.
        shards: the numbers of the records of each shard, once they are divided.
        text_bytes: float64 [records], the size of each, once they are divided.
        unit: a word for the records.
        bad_row_hint: what to do about a bad record.
    """

    source: Source
    read_fields: Callable[[Fields], R]
    eval_fraction: float
    max_train_samples: int | None = None
    skips_bad: bool = False
    field: str | None = None
    extra_columns: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    bad: dict[int, str] = dataclasses.field(default_factory=dict)
    is_cut: bool = False
    is_chosen_by_all: bool = False
    shard_scale: int = 1
    shards: list[range] = dataclasses.field(default_factory=list)
    text_bytes: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    _splits: Splits | None = None
    unit: ClassVar[str] = "conversation"
    bad_row_hint: ClassVar[str] = "; fix it, or leave such records out with --on_bad_row skip"

    def divide(self) -> Splits:
        """Return the splits of the records. They are all read for it, unless they have been.

        Bad records are training data. Records after the first ``max_train_samples`` are in no
        split.

        Raises:
            UserError: if a record is bad and must not be skipped, or if there is none.
        """
        if self._splits is None:
            measures = array.array("d")  # the hash and the size of each record, and its bytes
            for number, (place, fields) in enumerate(self._fields()):
                try:
                    record = self.read_fields(fields)
                except BadRecord as error:
                    self.refuse(number, place, error)
                    measures.extend((np.nan, 0, 0))
                    continue
                content, size = self.measure(record)
                hash_bits = int.from_bytes(hashlib.sha256(content).digest()[:6], "big")
                # The hash as a number in [0, 1).
                measures.extend((hash_bits / 2**48, size, self.text_bytes_of(fields, content)))
            hashes, sizes, self.text_bytes = np.frombuffer(measures).reshape(-1, 3).T
            self._splits = self._splits_of(hashes, sizes)
            self.shards = shards_of(self.text_bytes, self.shard_scale)
        return self._splits

    def read(self, shards: Sequence[int] | None = None) -> Iterator[ReadRecord[R]]:
        """Yield the records in the order of the source, without bad ones and those of no split.

        Args:
            shards: the numbers of the shards whose records are needed; ``None`` for all.

        Raises:
            UserError: if a record is bad and must not be skipped, or if the number of records is
                another one than in the pass before.
        """
        splits = self.divide()
        is_used = splits["train"] | splits["eval"]
        if shards is not None:
            is_wanted = np.zeros(len(is_used), bool)
            for number in shards:
                is_wanted[self.shards[number].start : self.shards[number].stop] = True
            is_used &= is_wanted
        count = 0
        for number, (place, fields) in enumerate(self._fields()):
            count += 1
            if number >= len(is_used) or not is_used[number] or number in self.bad:
                continue
            try:
                record = self.read_fields(fields)
            except BadRecord as error:
                self.refuse(number, place, error)
                continue
            extra = {name: fields.get(field) for name, (field, _) in self.extra_columns.items()}
            yield ReadRecord(number, place, record, extra)
        if count != len(is_used):
            raise UserError(
                f"{self.source.flag} {self.source.name}: the number of records changed while they "
                "were read; start again when nothing writes to the data."
            )

    def read_shards(self, numbers: Sequence[int]) -> Iterator[tuple[int, Iterator[ReadRecord[R]]]]:
        """Yield each of some shards with its records, in one pass. They must be read in turn."""
        if not numbers:
            return
        records = self.read(numbers)
        waiting = next(records, None)

        def records_before(stop: int) -> Iterator[ReadRecord[R]]:
            nonlocal waiting
            while waiting is not None and waiting.number < stop:
                yield waiting
                waiting = next(records, None)

        for number in numbers:
            yield number, records_before(self.shards[number].stop)

    def _fields(self) -> Iterator[Record]:
        """Yield the fields of all records, and show how many there have been."""
        records = tqdm(
            self.source.records(self.field),
            desc="reading",
            unit=" records",
            leave=False,
            disable=not can_show_bars(),
        )
        for record in records:
            check_interrupt()
            yield record

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield all texts in one split, or in both."""
        is_in = None if split is None else self.divide()[split]
        for read, part, text in self.parts():
            if is_in is None or (is_in[read.number] and part in (split, None)):
                yield text

    def refuse(self, number: int, place: str, error: BadRecord) -> None:
        """Raise :class:`UserError` for a bad record, unless ``--on_bad_row`` says to skip it."""
        if not self.skips_bad:
            raise UserError(f"{place}: {error}{self.bad_row_hint}.") from None
        self.bad.setdefault(number, f"{place}: {error}")

    def measure(self, record: Any) -> tuple[bytes, int]:
        """Return what decides the split of a record, and its size as a part of the eval data.

        That is the prompt, so all answers to a prompt are in the same split.
        """
        if isinstance(record, np.ndarray):  # of tokens, it is all of them
            return record[0].tobytes(), 1
        hashed = record.prompt or record.messages  # the latter if it begins with an answer
        return json_text(hashed, sort_keys=True, default=str).encode(), 1

    def text_bytes_of(self, fields: Fields, content: bytes) -> int:
        """Return the size of a record for the borders of shards, given what it is hashed by."""
        return len(json_text(fields, default=str))

    def parts(
        self, records: Iterable[ReadRecord[R]] | None = None
    ) -> Iterator[tuple[ReadRecord[R], Split | None, Any]]:
        """Yield the texts of the messages of records; by default of all.

        Yields:
            The record, the split of the text if the record is cut, and the text.
        """
        for read in self.read() if records is None else records:
            record: Any = read.record
            for message in record.messages:
                # Tokenizers cannot take half of a surrogate pair. Rendering reports its line.
                text = message["content"].encode(errors="ignore").decode()
                if text:
                    yield read, None, text

    def choose_eval(self, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Return which records are eval data if the fraction does not choose well.

        These are the records with the smallest hashes, about ``--eval_fraction`` of them.

        Args:
            hashes: float64 [records], NaN if a record is bad.
            sizes: float64 [records], 0 if a record is bad.

        Returns:
            bool [records].
        """
        ascending = np.sort(hashes[~np.isnan(hashes)])
        wanted = min(math.ceil(len(ascending) * self.eval_fraction), len(ascending) - 1)
        # With the smallest hash as the limit, no record would be chosen.
        limits = ascending[wanted:][ascending[wanted:] > ascending[0]]
        limit = limits[0] if len(limits) else 0.0  # 0 if all prompts are the same
        is_eval: np.ndarray = hashes < limit
        return is_eval

    def _splits_of(self, hashes: np.ndarray, sizes: np.ndarray) -> Splits:
        """Choose the split of each record; see :meth:`choose_eval` for the arguments."""
        total = sizes.sum()
        if not total and not self.bad:
            raise UserError(f"{self.source.flag} {self.source.name} holds no {self.unit}.")
        is_eval = hashes < self.eval_fraction  # NaN is not below the fraction
        largest = min(total * max(_LARGEST_EVAL_SHARE, 2 * self.eval_fraction), total - 1)
        if self.source.only_split is not None:
            is_eval = np.full(len(hashes), self.source.only_split == "eval")
        elif self.eval_fraction and total and not 0 < sizes[is_eval].sum() <= largest:
            self.is_chosen_by_all = True
            is_eval = self.choose_eval(hashes, sizes)

        is_train = ~is_eval | self.is_cut
        if self.max_train_samples is not None:
            is_good = ~np.isnan(hashes)
            is_train &= np.cumsum(is_train & is_good) <= self.max_train_samples
        return {"train": is_train, "eval": is_eval}


class Documents(Records[Document]):
    """The texts of a source, some of which may be tokens already. No document is skipped.

    If no hash chooses well, the longest document and its copies are cut: the eval data are their
    ends, and their beginnings are training data.
    """

    unit = "text"
    bad_row_hint = ""

    def measure(self, record: Document) -> tuple[bytes, int]:
        """Return a document, and the number of its characters or tokens."""
        return record.encode() if isinstance(record, str) else record.tobytes(), len(record)

    def text_bytes_of(self, fields: Fields, content: bytes) -> int:
        """Return the bytes of a document."""
        return len(content)

    def parts(
        self, records: Iterable[ReadRecord[Document]] | None = None
    ) -> Iterator[tuple[ReadRecord[Document], Split | None, Any]]:
        """Yield documents; by default all.

        Yields:
            The document, and its text; twice if it is cut, with each split.
        """
        is_eval = self.divide()["eval"]
        for read in self.read() if records is None else records:
            if self.is_cut and is_eval[read.number]:
                train_length = int(len(read.record) * (1 - self.eval_fraction))
                yield read, "train", read.record[:train_length]
                yield read, "eval", read.record[train_length:]
            else:
                yield read, None, read.record

    def choose_eval(self, hashes: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Choose the end of the longest document, and of its copies."""
        self.is_cut = True
        is_eval: np.ndarray = hashes == hashes[np.argmax(sizes)]
        return is_eval


def records_of(
    source: Source, config: DataConfig, chat: RowConfig | None, unpaired: bool, vocabulary: int
) -> Records[Any]:
    """Return the documents, conversations, preference records or tokens of a source.

    Args:
        source: the records as fields.
        config: the share of the eval data, and the field of a text.
        chat: how records become rows, if any source is not text.
        unpaired: the loss takes single answers with a label, not only pairs.
        vocabulary: the largest token of the tokenizer, plus 1; 0 if it is trained on the data.
    """
    extra_columns = parse_extra_columns(config.extra_columns)
    if chat is None or source.format == "text":
        field = parse_columns(config.columns).get("text", "text")
        return Documents(
            source,
            partial(text_of, field=field, vocabulary=vocabulary),
            config.eval_fraction,
            config.max_train_samples,
            field=None if extra_columns else field,
            extra_columns=extra_columns,
        )

    nulls = source.has_artificial_nulls
    read: Callable[..., Any]
    if source.format == "tokens":
        read = partial(tokens_of, vocabulary=vocabulary)
    elif isinstance(chat, PairConfig):
        read = partial(preference_of, allows_single=unpaired, has_artificial_nulls=nulls)
    else:
        read = partial(conversation_of, format=source.format, has_artificial_nulls=nulls)
    return Records(
        source,
        read,
        config.eval_fraction,
        config.max_train_samples,
        skips_bad=chat.on_bad_row == "skip",
        extra_columns=extra_columns,
    )


def text_of(fields: Fields, field: str, vocabulary: int = 0) -> Document:
    """Return the text of a record. A record without one may have tokens.

    Raises:
        BadRecord: if the record has neither, or if they are not valid.
    """
    if field not in fields and "input_ids" in fields:
        tokens = tokens_of(fields, vocabulary)
        if not tokens[1, 1:].all():
            raise BadRecord("labels or a mask leave tokens out; use recipes/finetune.py for that")
        return np.array(tokens[0])
    if field not in fields:
        content = f"has {', '.join(map(str, fields))}" if fields else "is empty"
        raise BadRecord(
            f"no field '{field}'; the record {content}. Rename fields with --columns, such as "
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
