"""Files of tokens that other programs wrote: nanoGPT's, llm.c's and Megatron-LM's.

========  ==========================================  =========================================
Program   Files                                       Each document is
========  ==========================================  =========================================
nanoGPT   uint16 tokens, without a header             followed by end-of-text
llm.c     256 int32 numbers, then tokens: uint16 of   preceded by end-of-text, or by the BOS of
          GPT-2, or uint32 of Llama 3                 Llama 3
Megatron  tokens in ``NAME.bin``, and the borders of  followed by end-of-text, if ``--append-eod``
          documents in ``NAME.idx``                   was given
========  ==========================================  =========================================

The tokens become the rows that :mod:`llmtrain.data.corpus` makes of the same text: end-of-text is
added in front of the first document and after the last one, unless it is there. If the tokenizer
puts a BOS before every text, nothing is added in front. Nothing is added between documents.

A file is a shard of its own. If a document continues in the next file, it is cut there.

With ``position_ids``, a document begins at each end-of-text token; with a BOS, at each BOS and
after each end-of-text token. It also begins at each border of the ``.idx``, unless the token before
that is its end-of-text token.
"""

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from llmtrain.console import say
from llmtrain.data.audit import Audit
from llmtrain.data.readers import Split
from llmtrain.data.shards import CheckedFile, TokenRows, block_hashes
from llmtrain.data.tokenized import SourceRows, Tokenized, metadata_of
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import DamagedRowsError, UserError, as_user_error, first_line
from llmtrain.files import cache_folder, digest, read_sealed, write_sealed
from llmtrain.interfaces.batches import IGNORED
from llmtrain.locks import file_lock
from llmtrain.model_folders import vocabulary_of

# Dtypes by the magic number and the version of llm.c.
_LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# Dtypes by Megatron's codes. Its codes 6 and 7 are those of floats.
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# The magic, the version, the dtype's code, the numbers of sequences and of borders of documents.
_MEGATRON_HEADER = np.dtype("S9, <u8, u1, <i8, <i8")


def token_file_rows(
    paths: Sequence[Path],
    tokenizer: FastTokenizer,
    block_size: int,
    are_isolated: bool,
) -> Tokenized:
    """Return the rows of ``.bin`` files, each of which is a shard.

    Args:
        paths: the files.
        tokenizer: the tokenizer that made the tokens.
        block_size: a row holds one token more.
        are_isolated: add ``position_ids`` that restart at each document.

    Raises:
        UserError: if a file is empty, or if it contradicts its header or its ``.idx``.
    """
    end_of_text = int(tokenizer.eos_token_id)
    files = [
        TokenFile(
            path,
            block_size=block_size,
            are_isolated=are_isolated,
            begin=int(tokenizer.bos_token_id) if begins_with_bos(tokenizer) else end_of_text,
            end_of_text=end_of_text,
            vocabulary=vocabulary_of(tokenizer),
        )
        for path in paths
    ]
    audit = Audit(
        rows=sum(map(len, files)),
        targets=sum(file.targets for file in files),
        sha256=digest({"files": [file.sha256 for file in files], "isolated": are_isolated}),
    )
    metadata = metadata_of("", "", tokenizer, block_size, train=[audit], eval=[])
    sources: dict[Split, list[SourceRows]] = {"train": [SourceRows(audit, files)], "eval": []}
    return Tokenized(TokenRows(files), None, tokenizer, metadata, sources=sources)


@dataclass
class TokenFile:
    """The rows of a file. The top of this module says what is added to its tokens.

    Args:
        path: the ``.bin`` file.
        block_size: a row holds one token more.
        are_isolated: whether the rows have ``position_ids``.
        begin: the token that begins a document: end-of-text, or BOS.
        end_of_text: the token that ends a document.
        vocabulary: the largest token of the tokenizer, plus 1.

    Attributes:
        targets: the number of target tokens.
        sha256: a hash of the file, and of its ``.idx``.
    """

    path: Path
    block_size: int
    are_isolated: bool
    begin: int
    end_of_text: int
    vocabulary: int

    def __post_init__(self) -> None:
        self._layout = layout = layout_of(self.path)
        blocks = [blocks_of(path) for path in layout.files]
        self.sha256 = digest({"files": blocks})
        self._files = list(map(CheckedFile, layout.files, blocks))

        mapped = np.memmap(self.path, layout.dtype, "r", layout.first_byte, layout.tokens)
        self._is_begin_added = bool(self.begin == self.end_of_text != mapped[0])
        self._is_end_added = bool(mapped[-1] != self.end_of_text)
        self.targets = layout.tokens - 1 + self._is_begin_added + self._is_end_added

    def __len__(self) -> int:
        return len(range(0, self.targets, self.block_size))

    def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows by column, int64 [n, block_size + 1], given their numbers, int64 [n].

        Raises:
            DamagedRowsError: if a file differs from its hashes, or if the tokenizer has no such
                token.
        """
        layout = self._layout
        size = min(self.block_size + 1, layout.tokens)
        indices = np.arange(self.block_size + 1)
        # The number that each token has in the file. Those of added tokens are not in the file.
        numbers = rows[:, np.newaxis] * self.block_size + indices - self._is_begin_added
        firsts = numbers[:, :1].clip(0, layout.tokens - size)
        first_bytes = layout.first_byte + firsts[:, 0] * layout.dtype.itemsize
        content = self._files[0].pieces(first_bytes, size * layout.dtype.itemsize)
        tokens = content.view(layout.dtype).astype(np.int64)
        wrong = np.argwhere((tokens < 0) | (tokens >= self.vocabulary))
        if len(wrong):
            row, column = wrong[0]
            raise DamagedRowsError(
                f"{self.path}: token {firsts[row, 0] + column:,} is {tokens[row, column]}, but the "
                f"vocabulary has {self.vocabulary:,}; --tokenizer must be the one of the file."
            )

        places = (numbers - firsts).clip(0, size - 1)
        ids = np.take_along_axis(tokens, places, axis=1)
        stop = layout.tokens + self._is_end_added
        ids[(numbers < 0) | (numbers == layout.tokens)] = self.end_of_text
        ids[numbers >= stop] = IGNORED
        if not self.are_isolated:
            return {"input_ids": ids}

        is_border = self._starts[np.searchsorted(self._starts, numbers)] == numbers
        is_after_end = np.roll(ids, 1, axis=1) == self.end_of_text  # the first column has no effect
        # If end-of-text begins the documents, that is the token before such a border.
        is_begin = np.where(is_after_end, self.begin != self.end_of_text, is_border)
        is_begin |= ids == self.begin
        is_begin &= numbers != stop - 1  # the last end-of-text token begins nothing
        is_begin |= numbers == stop  # the padding is a document of its own
        # Positions restart at each document and at each row.
        restarts = np.where(is_begin, indices, 0)
        positions = indices - np.maximum.accumulate(restarts, axis=1)
        return {"input_ids": ids, "position_ids": positions}

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """How many tokens come before each document of the ``.idx``, and a number above all."""
        for index in self._files[1:]:
            index.check()
        layout = self._layout
        first_tokens = layout.first_bytes // layout.dtype.itemsize
        starts = np.append(first_tokens, layout.tokens)[layout.borders]
        return np.append(starts, np.iinfo(np.int64).max)


class Layout(NamedTuple):
    """How a file holds its tokens.

    Attributes:
        dtype: the dtype of the tokens.
        tokens: their number.
        files: the ``.bin`` file, and Megatron's ``.idx``, if there is one.
        first_byte: the byte at which the tokens begin.
        first_bytes: int64, the same of each of Megatron's sequences.
        borders: int64, how many sequences come before each document, and how many there are.
    """

    dtype: np.dtype
    tokens: int
    files: list[Path]
    first_byte: int = 0
    first_bytes: np.ndarray = np.empty(0, np.int64)
    borders: np.ndarray = np.empty(0, np.int64)


def layout_of(path: Path) -> Layout:
    """Read the header or the ``.idx`` of a ``.bin`` file.

    Raises:
        UserError: if it contradicts the file, or if there are no tokens.
    """
    size = path.stat().st_size
    index = path.with_suffix(".idx")
    header = np.fromfile(path, "<i4", count=256)
    if index.exists():
        with as_user_error(f"{index} is not Megatron-LM's, or not complete", first_line):
            layout = _indexed_layout(path, index)
    # Other files of llm.c have magic numbers that begin with the year, too.
    elif len(header) == 256 and header[0] // 10_000 == 2024 and not header[8:].any():
        magic, version, tokens = header[:3].tolist()
        if (magic, version) not in _LLM_C_DTYPES:
            known = " or ".join(map(str, _LLM_C_DTYPES))
            raise UserError(
                f"{path} has the magic number and version {(magic, version)} of llm.c; its files "
                f"of tokens have {known}."
            )
        dtype = np.dtype(_LLM_C_DTYPES[magic, version])
        layout = Layout(dtype, tokens, [path], first_byte=header.nbytes)
    elif path.stem.endswith("_document"):
        raise UserError(f"{path} is named as Megatron-LM does, but {index} is absent; copy it.")
    else:
        layout = Layout(np.dtype("<u2"), size // 2, [path])

    if layout.tokens < 1:
        raise UserError(f"{path} holds no tokens; leave it out, or make it again.")
    expected_size = layout.first_byte + layout.tokens * layout.dtype.itemsize
    if size != expected_size:
        raise UserError(
            f"{path} has {size:,} bytes, not the {expected_size:,} of {layout.tokens:,} tokens of "
            f"{layout.dtype}; copy or make it again."
        )
    return layout


def _indexed_layout(path: Path, index: Path) -> Layout:
    """Read Megatron's ``.idx``, which stays mapped into memory."""
    content = np.memmap(index, mode="r")
    header = np.frombuffer(content, _MEGATRON_HEADER, count=1)
    magic, version, code, sequences, borders = header[0].tolist()
    if magic != b"MMIDIDX" or version != 1 or code not in _MEGATRON_DTYPES:
        raise UserError(
            f"{index} is no index of tokens: magic {magic!r}, version {version}, dtype code {code}."
        )

    start = header.nbytes
    lengths = np.frombuffer(content, "<i4", sequences, start)
    first_bytes = np.frombuffer(content, "<i8", sequences, start + 4 * sequences)
    documents = np.frombuffer(content, "<i8", borders, start + 12 * sequences)
    dtype = np.dtype(_MEGATRON_DTYPES[code])
    tokens = first_bytes[-1:].sum() // dtype.itemsize + lengths[-1:].sum()
    files = [path, index]
    return Layout(dtype, int(tokens), files, first_bytes=first_bytes, borders=documents)


def blocks_of(path: Path) -> list[str]:
    """Return the hashes of a file's blocks of 1 MiB.

    They are made once, and kept in the cache. They hold as long as the path, the size and the time
    of the last change are the same: touch a file that was changed without a new time.
    """
    status = path.stat()
    name = str(path.resolve())
    stamp = {"path": name, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
    cached = cache_folder() / "files" / f"{digest({'path': name})}.json"
    cached.parent.mkdir(parents=True, exist_ok=True)
    with file_lock(cached.with_suffix(".lock")):
        content = read_sealed(cached)
        if not stamp.items() <= content.items():
            say("data", f"hashing {path}, {status.st_size / 1e9:.1f} GB", sys.stderr)
            content = {**stamp, "blocks": block_hashes(path)}
            write_sealed(cached, content)
    return list(content["blocks"])
