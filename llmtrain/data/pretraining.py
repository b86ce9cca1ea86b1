"""Tokenise plain text, as one stream of tokens that is cut into rows.

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
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from llmtrain.console import can_show_bars
from llmtrain.data.config import DataConfig
from llmtrain.data.packing import (
    LENGTHS,
    TOKENS_PER_BATCH,
    Split,
    SplitStats,
    create_row_file,
    hash_fraction,
)
from llmtrain.data.sources import Source, documents
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos, is_trained
from llmtrain.errors import UserError, first_line
from llmtrain.interfaces.batches import IGNORED

# Characters in a call of the tokenizer, which divides the texts of a call among the CPU cores.
_ENCODE_CHARACTERS = 1 << 20
_SEGMENT_CHARACTERS = 1 << 16
# Matches before white space that follows something else. Python counts \x1c to \x1f as white space,
# Unicode does not.
_GAP = re.compile(r"(?<!\s)(?=[^\S\x1c-\x1f])")
_T = TypeVar("_T", bound=Sized)


class _Cut(NamedTuple):
    """A document whose end is the eval data.

    Attributes:
        document: its number in the source.
        start: the character at which the eval data begin.
    """

    document: int
    start: int


@dataclass(slots=True)
class _Piece:
    """A part of the stream.

    Attributes:
        tokens: int32 [n].
        begins_document: whether its first token begins a document.
    """

    tokens: np.ndarray
    begins_document: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


class Texts:
    """The documents of a source, divided into training and eval data.

    A document is eval data if its hash is below ``--eval_fraction``. So adding other documents does
    not move it to the other split. If a split is then almost empty, as with a handful of documents,
    the eval data are the end of the longest document instead.

    Args:
        source: the documents.
        config: the name of the text's field, the share of the eval data and the tokenizer.
        columns: the columns of the rows. The labels of text are its tokens, so rows of text alone
            need no column of labels. With ``position_ids``, documents do not attend to each other.
        only_split: the split of all documents; ``None`` to divide them.

    Attributes:
        documents: the number of documents in each split.
        bytes: UTF-8 bytes of each split.
    """

    def __init__(
        self,
        source: Source,
        config: DataConfig,
        columns: Sequence[str] = ("input_ids",),
        only_split: Split | None = None,
    ) -> None:
        self.source = source
        self.config = config
        self.columns = columns
        self.only_split = only_split
        self.fraction = 0.0 if only_split else config.eval_fraction
        self.documents: dict[Split, int] = {"train": 0, "eval": 0}
        self.bytes: dict[Split, int] = {"train": 0, "eval": 0}
        self._cut: _Cut | None = None

        longest = 0
        longest_length = 0
        for number, text in enumerate(self.texts()):
            split = self._split_of(text)
            self.documents[split] += 1
            self.bytes[split] += len(text.encode())
            if len(text) > longest_length:
                longest = number
                longest_length = len(text)

        total_bytes = sum(self.bytes.values())
        if not total_bytes:
            raise UserError(f"{source.flag} {source.name} holds no text.")

        largest_share = max(0.5, 2 * self.fraction)
        is_balanced = 0 < self.bytes["eval"] <= total_bytes * largest_share
        if self.fraction and not is_balanced:
            self._cut = _Cut(document=longest, start=int(longest_length * (1 - self.fraction)))
            eval_bytes = sum(len(text.encode()) for text in self.texts("eval"))
            self.documents = {"train": sum(self.documents.values()) - 1, "eval": 1}
            self.bytes = {"train": total_bytes - eval_bytes, "eval": eval_bytes}
        if not self.bytes["train"] and only_split is None:
            raise UserError(
                f"--eval_fraction {self.fraction} leaves no text to train on; lower it, or set it "
                "to 0."
            )

    def _split_of(self, text: str) -> Split:
        """Return the split that the hash of a document chooses, if documents are divided."""
        if self.only_split is not None:
            return self.only_split
        return "eval" if hash_fraction(text) < self.fraction else "train"

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of one split, or of both."""
        for number, text in enumerate(
            documents(self.source, self.config.text_column(self.source.name))
        ):
            if split is None:
                yield text
            elif self._cut is None:
                if split == self._split_of(text):
                    yield text
            elif number == self._cut.document:
                yield text[self._cut.start :] if split == "eval" else text[: self._cut.start]
            elif split == "train":
                yield text

    def encode(self, tokenizer: FastTokenizer, folder: Path) -> "EncodedTexts":
        """Return the texts with a tokenizer. They are tokenised when their rows are written."""
        return EncodedTexts(self, tokenizer)

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, split: Split
    ) -> SplitStats:
        """Tokenise a split and write its rows, which hold ``block_size + 1`` tokens."""
        texts = self.texts(split) if self.bytes[split] else ()
        has_trained_tokenizer = is_trained(self.config.tokenizer or "")
        with tqdm(
            total=self.bytes[split],
            unit="B",
            unit_scale=True,
            desc="tokenising",
            leave=False,
            disable=not can_show_bars(),
        ) as bar:
            pieces = _encoded(tokenizer, texts, splits_texts=has_trained_tokenizer, bar=bar)
            stats = _write_rows(path, pieces, block_size, self.columns)
        return stats._replace(documents=self.documents[split], bytes=self.bytes[split])


class EncodedTexts:
    """The texts of a source with a tokenizer, ready to be written as rows."""

    def __init__(self, texts: Texts, tokenizer: FastTokenizer) -> None:
        self.texts = texts
        self.tokenizer = tokenizer

    def lengths(self, split: Split) -> np.ndarray:
        """Return no lengths: text is cut into rows of any length."""
        return np.empty(0, np.int64)

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Tokenise a split and write its rows, which hold ``max_length + 1`` tokens."""
        return self.texts.write(self.tokenizer, max_length, path, split)

    def close(self) -> None:
        """Do nothing: there are no temporary files."""


def _encoded(
    tokenizer: FastTokenizer,
    texts: Iterable[str],
    splits_texts: bool,
    bar: "tqdm[NoReturn]",
) -> Iterator[_Piece]:
    """Yield the stream: documents, with end-of-text before the first and after each of them.

    If the tokenizer puts a BOS before every text, each document is preceded by that instead,
    because its model was trained that way.

    Args:
        tokenizer: the tokenizer.
        texts: the documents.
        splits_texts: split long documents into segments for the threads of the tokenizer. With a
            tokenizer of :func:`llmtrain.data.tokenizer.train_tokenizer` this changes no token,
            because it begins a new word wherever white space follows something else.
        bar: shows how many bytes of text were tokenised.
    """
    end_of_text = np.array([tokenizer.eos_token_id], np.int32)
    puts_bos = begins_with_bos(tokenizer)
    first_token = np.array([tokenizer.bos_token_id], np.int32) if puts_bos else end_of_text

    # These come after the call of begins_with_bos(), which changes the same settings.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text

    has_documents = False
    for batch in _batches(texts, _ENCODE_CHARACTERS):
        if splits_texts:
            documents_of_batch = [list(_segments(text)) for text in batch]
        else:
            documents_of_batch = [[text] for text in batch]
        segments = list(itertools.chain.from_iterable(documents_of_batch))
        try:
            encodings = iter(backend.encode_batch_fast(segments, add_special_tokens=False))
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"the tokenizer cannot encode this text: {first_line(error)}."
            ) from None

        for document in documents_of_batch:
            if puts_bos and has_documents:
                yield _Piece(end_of_text)
            yield _Piece(first_token, begins_document=True)
            for _ in document:
                yield _Piece(np.array(next(encodings).ids, np.int32))
            has_documents = True
        bar.update(sum(len(text.encode()) for text in batch))
    if has_documents:
        yield _Piece(end_of_text)


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
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


def _segments(text: str) -> Iterator[str]:
    """Split a text about every ``_SEGMENT_CHARACTERS``, before white space."""
    start = 0
    while gap := _GAP.search(text, start + _SEGMENT_CHARACTERS):
        yield text[start : gap.start()]
        start = gap.start()
    yield text[start:]


def _write_rows(
    path: Path, pieces: Iterable[_Piece], block_size: int, columns: Sequence[str]
) -> SplitStats:
    """Write the stream as rows that overlap by one token.

    Args:
        path: the file to write.
        pieces: the stream.
        block_size: a row holds one token more.
        columns: the columns of the rows.

    Returns:
        The counts of rows and targets, and the hash. Documents and bytes are not counted here.
    """
    tokens = 0
    rows = 0
    digest = hashlib.sha256()
    are_isolated = "position_ids" in columns

    def padded_stream() -> Iterator[_Piece]:
        nonlocal tokens
        for piece in pieces:
            if are_isolated and piece.begins_document:
                digest.update(b"|")  # tokens have four bytes each, so this is unambiguous
            digest.update(piece.tokens.astype("<i4").tobytes())
            tokens += len(piece)
            yield piece
        padding = np.full((1 - tokens) % block_size, IGNORED, np.int32)
        yield _Piece(padding, begins_document=True)

    ids = np.empty(0, np.int32)
    is_begin = np.empty(0, np.bool_)
    widths = dict.fromkeys(columns, block_size + 1)
    if LENGTHS in widths:
        widths[LENGTHS] = 1
    with create_row_file(path, widths) as write:
        for batch in _batches(padded_stream(), max(TOKENS_PER_BATCH, block_size)):
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

    return SplitStats(
        documents=0,
        rows=rows,
        targets=max(tokens - 1, 0),
        bytes=0,
        sha256=digest.hexdigest(),
    )


def _begins(pieces: Sequence[_Piece]) -> np.ndarray:
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
