"""Documents become rows without a token lost, doubled or moved, and are tokenised only once."""

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from llmtrain.data import corpus, dataset_names, prepare, text_rows
from llmtrain.data import tokenizer as tok
from llmtrain.data.config import DataConfig
from llmtrain.data.corpus import Corpus
from llmtrain.data.dataset_names import open_source
from llmtrain.data.loader import IGNORED
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.store import TOKEN_COLUMNS
from llmtrain.errors import UserError
from tests.data.preparation import (
    BLOCK,
    TEXTS,
    complaint,
    data_config,
    documents_of,
    left_behind,
    log_lines,
    stream_of,
    tokenize_texts,
    write_texts,
)
from tests.launching import PYTHON, run

pytestmark = pytest.mark.usefixtures("cache")


def expected_stream(texts: list[str], tokenized: Tokenized) -> list[int]:
    """The stream, if each document is tokenised in one piece."""
    backend = tokenized.tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    end = tokenized.tokenizer.eos_token_id
    stream = [end]
    for text in texts:
        stream += [*backend.encode(text, add_special_tokens=False).ids, end]
    return stream


def is_from_cache(capsys: pytest.CaptureFixture) -> bool:
    """Read from the line about the data whether the rows were cached."""
    _, _, source = capsys.readouterr().out.rpartition("; ")
    assert source in ("tokenised\n", "from the cache\n")
    return source == "from the cache\n"


# --- rows


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:300"])
@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_every_token_but_the_first_is_a_target_exactly_once(tmp_path, tokenizer, block_size):
    tokenized = tokenize_texts(tmp_path, TEXTS, block_size, tokenizer=tokenizer)

    tokens = stream_of(tokenized.train)
    assert tokens == expected_stream(TEXTS, tokenized)

    targets = np.array(tokenized.train.dataset[:]["input_ids"])[:, 1:]
    assert targets.shape == (tokenized.metadata.train_rows, block_size)
    assert (targets != IGNORED).sum() == len(tokens) - 1 == tokenized.metadata.train_tokens


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:300"])
def test_documents_come_back_exactly_and_in_their_order(tmp_path, tokenizer):
    tokenized = tokenize_texts(tmp_path, TEXTS, tokenizer=tokenizer)
    assert documents_of(tokenized.train, tokenized) == TEXTS


def test_byte_tokens_are_the_bytes(tmp_path):
    tokenized = tokenize_texts(tmp_path, ["abca", "b"], block_size=3)
    a, b, c = (tokenized.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    assert stream_of(tokenized.train) == [0, a, b, c, a, 0, b, 0]
    assert np.array(tokenized.train.dataset[:]["input_ids"]).dtype.kind == "i"


def random_pieces(length: int) -> list[text_rows.Piece]:
    """Random tokens, in pieces of random sizes. Some are empty, some begin a document."""
    random_numbers = np.random.default_rng(length)
    pieces = []
    remaining = length
    while remaining > 0:
        size = min(random_numbers.choice([0, 1, 2, 9, 40]), remaining)
        tokens = random_numbers.integers(1, 60_000, size, dtype=np.int32)
        pieces.append(text_rows.Piece(tokens, begins_document=random_numbers.random() < 0.5))
        remaining -= size
    return pieces


def tokens_of(pieces: list[text_rows.Piece]) -> list[int]:
    return list(chain.from_iterable(piece.tokens.tolist() for piece in pieces))


STREAM_LENGTHS = [*range(20), 24, 25, 26, 200]


@pytest.mark.parametrize("rows_per_batch", [1, 2, 5, 1024])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_rows_do_not_depend_on_the_pieces_of_the_stream(
    tmp_path, monkeypatch, rows_per_batch, block_size
):
    monkeypatch.setattr(text_rows, "TOKENS_PER_BATCH", rows_per_batch * block_size)
    path = tmp_path / "rows.arrow"

    def write_rows(pieces: list[text_rows.Piece]) -> text_rows.WrittenStream:
        return text_rows.write_stream(path, iter(pieces), block_size, columns=["input_ids"])

    for length in STREAM_LENGTHS:
        pieces = random_pieces(length)
        tokens = tokens_of(pieces)
        path.unlink(missing_ok=True)

        written = write_rows(pieces)
        assert written.targets == max(length - 1, 0)
        assert written.rows == -(-written.targets // block_size)  # rounded up
        if written.rows:
            assert stream_of(datasets.Dataset.from_file(str(path))) == tokens

        in_one_piece = [text_rows.Piece(np.array(tokens, np.int32))]
        assert write_rows(in_one_piece) == written


def expected_positions(pieces: list[text_rows.Piece], block_size: int) -> list[int]:
    """Count the position id of each token, from 0 at each document and at each row."""
    positions = []
    for piece in pieces:
        for i in range(len(piece)):
            is_begin = piece.begins_document and i == 0
            is_first_of_row = len(positions) % block_size == 0
            positions.append(0 if is_begin or is_first_of_row else positions[-1] + 1)
    return positions


@pytest.mark.parametrize("rows_per_batch", [1, 2, 5, 1024])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_positions_of_a_stream_restart_at_each_document_and_row(
    tmp_path, monkeypatch, rows_per_batch, block_size
):
    monkeypatch.setattr(text_rows, "TOKENS_PER_BATCH", rows_per_batch * block_size)
    for length in STREAM_LENGTHS:
        pieces = random_pieces(length)
        path = tmp_path / f"{length}.arrow"
        written = text_rows.write_stream(path, iter(pieces), block_size, columns=TOKEN_COLUMNS)
        assert written.targets == max(length - 1, 0)
        assert written.rows == -(-written.targets // block_size)  # rounded up
        if not written.rows:
            continue

        rows = datasets.Dataset.from_file(str(path))
        assert stream_of(rows) == tokens_of(pieces)
        assert rows["labels"][:] == rows["input_ids"][:]

        # The last token of a row is no input: it is the first input of the next row, if there is
        # one. So the inputs of all rows are the stream without its last token, or with it if the
        # last row has room.
        inputs = np.array(rows["input_ids"])[:, :-1]
        positions = np.array(rows["position_ids"])[:, :-1][inputs != IGNORED].tolist()
        assert positions == expected_positions(pieces, block_size)[: len(positions)]
        assert len(positions) in (length - 1, length)


def test_a_repaired_file_is_tokenised(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", TEXTS)
    intact = path.read_text()
    path.write_text(intact + "oops\n")
    assert "line 7" in complaint(data_config(path), BLOCK)

    path.write_text(intact)
    tokenized = tokenize(data_config(path), BLOCK)
    assert documents_of(tokenized.train, tokenized) == TEXTS


# --- documents that do not attend to each other

E = 0  # end-of-text of the tokenizer ``byte``


def tokenize_isolated(folder: Path, texts: list[str], block_size: int, **settings) -> Tokenized:
    return tokenize_texts(folder, texts, block_size, isolate_documents=True, **settings)


def test_positions_restart_at_the_end_of_text_in_front_of_a_document(tmp_path):
    tokenized = tokenize_isolated(tmp_path, ["ab", "", "c"], block_size=4)
    a, b, c = (tokenized.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    first, second = tokenized.train
    assert first == {"input_ids": [E, a, b, E, E], "position_ids": [0, 1, 2, 0, 0]}
    assert second == {"input_ids": [E, c, E, IGNORED, IGNORED], "position_ids": [0, 1, 2, 0, 1]}
    assert tokenized.is_packed


def test_positions_restart_at_the_border_of_a_row(tmp_path):
    tokenized = tokenize_isolated(tmp_path, ["abcdef", "g"], block_size=3)
    positions = [row["position_ids"] for row in tokenized.train]
    assert positions == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_isolated_documents_are_cut_into_the_same_rows(tmp_path, block_size):
    default = tokenize_texts(tmp_path, TEXTS, block_size)
    isolated = tokenize_isolated(tmp_path, TEXTS, block_size)
    assert isolated.train.column_names == ["input_ids", "position_ids"]
    assert isolated.train.dataset["input_ids"][:] == default.train.dataset["input_ids"][:]
    assert isolated.metadata.train_tokens == default.metadata.train_tokens


def test_isolated_documents_have_their_own_cache_entry_and_data_hash(tmp_path, capsys):
    default = tokenize_texts(tmp_path, TEXTS)
    capsys.readouterr()

    isolated = tokenize_isolated(tmp_path, TEXTS, BLOCK)
    assert not is_from_cache(capsys)
    assert isolated.metadata.data_sha256 != default.metadata.data_sha256

    assert tokenize_isolated(tmp_path, TEXTS, BLOCK).metadata == isolated.metadata
    assert is_from_cache(capsys)


def test_a_bos_that_the_tokenizer_adds_begins_every_document(tmp_path):
    with_bos = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), BLOCK)
    with_bos.add_special_tokens({"bos_token": "<s>"})
    bos = with_bos.bos_token_id
    with_bos.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    with_bos.save_pretrained(tmp_path / "with-bos")
    name = str(tmp_path / "with-bos")

    tokenized = tokenize_texts(tmp_path, ["ab", "<s> is text"], tokenizer=name)
    tokens = stream_of(tokenized.train)
    assert tokens.count(bos) == 2, "the <s> in a text is not the special token"
    assert tokenized.tokenizer.decode(tokens) == "<s>ab<|endoftext|><s><s> is text<|endoftext|>"

    # If documents are isolated, each begins with BOS and ends with the end-of-text token.
    isolated = tokenize_isolated(tmp_path, ["ab", "c"], 6, tokenizer=name)
    (row,) = isolated.train
    assert isolated.tokenizer.decode(row["input_ids"]) == "<s>ab<|endoftext|><s>c<|endoftext|>"
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2]


# --- long documents, which are tokenised in segments

WORDS = ["word", "it's", "n't", "x", "12", "...", "!?", "a_b", "<|endoftext|>"]
UNICODE_WORDS = ["漢字", "ünï", "🙂", "e\u0301"]
GAPS = [" ", " ", " ", "  ", "\n", "\r\n", "\n\n  ", "\t", ""]
UNICODE_GAPS = ["\u3000", "\u00a0", "\x85", "\u2028", "\u200b"]


@pytest.fixture(scope="module")
def long_text() -> str:
    random_numbers = random.Random(1)
    parts = []
    for _ in range(1500):
        parts.append(random_numbers.choice(WORDS + UNICODE_WORDS))
        parts.append(random_numbers.choice(GAPS + UNICODE_GAPS))
    return "".join(parts)


def set_segment_size(monkeypatch, characters: int, characters_per_call: int) -> None:
    """Cut documents after this many characters, and encode so many in one call."""
    monkeypatch.setattr(corpus, "_SEGMENT_CHARACTERS", characters)
    monkeypatch.setattr(corpus, "_ENCODE_CHARACTERS", characters_per_call)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:400"])
@pytest.mark.parametrize(("characters", "characters_per_call"), [(1, 1), (7, 11), (100, 10_000)])
def test_a_document_in_segments_has_the_tokens_of_the_uncut_document(
    monkeypatch, tmp_path, long_text, tokenizer, characters, characters_per_call
):
    set_segment_size(monkeypatch, characters, characters_per_call)
    texts = [long_text, "short", "", long_text[:50]]
    tokenized = tokenize_texts(tmp_path, texts, tokenizer=tokenizer)
    assert stream_of(tokenized.train) == expected_stream(texts, tokenized)
    assert documents_of(tokenized.train, tokenized) == texts


@pytest.mark.parametrize("separator", ["\x1c", "\x1d", "\x1e", "\x1f"])
def test_a_document_is_not_cut_at_white_space_of_python_alone(monkeypatch, tmp_path, separator):
    # `str.isspace` accepts the ASCII separators. The regular expression of byte-level BPE does not.
    set_segment_size(monkeypatch, characters=7, characters_per_call=1000)
    texts = [f"ab! {f'!{separator}' * 20}\n" * 20]
    tokenized = tokenize_texts(tmp_path, texts, tokenizer="bpe:300")
    assert stream_of(tokenized.train) == expected_stream(texts, tokenized)


def test_cutting_inside_words_would_change_the_tokens(monkeypatch, tmp_path, long_text):
    """The tests above notice a bad cut."""

    def cut_anywhere(text: str) -> Iterator[corpus._Segment]:
        for start in range(0, len(text), 7):
            is_last = start + 7 >= len(text)
            yield corpus._Segment(text[start : start + 7], is_first=start == 0, is_last=is_last)

    monkeypatch.setattr(corpus, "_segments_of", cut_anywhere)
    tokenized = tokenize_texts(tmp_path, [long_text], tokenizer="bpe:400")
    assert stream_of(tokenized.train) != expected_stream([long_text], tokenized)


@pytest.mark.parametrize("size", [1, 3, 50, 10**6])
def test_segments_join_to_the_text_and_mark_its_ends(monkeypatch, long_text, size):
    monkeypatch.setattr(corpus, "_SEGMENT_CHARACTERS", size)
    for text in [long_text, "", "x", " ", "no-white-space-at-all" * 9, "   ", " lead", "trail "]:
        segments = list(corpus._segments_of(text))
        assert "".join(segment.text for segment in segments) == text
        assert [i for i, segment in enumerate(segments) if segment.is_first] == [0]
        assert [i for i, segment in enumerate(segments) if segment.is_last] == [len(segments) - 1]


@pytest.mark.parametrize("size", [1, 3, 50, 10**6])
def test_a_segment_is_at_most_one_word_too_long(monkeypatch, long_text, size):
    monkeypatch.setattr(corpus, "_SEGMENT_CHARACTERS", size)
    longest_word = max(map(len, re.findall(r"\S*\s*", long_text)))
    assert max(map(len, corpus._segments_of(long_text))) <= size + longest_word


# --- the eval split


def numbered_documents(count: int) -> list[str]:
    return [f"document {i} says {i * i}" for i in range(count)]


def split_of(folder: Path, texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    """Return the training documents and the eval documents. Checks the counts of the metadata."""
    tokenized = tokenize_texts(folder, texts, block_size=4, eval_fraction=fraction)
    train = documents_of(tokenized.train, tokenized)
    eval = documents_of(tokenized.eval, tokenized)
    assert tokenized.metadata.records == len(texts)
    assert tokenized.metadata.eval_records == len(eval)
    assert tokenized.metadata.eval_bytes == sum(len(text.encode()) for text in eval)
    return train, eval


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
def test_every_document_is_in_one_split_and_keeps_its_order(tmp_path, fraction):
    texts = numbered_documents(400)
    train, eval = split_of(tmp_path, texts, fraction)
    assert sorted(train + eval) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert eval == [text for text in texts if text in set(eval)]
    assert len(eval) / 400 == pytest.approx(fraction, abs=0.08)


def test_documents_stay_in_their_split_when_others_are_added(tmp_path):
    texts = numbered_documents(300)
    train, eval = split_of(tmp_path, texts[:100], 0.1)
    assert eval

    reordered = texts[200:] + texts[:200][::-1]
    more_train, more_eval = split_of(tmp_path, reordered, 0.1)
    assert set(eval) < set(more_eval)
    assert set(train) < set(more_train)


def test_a_larger_fraction_adds_documents_to_the_eval_split(tmp_path):
    texts = numbered_documents(200)
    _, small = split_of(tmp_path, texts, 0.1)
    _, large = split_of(tmp_path, texts, 0.3)
    assert set(small) < set(large)


def test_a_document_and_its_copy_are_in_the_same_split(tmp_path):
    train, eval = split_of(tmp_path, numbered_documents(100) * 2, 0.3)
    assert eval
    assert not set(train) & set(eval)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_if_the_fraction_selects_no_document_the_longest_is_cut(tmp_path, count):
    longest = "the longest document of all: " + "words and words " * 10
    texts = [*numbered_documents(count - 1), longest]
    train, (eval,) = split_of(tmp_path, texts, 1e-3)
    assert longest.endswith(eval)
    assert train == [*texts[:-1], longest.removesuffix(eval)]

    reversed_texts = texts[::-1]
    assert split_of(tmp_path, reversed_texts, 1e-3)[1] == [eval]


@pytest.mark.parametrize("count", [1, 2, 10])
def test_if_the_longest_document_is_repeated_all_its_copies_are_cut(tmp_path, count):
    longest = "the longest document of all: " + "words and words " * 10
    texts = [*numbered_documents(count - 1), longest] * 3

    train, eval = split_of(tmp_path, texts, 1e-3)

    (end,) = set(eval)
    assert len(eval) == 3
    assert longest.endswith(end)
    assert train == [text.removesuffix(end) for text in texts]

    source = open_source(str(tmp_path / "corpus.jsonl"))
    corpus = Corpus(source, "text", eval_fraction=1e-3, max_train_samples=count)
    assert [*corpus.texts("train")] == train[:count]
    assert [*corpus.texts("eval")] == eval


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("other", ["", "small"])
def test_a_large_document_beside_a_small_one_is_cut(tmp_path, other, is_first):
    large = "some words, and more of them\n" * 300
    texts = [large, other] if is_first else [other, large]
    train, eval = split_of(tmp_path, texts, 0.05)
    assert sum(map(len, train)) > 0.9 * len(large)
    assert 0 < sum(map(len, eval)) < 0.1 * len(large)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.001])
def test_the_end_of_a_single_document_is_the_eval_split(tmp_path, fraction):
    lines = [chr(0x4E00 + i) + chr(0x5E00 + i) + "\n" for i in range(66)]
    text = "\n" + "".join(lines) + "."
    (train,), (eval,) = split_of(tmp_path, [text], fraction)
    assert train + eval == text
    assert eval
    assert len(eval) == pytest.approx(200 * fraction, abs=1)


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(["one document of some words"], id="one document"),
        pytest.param(numbered_documents(20), id="many documents"),
    ],
)
def test_without_a_fraction_there_is_no_eval_split(tmp_path, texts):
    tokenized = tokenize_texts(tmp_path, texts)
    assert tokenized.eval is None
    assert documents_of(tokenized.train, tokenized) == texts

    metadata = tokenized.metadata
    assert metadata.eval_records == 0
    assert metadata.eval_tokens == 0
    assert metadata.eval_rows == 0
    assert metadata.eval_bytes == 0


def test_char_has_tokens_for_characters_of_the_eval_split_alone(tmp_path):
    rare_texts = [f"perhaps in the eval split: {chr(0x4E00 + i)}" for i in range(200)]
    texts = numbered_documents(50) + rare_texts
    tokenized = tokenize_texts(tmp_path, texts, tokenizer="char", eval_fraction=0.2)
    train = documents_of(tokenized.train, tokenized)
    eval = documents_of(tokenized.eval, tokenized)
    assert sorted(train + eval) == sorted(texts)


# --- metadata


def test_metadata_describe_the_rows_and_the_tokenizer(tmp_path):
    texts = numbered_documents(100)
    tokenized = tokenize_texts(tmp_path, texts, tokenizer="bpe:300", eval_fraction=0.2)
    metadata = tokenized.metadata

    assert metadata.dataset == str(tmp_path / "corpus.jsonl")
    assert metadata.block_size == BLOCK
    assert metadata.train_rows == len(tokenized.train)
    assert metadata.eval_rows == len(tokenized.eval)
    assert metadata.train_tokens == len(stream_of(tokenized.train)) - 1
    assert metadata.eval_tokens == len(stream_of(tokenized.eval)) - 1

    assert metadata.tokenizer == "bpe:300"
    assert metadata.vocabulary == len(tokenized.tokenizer) == 300
    assert metadata.tokenizer_sha256 == tok.digest(tokenized.tokenizer)


def test_the_data_hash_covers_tokens_and_their_split_but_not_rows(tmp_path):
    texts = numbered_documents(50)

    def data_hash(
        texts: list[str] = texts, block_size: int = BLOCK, fraction: float = 0.2, **settings
    ) -> str:
        tokenized = tokenize_texts(tmp_path, texts, block_size, eval_fraction=fraction, **settings)
        return tokenized.metadata.data_sha256

    assert re.fullmatch("[0-9a-f]{64}", data_hash())
    assert data_hash(block_size=5) == data_hash()
    assert data_hash(fraction=0.5) != data_hash()
    assert data_hash(texts=texts[::-1]) != data_hash()
    assert data_hash(tokenizer="char") != data_hash()


def test_a_saved_tokenizer_makes_the_rows_of_the_trained_one(tmp_path, long_text):
    texts = [long_text, "short <|endoftext|>"]
    trained = tokenize_texts(tmp_path, texts, tokenizer="bpe:300")

    # A tokenizer.json may ask for truncation and padding, which would damage a corpus.
    trained.tokenizer.backend_tokenizer.enable_truncation(5)
    trained.tokenizer.backend_tokenizer.enable_padding(length=9)
    trained.tokenizer.save_pretrained(tmp_path / "tokenizer")

    loaded = tokenize_texts(tmp_path, texts, tokenizer=str(tmp_path / "tokenizer"))
    assert stream_of(loaded.train) == stream_of(trained.train)
    assert loaded.metadata.data_sha256 == trained.metadata.data_sha256


def test_only_the_first_process_prints_a_line_about_the_data(tmp_path, monkeypatch, capsys):
    tokenize_texts(tmp_path, TEXTS)
    output = capsys.readouterr().out
    assert output.startswith("data ")
    assert output.count("\n") == 1

    monkeypatch.setenv("RANK", "1")
    tokenize_texts(tmp_path, TEXTS)
    assert capsys.readouterr().out == ""


# --- the cache


def test_cached_rows_are_used_without_parsing_the_text(tmp_path, monkeypatch, capsys):
    first = tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert not is_from_cache(capsys)

    def refuse_to_read(paths, field):
        raise AssertionError("the text was read again")

    monkeypatch.setattr(dataset_names, "_read_files", refuse_to_read)
    second = tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert is_from_cache(capsys)
    assert second.metadata == first.metadata
    assert stream_of(second.train) == stream_of(first.train)
    assert stream_of(second.eval) == stream_of(first.eval)

    with pytest.raises(AssertionError, match="read again"):
        tokenize_texts(tmp_path, [*TEXTS, "new"], eval_fraction=0.3)


OPEN_CACHED_ROWS = """
import sys
from llmtrain import DataConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.prepare import tokenize

config = DataConfig(dataset=[sys.argv[1]], tokenizer="byte", eval_fraction=0.0)
rows = tokenize(config, int(sys.argv[2]))
next(iter(train_loader(rows.train, 2, 2, range(3), seed=0)))
print({"datasets", "pandas"} & {*sys.modules})
"""


def test_cached_rows_are_read_without_slow_imports(tmp_path):
    tokenize_texts(tmp_path, TEXTS)
    corpus_file = str(tmp_path / "corpus.jsonl")
    result = run([*PYTHON, "-c", OPEN_CACHED_ROWS, corpus_file, str(BLOCK)]).assert_ok()
    assert "from the cache" in result.out
    assert result.out.splitlines()[-1] == "set()"


DOCUMENTS = numbered_documents(20)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"texts": [*DOCUMENTS[:-1], "another"]}, id="text"),
        pytest.param({"texts": DOCUMENTS[::-1]}, id="order"),
        pytest.param({"tokenizer": "char"}, id="tokenizer"),
        pytest.param({"tokenizer": "bpe:258"}, id="vocabulary"),
        pytest.param({"block_size": BLOCK + 1}, id="block size"),
        pytest.param({"eval_fraction": 0.4}, id="eval fraction"),
        pytest.param({"text_field": "body"}, id="text field"),
    ],
)
def test_a_change_of_the_text_or_a_setting_makes_new_rows(tmp_path, capsys, change):
    path = tmp_path / "corpus.jsonl"
    default = {
        "texts": DOCUMENTS,
        "tokenizer": "bpe:257",
        "block_size": BLOCK,
        "eval_fraction": 0.5,
        "text_field": "text",
    }

    def documents(texts, block_size, **settings) -> list[str]:
        records = [{"text": text, "body": f"{text} body"} for text in texts]
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        tokenized = tokenize(data_config(path, **settings), block_size)
        assert tokenized.metadata.block_size == block_size
        train = documents_of(tokenized.train, tokenized)
        return train + documents_of(tokenized.eval, tokenized)

    documents(**default)
    assert not is_from_cache(capsys)

    changed = default | change
    suffix = " body" if changed["text_field"] == "body" else ""
    expected = sorted(text + suffix for text in changed["texts"])

    assert sorted(documents(**changed)) == expected
    assert not is_from_cache(capsys)
    assert sorted(documents(**changed)) == expected
    assert is_from_cache(capsys)


def test_files_that_are_not_read_are_in_the_log_and_suffixes_of_text_make_new_rows(
    tmp_path, capsys
):
    for name in ["a.md", "a.py", "b.py", "c.rst", "Makefile", "README.md", ".git/d.md"]:
        path = tmp_path / "texts" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(f"the text of {name}")
    folder = tmp_path / "texts"
    line = (
        f"{folder}: 4 files are not read: 2 .py, 1 without a suffix, 1 .rst; --text_suffixes names "
        "suffixes to read as text"
    )

    for outcome in ("tokenised", "from the cache"):
        tokenized = tokenize(data_config(folder), 4)
        about_rows, about_files = log_lines(capsys, "data")
        assert about_rows.endswith(outcome)
        assert about_files == line
        assert tokenized.metadata.records == 2

    tokenized = tokenize(data_config(folder, text_suffixes=[".PY", ".rst"]), 4)

    about_rows, about_files = log_lines(capsys, "data")
    assert about_rows.endswith("tokenised")
    assert "1 file is not read: 1 without a suffix; " in about_files
    assert tokenized.metadata.records == 5
    assert "the text of b.py" in documents_of(tokenized.train, tokenized)


@pytest.mark.parametrize("suffix", ["py", "*.py", ".tar.gz", ".", ""])
def test_a_suffix_of_text_begins_with_its_only_dot(suffix):
    with pytest.raises(UserError, match=r"--text_suffixes .*: write .* such as \.py\."):
        DataConfig(text_suffixes=[suffix])


def test_settings_that_do_not_shape_the_rows_use_the_cached_ones(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    capsys.readouterr()
    tokenize_texts(tmp_path, TEXTS, global_batch_size=7, per_device_train_batch_size=3)
    assert is_from_cache(capsys)


def test_a_moved_data_set_is_in_the_cache_and_has_its_new_name(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    capsys.readouterr()

    moved = (tmp_path / "corpus.jsonl").rename(tmp_path / "elsewhere.jsonl")
    assert tokenize(data_config(moved), BLOCK).metadata.dataset == str(moved)
    output = capsys.readouterr().out
    assert "elsewhere.jsonl" in output
    assert output.endswith("; from the cache\n")


def test_a_new_tokenizer_in_the_same_folder_makes_new_rows(tmp_path, capsys):
    folder = tmp_path / "tokenizer"
    texts = ["aaaa bbbb cccc dddd"]
    for training_text in ("aaaa bbbb " * 20, "cccc dddd " * 20):
        trained = tok.train_tokenizer("bpe:260", iter([training_text]), lambda: iter(()))
        tok.as_pretrained(trained, 8).save_pretrained(folder)
        tokenize_texts(tmp_path, texts, tokenizer=str(folder))
        assert not is_from_cache(capsys)

    moved = folder.rename(tmp_path / "moved")
    tokenize_texts(tmp_path, texts, tokenizer=str(moved))
    assert is_from_cache(capsys)


def test_two_processes_that_tokenise_at_once_make_the_rows_once(tmp_path, monkeypatch):
    # Threads stand for the processes: a file lock of another object excludes both.
    path = write_texts(tmp_path / "corpus.jsonl", TEXTS)
    start = threading.Barrier(2)
    make = prepare._make
    makers = []

    def slow_make(*arguments) -> None:
        makers.append(threading.get_ident())
        time.sleep(0.3)
        make(*arguments)

    def tokenize_together(_: int) -> Tokenized:
        start.wait(timeout=30)
        return tokenize(data_config(path), BLOCK)

    monkeypatch.setattr(prepare, "_make", slow_make)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tokenize_together, range(2))

    assert len(makers) == 1
    assert first.metadata == second.metadata
    assert stream_of(first.train) == stream_of(second.train)


def test_a_hub_dataset_is_tokenised_and_cached(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    (tmp_path / "corpus").mkdir()
    write_texts(tmp_path / "corpus" / "train.jsonl", TEXTS)
    data = data_config(tmp_path / "corpus", dataset_train_split="train")

    first = tokenize(data, BLOCK)
    assert documents_of(first.train, first) == TEXTS
    assert not is_from_cache(capsys)

    second = tokenize(data, BLOCK)
    assert documents_of(second.train, second) == TEXTS
    assert is_from_cache(capsys)


# --- errors

LINES = b"words\n" * 9
LONG_RECORD = b'{"text": "' + b"words " * 9 + b'"}\n'


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        pytest.param("a.jsonl", b"", "holds no text", id="no documents"),
        pytest.param("a.jsonl", b'{"text": ""}\n' * 3, "holds no text", id="empty documents"),
        pytest.param("a.txt", b"", "holds no text", id="empty file"),
        pytest.param("a.jsonl", LONG_RECORD + b"oops\n", "a.jsonl, line 2", id="broken line"),
        pytest.param("a.txt", LINES + b"\xff", "a.txt, line 10", id="not utf-8"),
        pytest.param("a.jsonl", b'{"text": "a\\ud800"}\n', "a.jsonl, line 1", id="half surrogate"),
        pytest.param("a.parquet", b"words", "a.parquet", id="not parquet"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line_and_no_cache_entry(
    tmp_path, cache, name, content, error
):
    path = tmp_path / name
    path.write_bytes(content)
    assert error in complaint(data_config(path), BLOCK)
    assert left_behind(cache) == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        pytest.param({"tokenizer": "bpe:256"}, "257", id="bpe with too few tokens"),
        pytest.param({"tokenizer": "bpe"}, "bpe:N", id="bpe without a size"),
        pytest.param({"tokenizer": "char:8"}, "takes no size", id="char with a size"),
        pytest.param(
            {"tokenizer": "./absent"},
            "./absent: no tokenizer can be loaded",
            id="no such tokenizer",
        ),
        pytest.param({"eval_fraction": 0.99}, "lower it", id="no training text is left"),
    ],
)
def test_a_bad_setting_is_an_error_of_one_line_and_no_cache_entry(tmp_path, cache, settings, error):
    path = tmp_path / "a.txt"
    path.write_bytes(b"words")
    assert error in complaint(data_config(path, **settings), 1)
    assert left_behind(cache) == []


def test_a_fraction_that_leaves_no_training_document_is_an_error(tmp_path, cache):
    path = write_texts(tmp_path / "a.jsonl", ["words", "more"])
    assert "lower it" in complaint(data_config(path, eval_fraction=0.9999), 1)
    assert left_behind(cache) == []


def test_a_missing_text_field_is_an_error_that_names_the_line(tmp_path, cache):
    path = tmp_path / "a.csv"
    path.write_text("id,text\n1,words\n")
    error = complaint(data_config(path, text_field="body"), BLOCK)
    assert "a.csv, line 2: no field 'body'" in error
    assert left_behind(cache) == []


def test_a_full_disk_leaves_no_cache_entry_and_the_next_try_succeeds(tmp_path, cache, monkeypatch):
    write_stream = corpus.write_stream
    is_full = True

    def write_until_full(path, *arguments, **options):
        if is_full and "eval" in path.name:  # the training rows are written before
            raise OSError(28, "No space left on device")
        return write_stream(path, *arguments, **options)

    monkeypatch.setattr(corpus, "write_stream", write_until_full)
    with pytest.raises(UserError, match="No space left on device; set LLMTRAIN_CACHE"):
        tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert left_behind(cache) == []

    is_full = False
    assert tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3).metadata.records == len(TEXTS)


def test_the_error_for_too_large_a_block_names_one_that_fits(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_text("some words")
    error = complaint(data_config(path), 100)
    assert "--block_size 100 is larger" in error
    assert left_behind(cache) == []

    largest = int(re.search(r"use at most (\d+)", error)[1])
    assert tokenize(data_config(path), largest).metadata.block_size == largest
    assert "is larger" in complaint(data_config(path), largest + 1)


def test_the_error_for_too_large_a_block_names_the_shortest_text(tmp_path):
    long = tmp_path / "long.txt"
    long.write_text("words " * 60)
    short = tmp_path / "short.txt"
    short.write_text("words ")
    data = DataConfig(dataset=[str(long), str(short)], tokenizer="byte", eval_fraction=0.0)
    assert f"(8 tokens of {short}); use at most 7" in complaint(data, 100)
