"""Files of tokens that other programs wrote, document by document.

========  ==========================================  =========================================
Program   Files                                       Each document is
========  ==========================================  =========================================
nanoGPT   uint16 tokens, without a header             followed by end-of-text
llm.c     256 int32 numbers, then tokens: uint16 of   preceded by end-of-text, or by the BOS of
          GPT-2, or uint32 of Llama 3                 Llama 3
Megatron  tokens in ``NAME.bin``, and the borders of  followed by end-of-text, if ``--append-eod``
          documents in ``NAME.idx``                   was given
========  ==========================================  =========================================

They make the rows that :mod:`llmtrain.data.corpus` makes of the same text. A document that
continues in the next file is cut there.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from llmtrain.data.readers import Record
from llmtrain.data.tokenizer import FastTokenizer, begins_with_bos
from llmtrain.errors import UserError, as_user_error, first_line

# Dtypes by the magic number and the version of llm.c.
_LLM_C_DTYPES = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
# Dtypes by Megatron's codes. Its codes 6 and 7 are those of floats.
_MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# The magic, the version, the dtype's code, the numbers of sequences and of borders of documents.
_MEGATRON_HEADER = np.dtype("S9, <u8, u1, <i8, <i8")
_SEARCHED_TOKENS = 1 << 24  # at a time, for the borders of documents


def token_documents(
    paths: Sequence[Path], tokenizer: FastTokenizer, field: str | None
) -> Iterator[Record]:
    """Yield the documents of ``.bin`` files, with the field ``input_ids``, int64 [n].

    Args:
        paths: the files.
        tokenizer: the tokenizer that made the tokens.
        field: is for sources that have several fields.

    Raises:
        UserError: if a file is empty, or if it contradicts its header or its ``.idx``.
    """
    borders: Iterable[int]
    for path in paths:
        index = path.with_suffix(".idx")
        if index.exists():
            with as_user_error(f"{index} is not Megatron-LM's, or not complete", first_line):
                dtype, ends = _read_index(index)
            tokens = _mapped(path, dtype, tokens=ends[-1])
            borders = ends
        else:
            tokens = _tokens_of(path)
            borders = _borders(tokens, tokenizer)
        number = 0
        for start, stop in pairwise(borders):
            document = np.array(tokens[start:stop], np.int64)
            if stop - start == 1 and document[0] == tokenizer.eos_token_id:
                continue  # end-of-text in front of the first document
            yield Record(f"{path}, document {number}", {"input_ids": document})
            number += 1


def _borders(tokens: np.ndarray, tokenizer: FastTokenizer) -> Iterator[int]:
    """Yield where documents begin, and the number of tokens."""
    begins_with = begins_with_bos(tokenizer) and tokens[0] == tokenizer.bos_token_id
    separator = tokenizer.bos_token_id if begins_with else tokenizer.eos_token_id
    last = 0
    yield 0
    for start in range(0, len(tokens), _SEARCHED_TOKENS):
        found = np.flatnonzero(tokens[start : start + _SEARCHED_TOKENS] == separator) + start
        for border in (found if begins_with else found + 1).tolist():
            if border > last:
                yield border
                last = border
    if last < len(tokens):
        yield len(tokens)


def _tokens_of(path: Path) -> np.ndarray:
    """Return the tokens of a file of nanoGPT or llm.c, mapped into memory."""
    header = np.fromfile(path, "<i4", count=256)
    # Other files of llm.c have magic numbers that begin with the year, too.
    if len(header) == 256 and header[0] // 10_000 == 2024 and not header[8:].any():
        magic, version, tokens = header[:3].tolist()
        if (magic, version) not in _LLM_C_DTYPES:
            known = " or ".join(map(str, _LLM_C_DTYPES))
            raise UserError(
                f"{path} has the magic number and version {(magic, version)} of llm.c; its files "
                f"of tokens have {known}."
            )
        return _mapped(path, _LLM_C_DTYPES[magic, version], tokens, first_byte=header.nbytes)
    if path.stem.endswith("_document"):
        raise UserError(f"{path} is named as Megatron-LM does, but its .idx is absent; copy it.")
    return _mapped(path, "<u2", tokens=path.stat().st_size // 2)


def _read_index(index: Path) -> tuple[str, list[int]]:
    """Return the dtype of Megatron's tokens, where documents begin, and the number of tokens."""
    content = np.fromfile(index, np.uint8)
    header = np.frombuffer(content, _MEGATRON_HEADER, count=1)
    magic, version, code, sequences, borders = header[0].tolist()
    if magic != b"MMIDIDX" or version != 1 or code not in _MEGATRON_DTYPES:
        raise UserError(
            f"{index} is no index of tokens: magic {magic!r}, version {version}, dtype code {code}."
        )
    lengths = np.frombuffer(content, "<i4", sequences, header.nbytes)
    documents = np.frombuffer(content, "<i8", borders, header.nbytes + 12 * sequences)
    tokens_before = np.append(0, np.cumsum(lengths, dtype=np.int64))
    return _MEGATRON_DTYPES[code], tokens_before[documents].tolist()


def _mapped(path: Path, dtype: str, tokens: int, first_byte: int = 0) -> np.ndarray:
    """Map tokens into memory.

    Raises:
        UserError: if the file has another size, or no tokens.
    """
    size = path.stat().st_size
    expected_size = first_byte + tokens * np.dtype(dtype).itemsize
    if size != expected_size or tokens < 1:
        raise UserError(
            f"{path} has {size:,} bytes, not the {expected_size:,} of {tokens:,} tokens of "
            f"{dtype}; copy or make it again."
        )
    return np.memmap(path, dtype, "r", first_byte, (tokens,))
