"""Files of nanoGPT, llm.c and Megatron-LM become the rows that their text becomes.

The files are written as the documentation of these programs says.
"""

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llmtrain.data import token_files
from llmtrain.data import tokenizer as tok
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.preparation import TEXTS, data_config, tokenize_texts

pytestmark = pytest.mark.usefixtures("cache")

DOCUMENTS = [text for text in TEXTS if text] * 3  # Megatron's tool skips empty ones


@pytest.fixture(params=["end of text", "BOS"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> PreTrainedTokenizerFast:
    """A tokenizer in the folder ``tokenizer``; it may put a BOS before every text."""
    tokenizer = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8)
    if request.param == "BOS":
        tokenizer.add_special_tokens({"bos_token": "<s>"})
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    return tokenizer


def write_nanogpt(path: Path, documents: list[list[int]]) -> Path:
    np.concatenate(documents).astype("<u2").tofile(path)
    return path


def write_llm_c(
    path: Path, documents: list[list[int]], magic: int = 20240520, version: int = 1
) -> Path:
    tokens = np.concatenate(documents).astype("<u2" if magic == 20240520 else "<u4")
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def write_llama(path: Path, documents: list[list[int]]) -> Path:
    return write_llm_c(path, documents, magic=20240801, version=7)


def write_megatron(path: Path, documents: list[list[int]], dtype: str = "<u2", code: int = 8):
    """Write each document as one sequence, but the second one as two."""
    np.concatenate(documents).astype(dtype).tofile(path)
    lengths = [len(document) for document in documents]
    lengths[1:2] = [1, lengths[1] - 1]
    borders = [0, 1, *range(3, len(lengths) + 1)]
    pointers = np.dtype(dtype).itemsize * np.append(0, np.cumsum(lengths)[:-1])
    with path.with_suffix(".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, code))
        file.write(struct.pack("<QQ", len(lengths), len(borders)))
        for values, kind in [(lengths, "<i4"), (pointers, "<i8"), (borders, "<i8")]:
            file.write(np.array(values).astype(kind).tobytes())
    return path


def write_megatron_int32(path: Path, documents: list[list[int]]) -> Path:
    return write_megatron(path, documents, "<i4", 4)


# --- rows


WRITERS = [
    (write_nanogpt, [0, 1]),  # how many tokens of end-of-text are in front of a document and behind
    (write_llm_c, [1, 0]),
    (write_llama, [1, 0]),
    (write_megatron, [0, 1]),
    (write_megatron, [0, 0]),
    (write_megatron_int32, [0, 1]),
]


@pytest.mark.parametrize("are_isolated", [False, True])
@pytest.mark.parametrize(("write", "ends"), WRITERS)
@pytest.mark.parametrize("searched", [5, 1 << 24])
def test_rows_are_those_of_the_text(
    write, ends, are_isolated, searched, tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr(token_files, "_SEARCHED_TOKENS", searched)
    settings = {"isolate_documents": are_isolated, "tokenizer": str(tmp_path / "tokenizer")}
    expected = tokenize_texts(tmp_path, DOCUMENTS, block_size=7, **settings)
    encoded = [tokenizer.encode(text, split_special_tokens=True) for text in DOCUMENTS]
    end = [tokenizer.eos_token_id]
    if encoded[0][0] == tokenizer.bos_token_id:  # llm.c writes no end-of-text for Llama 3
        ends = [0, ends[1]]
    path = write(tmp_path / "tokens.bin", [ends[0] * end + ids + ends[1] * end for ids in encoded])

    config = data_config(path, **settings)
    rows = tokenize(config, 7)

    assert rows.metadata.train_tokens == expected.metadata.train_tokens
    assert rows.train.column_names == expected.train.column_names
    for name in rows.train.column_names:
        assert rows.train.column(name).tolist() == expected.train.column(name).tolist()


def write_other_magic(path: Path) -> None:
    write_llm_c(path, [[1, 2]], magic=20240522, version=7)


def write_short(path: Path) -> None:
    write_llm_c(path, [[1, 2, 3]])
    path.write_bytes(path.read_bytes()[:-2])


def write_float_index(path: Path) -> None:
    write_megatron(path, [[1, 2], [3, 4]], dtype="<f4", code=6)


def write_short_index(path: Path) -> None:
    write_megatron(path, [[1, 2], [3, 4]])
    index = path.with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("write", "name", "error"),
    [
        (lambda path: path.write_bytes(b"\1\0\2"), "a", "a.bin has 3 bytes, not the 2 of 1 tokens"),
        (lambda path: path.write_bytes(b""), "a", "a.bin has 0 bytes"),
        (write_other_magic, "a", "magic number and version (20240522, 7)"),
        (write_short, "a", "a.bin has 1,028 bytes, not the 1,030 of 3 tokens"),
        (write_float_index, "a", "a.idx is no index of tokens"),
        (write_short_index, "a", "a.idx is not Megatron-LM's, or not complete"),
        (lambda path: path.write_bytes(b"ab"), "a_text_document", "its .idx is absent"),
        (lambda path: write_nanogpt(path, [[1, 60_000]]), "a", "has no token 60000; --tokenizer"),
    ],
)
def test_a_file_that_contradicts_itself_is_one_line(write, name, error, tmp_path):
    path = tmp_path / f"{name}.bin"
    write(path)
    tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8).save_pretrained(
        tmp_path / "tokenizer"
    )
    with pytest.raises(UserError, match=re.escape(error)):
        tokenize(data_config(path, tokenizer=str(tmp_path / "tokenizer")), 1)


def test_the_tokenizer_must_be_named(tmp_path):
    path = write_nanogpt(tmp_path / "a.bin", [[1, 2, 3]])
    with pytest.raises(UserError, match="name the tokenizer that made it"):
        tokenize(data_config(path), 1)
