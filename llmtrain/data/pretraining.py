"""Tokenise plain text, as one stream of tokens that is cut into rows.

The stream is: end-of-text, document, end-of-text, document, ..., end-of-text. With a block size B,
row ``i`` holds the tokens ``i * B`` to ``i * B + B`` of the stream. That is B + 1 tokens, of which
the last one is also the first of the next row. So every token except the first is a target exactly
once. Positions of the last row after the end of the stream hold -100.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from llmtrain.data.config import DataConfig
from llmtrain.data.packing import (
    TOKENS_PER_BATCH,
    Split,
    SplitStats,
    create_row_file,
    hash_fraction,
)
from llmtrain.data.sources import Source, documents
from llmtrain.data.tokenizer import FastTokenizer, is_trained
from llmtrain.errors import UserError, first_line
from llmtrain.types import IGNORED

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


class Texts:
    """The documents of a source, divided into training and eval data.

    A document is eval data if its hash is below ``--eval_fraction``. So adding other documents does
    not move it to the other split. If a split is then almost empty, as with a handful of documents,
    the eval data are the end of the longest document instead.

    Args:
        source: the documents.
        config: holds the share of the eval data.
        only_split: the split of all documents; ``None`` to divide them.

    Attributes:
        documents: the number of documents in each split.
        bytes: UTF-8 bytes of each split.
    """

    def __init__(self, source: Source, config: DataConfig, only_split: Split | None = None) -> None:
        self.source = source
        self.config = config
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
        for number, text in enumerate(documents(self.source, self.config.text_column)):
            if split is None:
                yield text
            elif self._cut is None:
                if split == self._split_of(text):
                    yield text
            elif number == self._cut.document:
                yield text[self._cut.start :] if split == "eval" else text[: self._cut.start]
            elif split == "train":
                yield text

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
        ) as bar:
            token_arrays = _encoded(tokenizer, texts, splits_texts=has_trained_tokenizer, bar=bar)
            stats = _write_rows(path, token_arrays, block_size)
        return stats._replace(documents=self.documents[split], bytes=self.bytes[split])


def _encoded(
    tokenizer: FastTokenizer,
    texts: Iterable[str],
    splits_texts: bool,
    bar: "tqdm[NoReturn]",
) -> Iterator[np.ndarray]:
    """Yield documents as int32 arrays of token ids, each document followed by end-of-text.

    The first document is also preceded by end-of-text. If the tokenizer puts a BOS before every
    text, each document is preceded by that instead, because its model was trained that way.

    Args:
        tokenizer: the tokenizer.
        texts: the documents.
        splits_texts: split long documents into segments for the threads of the tokenizer. With a
            tokenizer of :func:`llmtrain.data.tokenizer.train_tokenizer` this changes no token,
            because it begins a new word wherever white space follows something else.
        bar: shows how many bytes of text were tokenised.
    """
    end = [tokenizer.eos_token_id]
    bos = tokenizer.bos_token_id
    puts_bos = bos is not None and tokenizer.encode("")[:1] == [bos]
    begin = [bos] if puts_bos else []

    # These come after the call of encode() above, which changes the same settings.
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text

    prefix = begin or end
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
            yield np.array(prefix, np.int32)
            for _ in document:
                yield np.array(next(encodings).ids, np.int32)
            yield np.array(end, np.int32)
            prefix = begin
        bar.update(sum(len(text.encode()) for text in batch))


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


def _write_rows(path: Path, token_arrays: Iterable[np.ndarray], block_size: int) -> SplitStats:
    """Write the stream as rows that overlap by one token.

    Args:
        path: the file to write.
        token_arrays: the stream, in pieces of any length.
        block_size: a row holds one token more.

    Returns:
        The counts of rows and targets, and the hash. Documents and bytes are not counted here.
    """
    tokens = 0
    rows = 0
    digest = hashlib.sha256()

    def padded_stream() -> Iterator[np.ndarray]:
        nonlocal tokens
        for array in token_arrays:
            digest.update(array.astype("<i4").tobytes())
            tokens += len(array)
            yield array
        yield np.full((1 - tokens) % block_size, IGNORED, np.int32)

    rest = np.empty(0, np.int32)
    with create_row_file(path, ["input_ids"], block_size + 1) as write:
        for batch in _batches(padded_stream(), max(TOKENS_PER_BATCH, block_size)):
            stream = np.concatenate([rest, *batch])
            count = (len(stream) - 1) // block_size
            if count > 0:
                windows = np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)
                write({"input_ids": windows[::block_size]})
                rows += count
                stream = stream[count * block_size :]
            rest = stream

    return SplitStats(
        documents=0,
        rows=rows,
        targets=max(tokens - 1, 0),
        bytes=0,
        sha256=digest.hexdigest(),
    )
