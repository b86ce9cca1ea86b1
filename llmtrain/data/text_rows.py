"""Write text as rows: one stream of documents, which is cut into rows.

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

import hashlib
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from llmtrain.data.store import LENGTHS, TOKENS_PER_BATCH, create_row_file
from llmtrain.interfaces.batches import IGNORED

_T = TypeVar("_T", bound=Sized)


@dataclass(slots=True)
class Piece:
    """A part of the stream.

    Attributes:
        tokens: int32 [n].
        begins_document: whether its first token begins a document.
    """

    tokens: np.ndarray
    begins_document: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


class WrittenStream(NamedTuple):
    """A stream that was written as rows."""

    rows: int
    targets: int
    sha256: str


def write_stream(
    path: Path, pieces: Iterable[Piece], block_size: int, columns: Sequence[str]
) -> WrittenStream:
    """Write a stream as rows that overlap by one token.

    Args:
        path: the file to write.
        pieces: the stream.
        block_size: a row holds one token more.
        columns: the columns of the rows.
    """
    tokens = 0
    rows = 0
    digest = hashlib.sha256()
    are_isolated = "position_ids" in columns

    def padded_stream() -> Iterator[Piece]:
        nonlocal tokens
        for piece in pieces:
            if are_isolated and piece.begins_document:
                digest.update(b"|")  # tokens have four bytes each, so this is unambiguous
            digest.update(piece.tokens.astype("<i4").tobytes())
            tokens += len(piece)
            yield piece
        padding = np.full((1 - tokens) % block_size, IGNORED, np.int32)
        yield Piece(padding, begins_document=True)

    ids = np.empty(0, np.int32)
    is_begin = np.empty(0, np.bool_)
    widths = dict.fromkeys(columns, block_size + 1)
    if LENGTHS in widths:
        widths[LENGTHS] = 1
    with create_row_file(path, widths) as write:
        for batch in batches(padded_stream(), max(TOKENS_PER_BATCH, block_size)):
            ids = np.concatenate([ids, *[piece.tokens for piece in batch]])
            if are_isolated:
                is_begin = np.concatenate([is_begin, _begins(batch)])
            count = (len(ids) - 1) // block_size
            if count > 0:
                row_ids = _overlapping_rows(ids, block_size)
                row_lengths = (row_ids != IGNORED).sum(axis=1, keepdims=True)
                values = {"input_ids": row_ids, "labels": row_ids, LENGTHS: row_lengths}
                if are_isolated:
                    values["position_ids"] = _positions(_overlapping_rows(is_begin, block_size))
                write(values)
                rows += count
                ids = ids[count * block_size :]
                is_begin = is_begin[count * block_size :]

    return WrittenStream(rows=rows, targets=max(tokens - 1, 0), sha256=digest.hexdigest())


def _begins(pieces: Sequence[Piece]) -> np.ndarray:
    """Return for each token of some pieces whether it begins a document, bool [tokens]."""
    is_begin = np.zeros(sum(map(len, pieces)), np.bool_)
    start = 0
    for piece in pieces:
        if piece.begins_document and len(piece) > 0:
            is_begin[start] = True
        start += len(piece)
    return is_begin


def _overlapping_rows(stream: np.ndarray, block_size: int) -> np.ndarray:
    """Return the full rows [rows, block_size + 1] at the beginning of a stream."""
    return np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)[::block_size]


def _positions(is_begin: np.ndarray) -> np.ndarray:
    """Return position ids [rows, width] that restart at each document and at each row.

    Args:
        is_begin: bool [rows, width], whether a token begins a document.
    """
    indices = np.arange(is_begin.shape[1])
    starts = np.maximum.accumulate(np.where(is_begin, indices, 0), axis=1)
    return indices - starts


def batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Group items until their lengths add up to ``size`` or more."""
    batch: list[_T] = []
    length = 0
    for item in items:
        batch.append(item)
        length += len(item)
        if length >= size:
            yield batch
            batch = []
            length = 0
    if batch:
        yield batch
