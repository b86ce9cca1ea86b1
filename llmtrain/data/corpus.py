"""Text as tokens: one stream of documents, which is cut into rows.

Each document is read and encoded once.

The stream is: end-of-text, document, end-of-text, document, ..., end-of-text. With a block size B,
row ``i`` holds the tokens ``i * B`` to ``i * B + B`` of the stream. That is B + 1 tokens, of which
the last one is also the first of the next row. So every token except the first is a target exactly
once. Positions of the last row after the end of the stream hold -100.

By default each token attends to all earlier tokens of its row, also to those of other documents.
If the rows have ``position_ids``, these restart at each document, so that attention stays inside
it. A document begins with the end-of-text token (E) in front of it::

    input          E  a  b  E  c  E  d
    position_ids   0  1  2  0  1  0  1
    target         a  b  E  c  E  d  E

The target E is predicted from the document that ends. The input E belongs to the next document, so
its first token is predicted from E alone. No target is lost: the same token is the last target of
one document and the first input of the next.

If the tokenizer puts a BOS (S) before every text, the document begins with that instead, and the
end-of-text token belongs to the document before it::

    input          S  a  b  E  S  c  E
    position_ids   0  1  2  3  0  1  2
    target         a  b  E  S  c  E

The target S is then the only one that is predicted from another document. It is the same for all
documents, so nothing is learnt about one from another.

A document that crosses the border of a row is cut there. Its rest has positions from 0, too. The
padding of the last row is a document of its own.
"""

import array
import copy
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from llmtrain.data.audit import Audit
from llmtrain.data.messages import BadRecord
from llmtrain.data.packing import LENGTHS, TOKENS_PER_BATCH, TokenStore, columns_of
from llmtrain.data.readers import Fields, Split, shown
from llmtrain.data.records import Document, Documents, ReadRecord
from llmtrain.data.shards import create_shard
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.batches import IGNORED

# Characters in a call of the tokenizer, which divides the texts of a call among the CPU cores.
_ENCODE_CHARACTERS = 1 << 20
_SEGMENT_CHARACTERS = 1 << 16
# Matches before white space that follows something else. Python counts \x1c to \x1f as white space,
# Unicode does not.
_GAP = re.compile(r"(?<!\s)(?=[^\S\x1c-\x1f])")


class EncodedCorpus:
    """The documents of a shard as tokens.

    A stored sequence is a document with the token that begins it: end-of-text, or the BOS of a
    tokenizer that puts one before every text. Then end-of-text belongs to the document, too.

    Args:
        documents: the documents of the source.
        shard: the numbers of those in the shard.
        tokenizer: the tokenizer.
        is_trained: whether the tokenizer was trained by
            :func:`llmtrain.data.tokenizer.train_tokenizer`. Long documents are then encoded in
            segments. This changes no token, because such a tokenizer begins a new word wherever
            white space follows something else.
        columns: the columns of the rows. The labels of text are its tokens, so rows of text alone
            need no column of labels. With ``position_ids``, documents do not attend to each other.
        store: the temporary file for their tokens.
    """

    def __init__(
        self,
        documents: Documents,
        shard: range,
        tokenizer: FastTokenizer,
        is_trained: bool,
        columns: Sequence[str],
        store: TokenStore,
    ) -> None:
        self.records = documents
        self.shard = shard
        self.store = store
        self.is_trained = is_trained
        self.columns = columns
        # The tokens before each document, behind each, and behind the last one.
        self._end_of_text = np.array([tokenizer.eos_token_id], np.int32)
        nothing = np.empty(0, np.int32)
        self._before = self._end_of_text
        self._behind = nothing
        self._end = self._end_of_text
        if begins_with_bos(tokenizer):
            self._before = np.array([tokenizer.bos_token_id], np.int32)
            self._behind = self._end_of_text
            self._end = nothing

        self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text

        # Of each stored sequence: the document, the split if the document is cut, the UTF-8 bytes.
        self._documents = array.array("q")
        self._parts: list[str] = []
        self._bytes = array.array("q")
        self._backend.post_processor = None  # it may take white space from the spans of tokens
        # Of the first segments of a text: the tokens, and the characters of each, int64 [n, 2].
        self._tokens: list[np.ndarray] = []
        self._characters: list[np.ndarray] = []

    def encode(self, records: Iterable[ReadRecord[Document]]) -> None:
        """Encode the documents, or take their tokens.

        Raises:
            UserError: if a document cannot be used.
        """
        # Segments, the first character of each in its record, and the record if its text ends.
        waiting: list[tuple[str, int, ReadRecord[Document] | None]] = []
        characters = 0
        for read, part, text in self.records.parts(records):
            self._documents.append(read.number)
            self._parts.append(part or "")
            if not isinstance(text, str):
                self._encode(waiting)  # sequences are stored in the order of their documents
                waiting = []
                # The record may have the tokens around a document itself.
                start = int(np.array_equal(text[:1], self._before))
                stop = len(text) - int(np.array_equal(text[start:][-1:], self._end_of_text))
                self._bytes.append(len(self._backend.decode(text[start:stop].tolist()).encode()))
                self._store(read, [text[start:stop]])
                continue
            self._bytes.append(len(text.encode()))
            start = len(read.record) - len(text) if part == "eval" else 0
            # A text is not split if that might change its tokens.
            segments = _segments_of(text) if self.is_trained else [(text, True)]
            for segment, is_last in segments:
                waiting.append((segment, start, read if is_last else None))
                start += len(segment)
                characters += len(segment)
                if characters >= _ENCODE_CHARACTERS:
                    self._encode(waiting)
                    waiting = []
                    characters = 0
        self._encode(waiting)

    def write(self, path: Path, split: Split, max_length: int, vocabulary: int) -> Audit:
        """Write the rows of a split, of ``max_length + 1`` tokens below ``vocabulary``."""
        sequences = self._sequences_in(split)
        is_in = self.records.divide()
        is_counted = is_in[split]
        if split == "train":  # a document that is cut counts as eval data
            is_counted = is_counted & ~is_in["eval"]
        end = self._end if len(sequences) else np.empty(0, np.int32)
        written = write_stream(
            path, self.store, sequences, end, max_length, self.columns, vocabulary
        )
        return dataclasses.replace(
            written,
            records=int(is_counted[self.shard.start : self.shard.stop].sum()),
            bytes=int(np.array(self._bytes, np.int64)[sequences].sum()),
        )

    def _encode(self, segments: list[tuple[str, int, ReadRecord[Document] | None]]) -> None:
        """Encode segments on all CPU cores, and store the tokens of the texts that end."""
        texts = [text for text, *_ in segments]
        encode = self._backend.encode_batch if self.store.extra else self._backend.encode_batch_fast
        try:
            encodings = encode(texts, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"the tokenizer cannot encode this text: {first_line(error)}."
            ) from None

        for (_, start, read), encoding in zip(segments, encodings, strict=True):
            self._tokens.append(np.array(encoding.ids, np.int32))
            if self.store.extra:
                self._characters.append(np.array(encoding.offsets, np.int64).reshape(-1, 2) + start)
            if read is not None:
                self._store(read, self._tokens)
                self._tokens = []
                self._characters = []

    def _store(self, read: ReadRecord[Document], pieces: list[np.ndarray]) -> None:
        """Store a document, given its tokens in pieces."""
        tokens = np.concatenate([self._before, *pieces, self._behind])
        own = slice(len(self._before), len(tokens) - len(self._behind))
        try:
            extra = dict(read.extra)
            for name, value in extra.items():
                if self._characters and isinstance(value, list) and {*map(type, value)} <= {dict}:
                    characters = np.concatenate(self._characters)
                    extra[name] = _values_in_spans(value, characters, len(read.record))
            self.store.add(tokens, np.ones(len(tokens), bool), own, **extra)
        except BadRecord as error:
            self.records.refuse(read.number, read.place, error)

    def _sequences_in(self, split: Split) -> np.ndarray:
        """Return the numbers of the sequences of a split, in the order of the documents."""
        documents = np.array(self._documents, np.int64)
        is_in = self.records.divide()[split][documents]
        sequences = np.flatnonzero(is_in & np.isin(self._parts, ("", split)))
        return sequences[np.argsort(documents[sequences], kind="stable")]


def _values_in_spans(spans: list[Fields], characters: np.ndarray, length: int) -> np.ndarray:
    """Return the value of each token, float64 [n]: that of the last span that it overlaps, or 0.

    Args:
        spans: the spans, with ``start``, ``stop`` and ``value``.
        characters: int64 [n, 2], the characters of each token.
        length: the number of characters of the text.
    """
    values = np.zeros(len(characters))
    try:
        for start, stop, value in np.array([[s["start"], s["stop"], s["value"]] for s in spans]):
            if not 0 <= start < stop <= length:
                raise ValueError
            values[(characters[:, 0] < stop) & (start < characters[:, 1])] = value
    except (KeyError, TypeError, ValueError):
        raise BadRecord(
            f"{shown(spans)} are no spans with start, stop and value of {length:,} characters"
        ) from None
    return values


def _segments_of(text: str) -> Iterator[tuple[str, bool]]:
    """Split a text about every ``_SEGMENT_CHARACTERS``, before white space.

    Yields:
        Each segment, and whether it is the last one.
    """
    start = 0
    while gap := _GAP.search(text, start + _SEGMENT_CHARACTERS):
        yield text[start : gap.start()], False
        start = gap.start()
    yield text[start:], True


def write_stream(
    path: Path,
    store: TokenStore,
    sequences: np.ndarray,
    end: np.ndarray,
    block_size: int,
    columns: Sequence[str],
    vocabulary: int,
) -> Audit:
    """Write documents as one stream, in rows that overlap by one token.

    Args:
        path: the file to write.
        store: holds the documents.
        sequences: int64 [documents], the number of each in the store.
        end: int32, the tokens after the last document, if there are any.
        block_size: a row holds one token more.
        columns: the columns of the rows.
        vocabulary: the largest token, plus 1.
    """
    stops = store.bounds[1:][sequences]
    lengths = np.diff(store.bounds)[sequences]
    begins = np.cumsum(lengths) - lengths  # of each document in the stream
    offsets = stops - lengths - begins  # from its indices in the stream to those in the store
    tokens = int(lengths.sum()) + len(end)
    targets = max(tokens - 1, 0)
    rows = -(-targets // block_size)
    tail = np.zeros(len(end) + rows * block_size - targets, store.dtype)
    tail["token"] = np.append(end, np.full(len(tail) - len(end), IGNORED))
    are_isolated = "position_ids" in columns

    rows_per_batch = max(TOKENS_PER_BATCH // block_size, 1)
    row_columns = columns_of(columns, block_size + 1, vocabulary, store.extra)
    with create_shard(path, row_columns, rows) as write:
        for row in range(0, rows, rows_per_batch):
            start = row * block_size
            stop = min(row + rows_per_batch, rows) * block_size + 1
            first = np.searchsorted(begins, start, side="right") - 1
            last = np.searchsorted(begins, stop)
            piece_starts = np.maximum(begins[first:last], start) + offsets[first:last]
            piece_stops = np.minimum(stop + offsets[first:last], stops[first:last])
            pieces = list(map(store.read, piece_starts.tolist(), piece_stops.tolist()))
            if stop > tokens - len(end):
                pieces.append(tail)
            stored = _overlapping_rows(np.concatenate(pieces), block_size)
            ids = stored["token"]
            values = {name: stored[name] for name in store.extra}
            values["input_ids"] = values["labels"] = ids
            values[LENGTHS] = (ids != IGNORED).sum(axis=1, keepdims=True)
            if are_isolated:
                is_begin = np.zeros(stop - start, np.bool_)
                is_begin[np.maximum(begins[first:last], start) - start] = True
                is_begin[tokens - start :][:1] = True  # the padding is a document of its own
                # Positions restart at each document and at each row.
                indices = np.arange(block_size + 1)
                starts = np.where(_overlapping_rows(is_begin, block_size), indices, 0)
                values["position_ids"] = indices - np.maximum.accumulate(starts, axis=1)
            write(values)

    digest = _digest_of_stream(store, stops, lengths, end, are_isolated)
    return Audit(rows=rows, targets=targets, sha256=digest)


def _digest_of_stream(
    store: TokenStore, stops: np.ndarray, lengths: np.ndarray, end: np.ndarray, are_isolated: bool
) -> str:
    """Hash the tokens of a stream, and where its documents begin if that matters."""
    digest = hashlib.sha256()
    for stop, length in zip(stops.tolist(), lengths.tolist(), strict=True):
        if are_isolated:
            digest.update(b"|")  # tokens have four bytes each, so this is unambiguous
        digest.update(store.read(stop - length, stop).tobytes())
    digest.update(end.astype("<i4").tobytes() + " ".join(store.extra).encode())
    return digest.hexdigest()


def _overlapping_rows(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Return the full rows [rows, block_size + 1] at the beginning of a stream."""
    return np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)[::block_size]
