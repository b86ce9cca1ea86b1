"""Files of nanoGPT, llm.c and Megatron-LM become the rows that their text becomes.

The files are written as the documentation of these programs says.
"""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from llmtrain.data import tokenizer as tok
from llmtrain.data.shards import BLOCK_BYTES
from llmtrain.data.token_files import TokenFile, token_file_rows
from llmtrain.errors import DamagedRowsError, UserError
from llmtrain.interfaces.batches import IGNORED
from tests.data.preparation import TEXTS, tokenize_texts

pytestmark = pytest.mark.usefixtures("cache")

E = 9  # end-of-text of the files without a tokenizer
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


def open_file(path: Path, block_size: int = 4, vocabulary: int = 1000) -> TokenFile:
    return TokenFile(path, block_size, True, begin=E, end_of_text=E, vocabulary=vocabulary)


# --- rows


@pytest.mark.parametrize("are_isolated", [False, True])
@pytest.mark.parametrize(
    ("write", "has_end_first"),
    [
        (write_nanogpt, False),
        (write_llm_c, True),
        (write_llama, True),
        (write_megatron, False),
        (write_megatron_int32, False),
    ],
)
@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
def test_rows_are_those_of_the_text(
    write, has_end_first, are_isolated, block_size, tokenizer, tmp_path
):
    rows = tokenize_texts(
        tmp_path,
        DOCUMENTS,
        block_size=min(block_size, 200),
        isolate_documents=are_isolated,
        tokenizer=str(tmp_path / "tokenizer"),
    ).train
    end = [tokenizer.eos_token_id]
    encoded = [tokenizer.encode(text, split_special_tokens=True) for text in DOCUMENTS]
    has_bos = encoded[0][0] == tokenizer.bos_token_id != end[0]
    documents = [end + ids if has_end_first and not has_bos else ids + end for ids in encoded]

    path = write(tmp_path / "tokens.bin", documents)
    [file] = token_file_rows([path], tokenizer, min(block_size, 200), are_isolated).train.shards

    assert len(file) == len(rows)
    assert file.targets == sum(map(len, documents)) - has_bos
    numbers = np.random.default_rng(0).permutation(len(file))
    columns = file.read(numbers)
    expected = [rows[number] for number in numbers.tolist()]
    assert columns.keys() == expected[0].keys()
    for name, values in columns.items():
        assert values.tolist() == [row[name] for row in expected]


def test_documents_without_end_of_text_begin_at_the_borders_of_the_index(tmp_path):
    file = open_file(write_megatron(tmp_path / "a.bin", [[1], [2, 3, 4], [5, 6], [7]]))

    columns = file.read(np.arange(len(file)))
    assert columns["input_ids"].tolist() == [
        [E, 1, 2, 3, 4],
        [4, 5, 6, 7, E],
    ]
    assert columns["position_ids"].tolist() == [
        [0, 1, 0, 1, 2],
        [0, 0, 1, 0, 1],
    ]


def test_without_bos_tokens_documents_begin_after_end_of_text(tmp_path):
    path = write_nanogpt(tmp_path / "a.bin", [[1, 2, E], [3, E], [4]])
    file = TokenFile(path, 6, True, begin=8, end_of_text=E, vocabulary=10)
    [row] = file.read(np.array([0]))["position_ids"].tolist()
    assert row == [0, 1, 2, 0, 1, 0, 1]


def test_a_file_may_be_shorter_than_a_row(tmp_path):
    file = open_file(write_nanogpt(tmp_path / "a.bin", [[3]]))
    assert file.read(np.array([0]))["input_ids"].tolist() == [[E, 3, E, IGNORED, IGNORED]]
    assert len(file.read(np.array([], np.int64))["input_ids"]) == 0


# --- errors of one line


def truncate(path: Path, size: int) -> Path:
    os.truncate(path, size)
    return path


def without_index(path: Path) -> Path:
    return write_nanogpt(path.with_name("a_document.bin"), [[1], [2, 3]])


def with_damaged_index(path: Path, position: int, content: bytes) -> Path:
    index = write_megatron(path, [[1], [2, 3]]).with_suffix(".idx")
    before = index.read_bytes()
    index.write_bytes(before[:position] + content + before[position + len(content) :])
    return path


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: truncate(write_nanogpt(path, [[1, 2]]), 3), "3 bytes, not the 2 of 1 tokens"),
        (lambda path: truncate(write_nanogpt(path, [[1, 2]]), 0), "holds no tokens"),
        (lambda path: write_llm_c(path, [[1]], magic=20240522), "version (20240522, 1) of llm.c; "),
        (lambda path: write_llm_c(path, [[1]], version=2), "version (20240520, 2) of llm.c; "),
        (lambda path: truncate(write_llm_c(path, [[1, 2]]), 1026), "1,026 bytes, not the 1,028 of"),
        (lambda path: write_llm_c(path, [[]]), "holds no tokens"),
        (lambda path: truncate(write_megatron(path, [[1], [2, 3]]), 4), "4 bytes, not the 6 of 3"),
        (without_index, "a_document.idx is absent; copy it"),
        (
            lambda path: with_damaged_index(path, 0, b"TNTIDX"),
            "magic b'TNTIDXX', version 1, dtyp",
        ),
        (lambda path: with_damaged_index(path, 9, b"\x02"), "version 2, dtype code 8."),
        (lambda path: with_damaged_index(path, 17, b"\x06"), "version 1, dtype code 6."),
        (
            lambda path: with_damaged_index(path, 18, b"\xff"),
            "idx is not Megatron-LM's, or not com",
        ),
    ],
)
def test_a_file_that_contradicts_itself_is_one_line(write, message, tmp_path):
    with pytest.raises(UserError) as error:
        open_file(write(tmp_path / "a.bin"))
    assert message in str(error.value)
    assert str(tmp_path / "a") in str(error.value)


@pytest.mark.parametrize("wrong", [100, -1])
def test_a_token_that_the_tokenizer_does_not_have_is_one_line(wrong, tmp_path):
    path = write_megatron_int32(tmp_path / "a.bin", [[1] * 6, [2, 3], [4, wrong]])
    file = open_file(path, vocabulary=100)
    assert len(file.read(np.array([0]))["input_ids"]) == 1
    with pytest.raises(DamagedRowsError, match=f"token 9 is {wrong}, but the vocabulary has 100;"):
        file.read(np.array([0, 2]))


# --- hashes


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """Two blocks of 1 MiB, and a part of a third one."""
    return write_nanogpt(tmp_path / "a.bin", [np.arange(BLOCK_BYTES + 1000) % 50])


def flip(path: Path, position: int) -> None:
    """Change a bit of a file, but not its times."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(position)
        [value] = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_flipped_bit_is_noticed_when_its_block_is_first_read(large_file):
    file = open_file(large_file)
    flip(large_file, BLOCK_BYTES + 10)
    file.read(np.array([0, len(file) - 1]))
    # A token has two bytes, and a row four tokens. This one begins in the first block.
    row_at_border = BLOCK_BYTES // 2 // 4
    for row in (row_at_border, row_at_border + 1000):
        with pytest.raises(DamagedRowsError, match="in the MiB from byte 1,048,576;"):
            file.read(np.array([row]))


def test_a_flipped_bit_of_an_index_is_noticed(tmp_path):
    path = write_megatron(tmp_path / "a.bin", [[1], [2, 3]])
    file = open_file(path)
    flip(path.with_suffix(".idx"), 60)
    with pytest.raises(DamagedRowsError, match=r"a\.idx differs from its hash"):
        file.read(np.array([0]))


def test_a_file_is_hashed_once_unless_its_size_or_its_time_changes(large_file, tmp_path):
    sha256 = open_file(large_file).sha256
    flip(large_file, 10)
    assert open_file(large_file).sha256 == sha256, "the hash in the cache is taken"

    os.utime(large_file)
    changed = open_file(large_file)
    assert changed.sha256 != sha256
    changed.read(np.array([0]))

    flip(large_file, 10)
    moved = large_file.rename(tmp_path / "moved.bin")
    assert open_file(moved).sha256 == sha256, "it depends on the content alone"
