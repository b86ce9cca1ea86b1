"""Plain text -> a stream of tokens -> rows.

A text is a stream: end-of-text, document, end-of-text, document, ..., end-of-text. Row ``i`` of block size B holds
tokens ``i*B`` to ``i*B + B`` of it, B + 1 tokens that overlap the next row by one, so that every token but the first is
a target exactly once. Places of the last row past the end of the stream hold -100.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Sized
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np
from tqdm import tqdm

from llmtrain.data.config import DataConfig
from llmtrain.data.packing import TOKENS_PER_BATCH, SplitStats, create_row_file, hash_fraction
from llmtrain.data.sources import Source, documents
from llmtrain.data.tokenizer import FastTokenizer, is_trained
from llmtrain.errors import UserError, first_line
from llmtrain.types import IGNORED

_ENCODE_CHARACTERS = 1 << 20  # per call of the tokenizer, which spreads it over the cores
_SEGMENT_CHARACTERS = 1 << 16
# White space behind something else; \x1c to \x1f are white space to Python, not to Unicode.
_GAP = re.compile(r"(?<!\s)(?=[^\S\x1c-\x1f])")
_T = TypeVar("_T", bound=Sized)


class Texts:
    """The documents of a source, divided into training and evaluation data.

    A document whose hash is below ``--eval_fraction`` is evaluation data, so it never changes sides. If that leaves one
    side almost empty, as with a handful of documents, the evaluation data is the end of the longest document instead.
    """

    def __init__(self, source: Source, config: DataConfig) -> None:
        self.source = source
        self.config = config
        self.fraction = config.eval_fraction
        # Number and UTF-8 size of the documents: [training data, evaluation data].
        self.documents = [0, 0]
        self.bytes = [0, 0]
        # The number of the document that is divided, if one is, and the character at which its end begins.
        self.divided: tuple[int, int] | None = None

        longest_number = 0
        longest_length = 0
        for number, text in enumerate(self.texts()):
            held_out = hash_fraction(text) < self.fraction
            self.documents[held_out] += 1
            self.bytes[held_out] += len(text.encode())
            if len(text) > longest_length:
                longest_number = number
                longest_length = len(text)

        total_bytes = sum(self.bytes)
        if not total_bytes:
            raise UserError(f"--dataset {source.name} holds no text.")
        largest_share = max(0.5, 2 * self.fraction)
        if self.fraction and not 0 < self.bytes[True] <= total_bytes * largest_share:
            self.divided = (longest_number, int(longest_length * (1 - self.fraction)))
            eval_bytes = sum(len(text.encode()) for text in self.texts(held_out=True))
            self.documents = [sum(self.documents) - 1, 1]
            self.bytes = [total_bytes - eval_bytes, eval_bytes]
        if not self.bytes[False]:
            raise UserError(
                f"--eval_fraction {self.fraction} leaves no text to train on; lower it, or set it to 0."
            )

    def texts(self, held_out: bool | None = None) -> Iterator[str]:
        """Yield the texts of one side or of both.

        Args:
            held_out: True for the evaluation data, False for the training data, ``None`` for both.
        """
        for number, text in enumerate(documents(self.source, self.config.text_field)):
            if held_out is None:
                yield text
            elif self.divided is None:
                if held_out == (hash_fraction(text) < self.fraction):
                    yield text
            elif number == self.divided[0]:
                yield text[self.divided[1] :] if held_out else text[: self.divided[1]]
            elif not held_out:
                yield text

    def write(
        self, tokenizer: FastTokenizer, block_size: int, path: Path, held_out: bool
    ) -> SplitStats:
        """Tokenize the training or the evaluation data and write its rows of ``block_size + 1`` tokens."""
        texts = self.texts(held_out) if self.bytes[held_out] else ()
        splits = is_trained(self.config.tokenizer or "")
        with tqdm(
            total=self.bytes[held_out], unit="B", unit_scale=True, desc="tokenising", leave=False
        ) as bar:
            written = _write_rows(path, _encoded(tokenizer, texts, splits, bar), block_size)
        return written._replace(documents=self.documents[held_out], bytes=self.bytes[held_out])


def _encoded(
    tokenizer: FastTokenizer, texts: Iterable[str], splits: bool, bar: "tqdm[NoReturn]"
) -> Iterator[np.ndarray]:
    """Yield documents as arrays of token ids, each document followed by end-of-text.

    The first is also preceded by it. Where the tokenizer puts a BOS before every text, each document begins with that
    instead: its model knows no other way.

    A long document is split into segments for the tokenizer's threads where that changes no token: the tokenizers
    trained here begin a new word wherever white space follows something else.
    """
    end = [tokenizer.eos_token_id]
    bos = tokenizer.bos_token_id
    begin = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
    backend = tokenizer.backend_tokenizer  # after the call above, which has settings of its own
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text
    before = begin or end
    for batch in _batches(texts, _ENCODE_CHARACTERS):
        segments = [[*_segments(text)] if splits else [text] for text in batch]
        try:
            encoded = iter(
                backend.encode_batch_fast([*itertools.chain(*segments)], add_special_tokens=False)
            )
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"the tokenizer cannot encode this text: {first_line(error)}."
            ) from None
        for document in segments:
            yield np.array(before, np.int32)
            yield from (np.array(next(encoded).ids, np.int32) for _ in document)
            yield np.array(end, np.int32)
            before = begin
        bar.update(sum(len(text.encode()) for text in batch))


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Group items until their lengths add up to ``size`` or more."""
    batch, held = list[_T](), 0
    for item in items:
        batch.append(item)
        held += len(item)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _segments(text: str) -> Iterator[str]:
    """Split a text where white space follows something else, about every ``_SEGMENT_CHARACTERS``."""
    start = 0
    while gap := _GAP.search(text, start + _SEGMENT_CHARACTERS):
        yield text[start : gap.start()]
        start = gap.start()
    yield text[start:]


def _write_rows(path: Path, arrays: Iterable[np.ndarray], block_size: int) -> SplitStats:
    """Write the stream as rows that overlap by one token."""
    tokens = rows = 0
    digest = hashlib.sha256()

    def padded() -> Iterator[np.ndarray]:
        nonlocal tokens
        for array in arrays:
            digest.update(array.astype("<i4").tobytes())
            tokens += len(array)
            yield array
        yield np.full((1 - tokens) % block_size, IGNORED, np.int32)

    rest = np.empty(0, np.int32)
    with create_row_file(path, ["input_ids"], block_size + 1) as write:
        for batch in _batches(padded(), max(TOKENS_PER_BATCH, block_size)):
            stream = np.concatenate([rest, *batch])
            if len(stream) > block_size:
                write(
                    np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)[::block_size]
                )
                count = (len(stream) - 1) // block_size
                rows, stream = rows + count, stream[count * block_size :]
            rest = stream
    return SplitStats(0, rows, max(tokens - 1, 0), 0, digest.hexdigest())
