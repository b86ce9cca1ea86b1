"""Text as tokens: the documents of a source, divided into training and eval data.

Each document is read and encoded once. :mod:`llmtrain.data.text_rows` cuts them into rows.
"""

import array
import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from llmtrain.console import can_show_bars, check_interrupt
from llmtrain.data.encoded import EncodedSource, SplitStats
from llmtrain.data.readers import Source, shown
from llmtrain.data.splits import Split, first_of, hash_fraction, largest_eval_share
from llmtrain.data.store import TOKENS_PER_BATCH
from llmtrain.data.text_rows import Piece, batches, write_stream
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import UserError, first_line

# Characters in a call of the tokenizer, which divides the texts of a call among the CPU cores.
_ENCODE_CHARACTERS = 1 << 20
_SEGMENT_CHARACTERS = 1 << 16
# Matches before white space that follows something else. Python counts \x1c to \x1f as white space,
# Unicode does not.
_GAP = re.compile(r"(?<!\s)(?=[^\S\x1c-\x1f])")


def documents(source: Source, field: str) -> Iterator[str]:
    """Yield the text of each record.

    Args:
        source: the records.
        field: the name of the field that holds the text.

    Raises:
        UserError: with the place of a record that has no such field, or no valid text in it.
    """
    for place, fields in source.records(field):
        if field not in fields:
            names = ", ".join(map(str, fields))
            raise UserError(
                f"{place}: no field '{field}'; the record has {names}. Name the field that holds "
                "the text with --text_field, or the fields of conversations with --columns, such "
                "as prompt=question completion=answer."
            )

        text = fields[field]
        if not isinstance(text, str):
            raise UserError(f"{place}: field '{field}' is {shown(text)}, not text.")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError(
                f"{place}: field '{field}' holds half of a surrogate pair, which is not valid text."
            ) from None
        yield text


@dataclass(slots=True)
class _Segment:
    """A part of a document that is encoded by itself."""

    text: str
    is_first: bool
    is_last: bool

    def __len__(self) -> int:
        return len(self.text)


class Division(NamedTuple):
    """The splits of the documents of a source.

    Attributes:
        is_eval: bool [documents].
        is_train: bool [documents]. Documents after the first ``max_train_samples`` are neither.
        is_cut: bool [documents], whether the end of a document is eval data.
    """

    is_eval: np.ndarray
    is_train: np.ndarray
    is_cut: np.ndarray


class Corpus:
    """The documents of a source, divided into training and eval data.

    A document is eval data if its hash is below ``--eval_fraction``. So adding other documents does
    not move it to the other split. If a split is then almost empty, as with a handful of documents,
    the eval data are the end of the longest document instead, and of its copies.

    Args:
        source: the documents.
        field: the name of the field that holds the text.
        eval_fraction: the share of the eval data.
        only_split: the split of all documents; ``None`` to divide them.
        max_train_samples: how many training documents are used, the first ones; ``None`` for all.

    Attributes:
        bytes: UTF-8 bytes of each document, once a pass over all is complete.
    """

    def __init__(
        self,
        source: Source,
        field: str,
        eval_fraction: float,
        only_split: Split | None = None,
        max_train_samples: int | None = None,
    ) -> None:
        self.source = source
        self.field = field
        self.only_split = only_split
        self.max_train_samples = max_train_samples
        self.fraction = 0.0 if only_split else eval_fraction
        self.bytes = np.empty(0, np.int64)
        self.longest = -1  # the number of the longest document
        self._hashes = np.empty(0)

    def __iter__(self) -> Iterator[str]:
        """Yield all documents, and note the size and the hash of each."""
        sizes = array.array("q")
        hashes = array.array("d")
        longest_length = 0
        earlier = len(self.bytes)
        for number, text in enumerate(documents(self.source, self.field)):
            if earlier and number == earlier:
                raise self.source.changed()
            encoded = text.encode()
            sizes.append(len(encoded))
            hashes.append(hash_fraction(encoded))
            if len(text) > longest_length:
                longest_length = len(text)
                self.longest = number
            yield text

        if len(sizes) < earlier:
            raise self.source.changed()
        self.bytes = np.array(sizes, np.int64)
        self._hashes = np.array(hashes)
        if not self.bytes.sum():
            raise UserError(f"{self.source.flag} {self.source.name} holds no text.")

    def used(self) -> Iterator[tuple[int, str]]:
        """Yield the documents that a split has something of, each with its number."""
        if self.max_train_samples is None:  # then these are all documents
            yield from enumerate(self)
            return
        division = self.division_of_all()
        is_used = division.is_eval | division.is_train | division.is_cut
        for number, text in enumerate(self):
            if is_used[number]:
                yield number, text

    def division_of_all(self) -> Division:
        """Divide the documents, which depends on all of them: read them once more."""
        for _ in self:
            pass
        return self.division()

    def division(self) -> Division:
        """Divide the documents, after a pass over all."""
        is_eval = self._hashes < self.fraction
        if self.only_split == "eval":
            is_eval[:] = True
        eval_bytes = self.bytes[is_eval].sum()
        largest = self.bytes.sum() * largest_eval_share(self.fraction)
        is_cut = np.zeros(len(is_eval), bool)
        if self.fraction and not 0 < eval_bytes <= largest:
            is_eval[:] = False
            is_cut = self._hashes == self._hashes[self.longest]
        return Division(is_eval, first_of(~is_eval, self.max_train_samples), is_cut)

    def cut(self, text: str) -> tuple[str, str]:
        """Cut a document: return the training data and the eval data in it."""
        start = int(len(text) * (1 - self.fraction))
        return text[:start], text[start:]

    def texts(self, split: Split | None = None) -> Iterator[str]:
        """Yield the texts of one split, or of both."""
        if split is None:
            yield from self
            return

        division = self.division_of_all()
        is_selected = division.is_eval if split == "eval" else division.is_train
        for number, text in enumerate(self):
            if division.is_cut[number]:
                train_text, eval_text = self.cut(text)
                if split == "eval":
                    yield eval_text
                elif is_selected[number]:
                    yield train_text
            elif is_selected[number]:
                yield text


class EncodedCorpus(EncodedSource):
    """The documents of a source as tokens.

    A stored sequence is a document with the token that begins it: end-of-text, or the BOS of a
    tokenizer that puts one before every text. Then end-of-text belongs to the document, too.

    Args:
        corpus: the documents.
        tokenizer: the tokenizer.
        is_trained: whether the tokenizer was trained by
            :func:`llmtrain.data.tokenizer.train_tokenizer`. Long documents are then encoded in
            segments. This changes no token, because such a tokenizer begins a new word wherever
            white space follows something else.
        columns: the columns of the rows. The labels of text are its tokens, so rows of text alone
            need no column of labels. With ``position_ids``, documents do not attend to each other.
        folder: the folder of the temporary file.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: FastTokenizer,
        is_trained: bool,
        columns: Sequence[str],
        folder: Path,
    ) -> None:
        super().__init__(folder)
        self.corpus = corpus
        self.is_trained = is_trained
        self.columns = columns
        self._end_of_text = np.array([tokenizer.eos_token_id], np.int32)
        self._has_bos = begins_with_bos(tokenizer)
        self._first_token = self._end_of_text
        if self._has_bos:
            self._first_token = np.array([tokenizer.bos_token_id], np.int32)

        # These come after the call of begins_with_bos(), which changes the same settings.
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" in a text is text

        # The number of the document of each stored sequence. If documents are cut, the last
        # sequences are their eval data, and those before them are their training data.
        self._documents = array.array("q")
        self._bytes = array.array("q")  # UTF-8 bytes of each stored sequence's text
        nothing = np.empty(0, bool)
        self._division = Division(is_eval=nothing, is_train=nothing, is_cut=nothing)

    def encode(self) -> None:
        """Read and encode all documents once.

        Raises:
            UserError: if no training data are left, or if the tokenizer cannot encode a text.
        """
        with tqdm(
            unit="B",
            unit_scale=True,
            desc="tokenising",
            leave=False,
            disable=not can_show_bars(),
        ) as bar:
            segments = itertools.chain.from_iterable(
                itertools.starmap(self._segments, self._texts())
            )
            for batch in batches(segments, _ENCODE_CHARACTERS):
                check_interrupt()
                self._store(batch)
                bar.update(sum(len(segment.text.encode()) for segment in batch))

        if self.corpus.only_split != "eval" and not self._bytes_of("train"):
            cause = f"--eval_fraction {self.corpus.fraction}"
            advice = "lower it, or set it to 0"
            if self.corpus.max_train_samples is not None:
                cause = f"--max_train_samples {self.corpus.max_train_samples}"
                advice = "raise it"
            name = self.corpus.source.name
            raise UserError(f"{cause} leaves no text of {name} to train on; {advice}.")

    def lengths(self, split: Split) -> np.ndarray:
        """Return no lengths: text is cut into rows of any length."""
        return np.empty(0, np.int64)

    def write(self, path: Path, split: Split, max_length: int) -> SplitStats:
        """Write the rows of a split, which hold ``max_length + 1`` tokens."""
        size = self._bytes_of(split)
        sequences = self._sequences_of(split) if size else np.empty(0, np.int64)
        cut_documents = int((self._division.is_cut & self._division.is_train).sum())
        stream = self._stream(sequences)
        written = write_stream(path, stream, block_size=max_length, columns=self.columns)
        return SplitStats(
            # A document that is cut counts as eval data.
            records=len(sequences) - (cut_documents if split == "train" else 0),
            rows=written.rows,
            targets=written.targets,
            bytes=size,
            sha256=written.sha256,
        )

    # --- from documents to the store

    def _texts(self) -> Iterator[tuple[int, str]]:
        """Yield what is stored, each text after the number of its document.

        The longest document and its copies come last, because they may be cut.
        """
        longest = ""
        copies: list[int] = []  # the numbers of the longest document and of its copies
        for number, text in self.corpus.used():
            if text == longest:
                copies.append(number)
            elif len(text) > len(longest):
                yield from zip(copies, itertools.repeat(longest), strict=False)
                longest = text
                copies = [number]
            else:
                yield number, text

        self._division = self.corpus.division()
        parts: Sequence[str] = [longest]
        if self._division.is_cut.any():
            parts = self.corpus.cut(longest)
        for part in parts:
            yield from zip(copies, itertools.repeat(part), strict=False)

    def _segments(self, document: int, text: str) -> Iterator[_Segment]:
        """Note which text is stored next, and split it for the threads of the tokenizer.

        A text is not split if that might change its tokens.
        """
        self._documents.append(document)
        self._bytes.append(len(text.encode()))
        if self.is_trained:
            return _segments_of(text)
        return iter([_Segment(text, is_first=True, is_last=True)])

    def _store(self, segments: list[_Segment]) -> None:
        """Encode segments on all CPU cores, and store their tokens."""
        texts = [segment.text for segment in segments]
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the tokenizers library raises nothing narrower
            raise UserError(
                f"the tokenizer cannot encode this text: {first_line(error)}."
            ) from None

        for segment, encoding in zip(segments, encodings, strict=True):
            if segment.is_first:
                self.store.extend(self._first_token)
            self.store.extend(np.array(encoding.ids, np.int32))
            if segment.is_last:
                if self._has_bos:
                    self.store.extend(self._end_of_text)
                self.store.end_sequence()

    # --- from the store to rows

    def _is_in(self, split: Split) -> np.ndarray:
        """Return whether each stored sequence is in a split, bool [sequences]."""
        documents = np.array(self._documents, np.int64)
        is_document_in = self._division.is_eval if split == "eval" else self._division.is_train
        is_in = is_document_in[documents]
        is_in[len(is_in) - self._division.is_cut.sum() :] = split == "eval"
        return is_in

    def _sequences_of(self, split: Split) -> np.ndarray:
        """Return the numbers of the sequences of a split, in the order of the documents."""
        sequences = np.flatnonzero(self._is_in(split))
        documents_of_split = np.array(self._documents, np.int64)[sequences]
        return sequences[np.argsort(documents_of_split, kind="stable")]

    def _bytes_of(self, split: Split) -> int:
        """Return the UTF-8 bytes of the text in a split."""
        return int(np.array(self._bytes, np.int64)[self._is_in(split)].sum())

    def _stream(self, sequences: np.ndarray) -> Iterator[Piece]:
        """Yield the stream of a split: its documents, and end-of-text after the last one."""
        stops = self.store.stops
        lengths = self.store.lengths
        for sequence in sequences.tolist():
            stop = int(stops[sequence])
            begin = stop - int(lengths[sequence])
            for start in range(begin, stop, TOKENS_PER_BATCH):
                tokens = self.store.read_encoded(start, min(start + TOKENS_PER_BATCH, stop))
                yield Piece(tokens, begins_document=start == begin)
        if len(sequences) and not self._has_bos:
            yield Piece(self._end_of_text)


def _segments_of(text: str) -> Iterator[_Segment]:
    """Split a text about every ``_SEGMENT_CHARACTERS``, before white space."""
    start = 0
    while gap := _GAP.search(text, start + _SEGMENT_CHARACTERS):
        yield _Segment(text[start : gap.start()], is_first=start == 0, is_last=False)
        start = gap.start()
    yield _Segment(text[start:], is_first=start == 0, is_last=True)
