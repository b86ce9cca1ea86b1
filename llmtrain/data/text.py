"""Plain text -> a stream of tokens -> rows.

A text is a stream: end-of-text, document, end-of-text, document, ..., end-of-text. Row ``i`` of block size B holds
tokens ``i*B`` to ``i*B + B`` of it, B + 1 tokens that overlap the next row by one, so that every token but the first is
a target exactly once. Places of the last row past the end of the stream hold -100.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tqdm import tqdm

from llmtrain.contract import IGNORED
from llmtrain.data.config import DataConfig
from llmtrain.data.sources import Source, documents
from llmtrain.data.table import TOKENS_PER_BATCH, Written, hash_place, row_table
from llmtrain.errors import UserError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ENCODE_CHARACTERS = 1 << 20  # per call of the tokenizer, which spreads it over the cores
_PIECE_CHARACTERS = 1 << 16


class Texts:
    """The documents of a source, some of them held out: those whose hash falls below the fraction, so that they never
    move.

    Where that leaves one side almost empty, as with a handful of documents, the last part of the longest is held out.
    """

    task = "text"
    audits: ClassVar[list[Any]] = []

    def __init__(self, source: Source, config: DataConfig) -> None:
        self.source, self.field, self.fraction = source, config.text_field, config.eval_fraction
        self.documents = self.eval_documents = self.bytes = self.eval_bytes = 0
        self.cut: tuple[int, int] | None = (
            None  # a document's number, and the character at which its held-out part begins
        )
        longest = (0, 0)  # characters, and minus the document's number
        for number, text in enumerate(self.everything()):
            size = len(text.encode())
            self.documents += 1
            self.bytes += size
            longest = max(longest, (len(text), -number))
            if self._is_held_out(text):
                self.eval_documents += 1
                self.eval_bytes += size
        if not self.bytes:
            raise UserError(f"--dataset {source.name} holds no text.")
        if self.fraction and not 0 < self.eval_bytes <= self.bytes * max(0.5, 2 * self.fraction):
            self.cut = (-longest[1], int(longest[0] * (1 - self.fraction)))
            self.eval_documents, self.eval_bytes = 1, sum(len(text.encode()) for text in self.held_out())
        if self.eval_bytes == self.bytes:
            raise UserError(f"--eval_fraction {self.fraction} leaves no text to train on; lower it, to 0 if need be.")

    def everything(self) -> Iterator[str]:
        return documents(self.source, self.field)

    def train(self) -> Iterator[str]:
        return self._side(held_out=False)

    def held_out(self) -> Iterator[str]:
        return self._side(held_out=True) if self.fraction else iter(())

    def write(
        self, tokenizer: "PreTrainedTokenizerFast", trained_here: bool, block_size: int, train: Path, held_out: Path
    ) -> tuple[Written, Written]:
        """Write the rows of both sides."""
        encode = _Encoder(tokenizer, any_cut=trained_here)
        with tqdm(total=self.bytes, unit="B", unit_scale=True, desc="tokenising", leave=False) as bar:
            return (
                _write_rows(train, encode(self.train(), bar), block_size),
                _write_rows(held_out, encode(self.held_out(), bar), block_size),
            )

    def _side(self, held_out: bool) -> Iterator[str]:
        for number, text in enumerate(self.everything()):
            if self.cut is None:
                if self._is_held_out(text) == held_out:
                    yield text
            elif number == self.cut[0]:
                yield text[self.cut[1] :] if held_out else text[: self.cut[1]]
            elif not held_out:
                yield text

    def _is_held_out(self, text: str) -> bool:
        return hash_place(text) < self.fraction


class _Encoder:
    """Documents -> arrays of token ids, each document followed by end-of-text; the first is also preceded by it. Where
    the tokenizer puts a BOS before every text, each document begins with that instead: its model knows no other way.

    A long document is cut into pieces for the tokenizer's threads where that changes no token: the tokenizers trained
    here begin a new word wherever white space follows something else.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", any_cut: bool) -> None:
        self.end = [tokenizer.eos_token_id]
        bos = tokenizer.bos_token_id
        self.begin = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
        self.backend = tokenizer.backend_tokenizer  # after the call above, which has settings of its own
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text
        self.any_cut = any_cut

    def __call__(self, documents: Iterable[str], bar: tqdm) -> Iterator[np.ndarray]:
        empty = True
        for texts in _batched(documents):
            if empty and not self.begin:
                yield np.array(self.end, np.int32)
            empty = False
            pieces = [_pieces(text) if self.any_cut else [text] for text in texts]
            try:
                encoded = iter(self.backend.encode_batch_fast([*itertools.chain(*pieces)], add_special_tokens=False))
            except Exception as error:  # the tokenizers library raises nothing narrower
                raise UserError(f"the tokenizer cannot encode this text: {first_line(error)}.") from None
            for parts in pieces:
                yield np.array(self.begin, np.int32)
                for _ in parts:
                    yield np.array(next(encoded).ids, np.int32)
                yield np.array(self.end, np.int32)
            bar.update(sum(len(text.encode()) for text in texts))


def _batched(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= _ENCODE_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _is_space(character: str) -> bool:
    return character.isspace() and character not in "\x1c\x1d\x1e\x1f"  # white space to Python, not to Unicode


def _pieces(text: str) -> list[str]:
    """Cut where white space follows something else, about every ``_PIECE_CHARACTERS``."""
    pieces, start = [], 0
    while start + _PIECE_CHARACTERS < len(text):
        end = start + _PIECE_CHARACTERS
        while end < len(text) and not (_is_space(text[end]) and not text[end - 1].isspace()):
            end += 1
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _write_rows(path: Path, arrays: Iterator[np.ndarray], block_size: int) -> Written:
    """Write the stream as rows that overlap by one token."""
    tokens = rows = held = 0
    digest = hashlib.sha256()
    waiting: list[np.ndarray] = []
    with row_table(path, ["input_ids"], block_size + 1) as write:

        def flush(last: bool) -> tuple[int, list[np.ndarray]]:
            stream = np.concatenate(waiting) if waiting else np.empty(0, np.int32)
            count = max(len(stream) - 1, 0) // block_size
            if last and (rest := len(stream) - 1 - count * block_size) > 0:
                stream = np.append(stream, np.full(block_size - rest, IGNORED, np.int32))
                count += 1
            if count:
                write(np.lib.stride_tricks.sliding_window_view(stream, block_size + 1)[::block_size][:count])
            return count, [stream[count * block_size :]]

        for array in arrays:
            digest.update(array.astype("<i4").tobytes())
            tokens += len(array)
            waiting.append(array)
            held += len(array)
            if held > max(TOKENS_PER_BATCH, block_size):
                written, waiting = flush(last=False)
                rows, held = rows + written, len(waiting[0])
        rows += flush(last=True)[0]
    return Written(max(tokens - 1, 0), rows, digest.hexdigest())
