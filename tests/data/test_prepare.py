"""Documents become rows without a token lost, doubled or moved, and are tokenised only once."""

import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from llmtrain.data import corpus, prepare
from llmtrain.data import tokenizer as tok
from llmtrain.data.audit import Audit
from llmtrain.data.loader import IGNORED
from llmtrain.data.packing import TOKEN_COLUMNS, TokenStore
from llmtrain.data.records import Documents, text_of
from llmtrain.data.shards import Shard, TokenRows, facts_of
from llmtrain.data.sources import open_source
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
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
    write_records,
    write_texts,
)

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


@pytest.mark.parametrize(
    ("tokenizer", "block_size"), [("char", 7), ("byte", 1), ("byte", 64), ("bpe:300", 2)]
)
def test_every_token_but_the_first_is_a_target_exactly_once(tmp_path, tokenizer, block_size):
    tokenized = tokenize_texts(tmp_path, TEXTS, block_size, tokenizer=tokenizer)

    tokens = stream_of(tokenized.train)
    assert tokens == expected_stream(TEXTS, tokenized)
    assert documents_of(tokenized.train, tokenized) == TEXTS
    assert tokenized.eval is None

    targets = tokenized.train.column("input_ids")[:, 1:]
    assert targets.shape == (tokenized.metadata.train_rows, block_size)
    assert (targets != IGNORED).sum() == len(tokens) - 1 == tokenized.metadata.train_tokens


def test_whoever_makes_rows_says_so_before_and_whoever_finds_them_does_not(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("RANK", "1")
    tokenize_texts(tmp_path, [*TEXTS, "more"], 8)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("data ")]
    assert "reading and tokenising" in line

    tokenize_texts(tmp_path, [*TEXTS, "more"], 8)
    assert capsys.readouterr().err == ""


def random_lengths(length: int) -> list[int]:
    """Return random lengths of documents that are so long together."""
    random_numbers = np.random.default_rng(length)
    lengths = []
    while (remaining := length - sum(lengths)) > 0:
        lengths.append(int(min(random_numbers.choice([1, 2, 9, 40]), remaining)))
    return lengths


def write_stream(
    path: Path, documents: list[np.ndarray], end: list[int], block_size: int, columns: list[str]
) -> Audit:
    """Write documents as rows. The store has them in another order, among others."""
    store = TokenStore(path.with_suffix(".tokens"))
    for document in reversed(documents):
        store.add(np.array([7, 8, 9]), np.ones(3, bool))
        store.add(document, np.ones(len(document), bool))
    sequences = np.arange(len(store))[1::2][::-1]
    written = corpus.write_stream(
        path, store, sequences, np.array(end, np.int32), block_size, columns, vocabulary=60_000
    )
    store.close()
    return written


def expected_positions(lengths: list[int], block_size: int) -> list[int]:
    """Count the position id of each token, from 0 at each document and at each row."""
    positions = []
    for length in lengths:
        for i in range(length):
            is_first_of_row = len(positions) % block_size == 0
            positions.append(0 if i == 0 or is_first_of_row else positions[-1] + 1)
    return positions


@pytest.mark.parametrize("end", [[], [5]], ids=["bos", "end-of-text"])
@pytest.mark.parametrize(("rows_per_batch", "block_size"), [(1, 3), (2, 1), (5, 8), (1024, 3)])
def test_rows_and_positions_do_not_depend_on_the_documents_of_the_stream(
    tmp_path, monkeypatch, rows_per_batch, block_size, end
):
    monkeypatch.setattr(corpus, "TOKENS_PER_BATCH", rows_per_batch * block_size)
    for length in [*range(20), 24, 25, 26, 200]:
        lengths = random_lengths(length)
        tokens = np.random.default_rng(length).integers(1, 60_000, length, dtype=np.int32)
        documents = np.split(tokens, np.cumsum(lengths)[:-1]) if lengths else []
        stream = [*tokens.tolist(), *end]
        path = tmp_path / f"{length}.safetensors"
        other_path = tmp_path / "one-document.safetensors"

        written = write_stream(path, documents, end, block_size, columns=TOKEN_COLUMNS)
        assert written.targets == max(len(stream) - 1, 0)
        assert written.rows == -(-written.targets // block_size)  # rounded up

        plain = [*TOKEN_COLUMNS[:1]]
        assert write_stream(other_path, [tokens], end, block_size, plain) == write_stream(
            other_path, documents, end, block_size, plain
        )
        if not written.rows:
            continue

        rows = TokenRows([Shard(tmp_path, facts_of(path))])
        assert stream_of(rows) == stream
        assert np.array_equal(rows.column("labels"), rows.column("input_ids"))

        # The last token of a row is no input: it is the first input of the next row, if there is
        # one. So the inputs of all rows are the stream without its last token, or with it if the
        # last row has room. The end continues the last document.
        inputs = rows.column("input_ids")[:, :-1]
        positions = rows.column("position_ids")[:, :-1][inputs != IGNORED].tolist()
        if end and lengths:
            lengths[-1] += 1
        assert positions == expected_positions(lengths or [len(end)], block_size)[: len(positions)]
        assert len(positions) in (len(stream) - 1, len(stream))


# --- documents that do not attend to each other

E = 0  # end-of-text of the tokenizer ``byte``


def tokenize_isolated(folder: Path, texts: list[str], block_size: int, **settings) -> Tokenized:
    return tokenize_texts(folder, texts, block_size, isolate_documents=True, **settings)


def test_positions_restart_at_each_document_and_row(tmp_path):
    tokenized = tokenize_isolated(tmp_path, ["ab", "", "c"], block_size=4)
    a, b, c = (tokenized.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    assert list(tokenized.train) == [
        {"input_ids": [E, a, b, E, E], "position_ids": [0, 1, 2, 0, 0]},
        {"input_ids": [E, c, E, IGNORED, IGNORED], "position_ids": [0, 1, 2, 0, 1]},
    ]
    assert tokenized.is_packed

    longer_than_a_row = tokenize_isolated(tmp_path, ["abcdef", "g"], block_size=3)
    positions = [row["position_ids"] for row in longer_than_a_row.train]
    assert positions == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]


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


@pytest.mark.parametrize(
    ("tokenizer", "characters", "characters_per_call"),
    [("char", 7, 11), ("byte", 1, 1), ("bpe:400", 7, 11), ("bpe:400", 100, 10_000)],
)
def test_a_document_in_segments_has_the_tokens_of_the_uncut_document(
    monkeypatch, tmp_path, long_text, tokenizer, characters, characters_per_call
):
    set_segment_size(monkeypatch, characters, characters_per_call)
    texts = [long_text, "short", "", long_text[:50]]
    tokenized = tokenize_texts(tmp_path, texts, tokenizer=tokenizer)
    assert stream_of(tokenized.train) == expected_stream(texts, tokenized)
    assert documents_of(tokenized.train, tokenized) == texts


def test_a_document_is_not_cut_at_white_space_of_python_alone(monkeypatch, tmp_path):
    # `str.isspace` accepts the ASCII separators. The regular expression of byte-level BPE does not.
    set_segment_size(monkeypatch, characters=7, characters_per_call=1000)
    separators = ["\x1c", "\x1d", "\x1e", "\x1f"]
    texts = [f"ab! {f'!{separator}' * 20}\n" * 20 for separator in separators]
    tokenized = tokenize_texts(tmp_path, texts, tokenizer="bpe:300")
    assert stream_of(tokenized.train) == expected_stream(texts, tokenized)


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


@pytest.mark.parametrize("fraction", [0.05, 0.7])
def test_every_document_is_in_one_split_and_keeps_its_order(tmp_path, fraction):
    texts = numbered_documents(400)
    train, eval = split_of(tmp_path, texts, fraction)
    assert sorted(train + eval) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert eval == [text for text in texts if text in set(eval)]
    assert len(eval) / 400 == pytest.approx(fraction, abs=0.08)


def test_documents_stay_in_their_split(tmp_path):
    texts = numbered_documents(300)
    train, eval = split_of(tmp_path, texts[:100], 0.1)
    assert eval

    with_others = texts[200:] + texts[:200][::-1]
    more_train, more_eval = split_of(tmp_path, with_others, 0.1)
    assert set(eval) < set(more_eval)
    assert set(train) < set(more_train)

    _, larger_eval = split_of(tmp_path, texts[:100], 0.3)
    assert set(eval) < set(larger_eval)

    train_copies, eval_copies = split_of(tmp_path, texts[:100] * 2, 0.3)
    assert not set(train_copies) & set(eval_copies)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 10])
def test_if_the_fraction_selects_no_document_all_copies_of_the_longest_are_cut(
    tmp_path, count, copies
):
    longest = "the longest document of all: " + "words and words " * 10
    texts = [*numbered_documents(count - 1), longest] * copies

    train, eval = split_of(tmp_path, texts, 1e-3)

    (end,) = set(eval)
    assert len(eval) == copies
    assert longest.endswith(end)
    assert train == [text.removesuffix(end) for text in texts]
    assert split_of(tmp_path, texts[::-1], 1e-3) == (train[::-1], eval)

    write_texts(tmp_path / "corpus.jsonl", texts)
    source = open_source(str(tmp_path / "corpus.jsonl"), data_config())
    documents = Documents(
        source,
        partial(text_of, field="text"),
        eval_fraction=1e-3,
        max_train_samples=count,
        field="text",
    )
    assert sorted(documents.texts("train")) == sorted(train[:count])
    assert [*documents.texts("eval")] == eval


@pytest.mark.parametrize(("other", "is_first"), [("", True), ("small", False)])
def test_a_large_document_beside_a_small_one_is_cut(tmp_path, other, is_first):
    large = "some words, and more of them\n" * 300
    texts = [large, other] if is_first else [other, large]
    train, eval = split_of(tmp_path, texts, 0.05)
    assert sum(map(len, train)) > 0.9 * len(large)
    assert 0 < sum(map(len, eval)) < 0.1 * len(large)


def test_char_has_tokens_for_characters_of_the_eval_split_alone(tmp_path):
    rare_texts = [f"perhaps in the eval split: {chr(0x4E00 + i)}" for i in range(200)]
    texts = numbered_documents(50) + rare_texts
    tokenized = tokenize_texts(tmp_path, texts, tokenizer="char", eval_fraction=0.2)
    train = documents_of(tokenized.train, tokenized)
    eval = documents_of(tokenized.eval, tokenized)
    assert sorted(train + eval) == sorted(texts)


# --- metadata


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


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
    folder = tmp_path / "tokenizer"
    tokenize_texts(tmp_path, TEXTS).tokenizer.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "code.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise RuntimeError('it was run')")
    rows = tokenize_texts(tmp_path, TEXTS, tokenizer=str(folder))
    assert documents_of(rows.train, rows) == TEXTS


# --- the cache


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"texts": [*numbered_documents(19), "another"]}, id="text"),
        pytest.param({"texts": numbered_documents(20)[::-1]}, id="order"),
        pytest.param({"tokenizer": "char"}, id="tokenizer"),
        pytest.param({"tokenizer": "bpe:258"}, id="vocabulary"),
        pytest.param({"block_size": BLOCK + 1}, id="block size"),
        pytest.param({"eval_fraction": 0.4}, id="eval fraction"),
        pytest.param({"columns": ["text=body"]}, id="text field"),
        pytest.param({"isolate_documents": True}, id="isolated documents"),
    ],
)
def test_a_change_of_the_text_or_a_setting_makes_new_rows(tmp_path, capsys, change):
    path = tmp_path / "corpus.jsonl"

    def make_rows(texts: list[str], block_size: int = BLOCK, **settings) -> bool:
        """Return whether they were in the cache."""
        write_records(path, [{"text": text, "body": f"{text} body"} for text in texts])
        settings = {"tokenizer": "bpe:257", "eval_fraction": 0.5, **settings}
        tokenized = tokenize(data_config(path, **settings), block_size)
        assert len(documents_of(tokenized.train, tokenized)) < len(texts)
        return is_from_cache(capsys)

    before = {"texts": numbered_documents(20)}
    assert not make_rows(**before)
    assert not make_rows(**before | change)
    assert make_rows(**before | change)


def test_files_that_are_not_read_are_counted_and_suffixes_of_text_make_new_rows(tmp_path, capsys):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ["a.md", "a.py", "b.py", "Makefile"]:
        (folder / name).write_text(f"the text of {name}")

    tokenize(data_config(folder), 4)
    about_files, _ = log_lines(capsys, "data")
    assert "3 files not read, such as Makefile; " in about_files

    for suffix in [".PY", "py"]:
        tokenized = tokenize(data_config(folder, text_suffixes=[suffix]), 4)
        assert "the text of b.py" in documents_of(tokenized.train, tokenized)


def test_a_moved_data_set_is_in_the_cache_and_has_its_new_name(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    capsys.readouterr()

    moved = (tmp_path / "corpus.jsonl").rename(tmp_path / "elsewhere.jsonl")
    data = data_config(moved, global_batch_size=7, per_device_train_batch_size=3)
    assert tokenize(data, BLOCK).metadata.dataset == str(moved)
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
    data = data_config(write_texts(tmp_path / "corpus.jsonl", TEXTS))
    make = prepare.SetMaker.make
    makers = []

    def slow_make(maker: prepare.SetMaker) -> int:
        makers.append(threading.get_ident())
        time.sleep(0.3)
        return make(maker)

    monkeypatch.setattr(prepare.SetMaker, "make", slow_make)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: tokenize(data, BLOCK), range(2))

    assert len(makers) == 1
    assert first.metadata == second.metadata
    assert stream_of(first.train) == stream_of(second.train)


# --- errors

LINES = b"words\n" * 9


@pytest.mark.parametrize(
    ("name", "content", "settings", "error"),
    [
        pytest.param("a.jsonl", b"", {}, "holds no text", id="no documents"),
        pytest.param("a.jsonl", b'{"text": ""}\n' * 3, {}, "holds no text", id="empty documents"),
        pytest.param(
            "a.jsonl",
            b'{"text": ""}\n{"text": "words"}\n',
            {"max_train_samples": 1},
            "raise --max_train_samples",
            id="no training text in the first records",
        ),
        pytest.param("a.txt", LINES, {"tokenizer": "bpe:256"}, "bpe:256", id="too few tokens"),
        pytest.param("a.txt", LINES, {"tokenizer": "char:8"}, "char:8", id="char with a size"),
        pytest.param("a.txt", LINES, {"tokenizer": "./absent"}, "./absent", id="no tokenizer"),
        pytest.param(
            "a.txt", b"words", {"eval_fraction": 0.99}, "lower --eval", id="no training text"
        ),
    ],
)
def test_bad_data_or_settings_are_an_error_of_one_line_and_leave_no_cache_entry(
    tmp_path, cache, name, content, settings, error
):
    path = tmp_path / name
    path.write_bytes(content)
    assert error in complaint(data_config(path, **settings), 1)
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
    long = tmp_path / "long.txt"
    long.write_text("words " * 60)
    short = tmp_path / "short.txt"
    short.write_text("words ")
    for size in (100, 8):
        error = complaint(data_config(long, short), size)
        assert error.startswith(f"--block_size {size} ")
        assert f"{short}); use at most 7" in error
    assert left_behind(cache) == []
    assert tokenize(data_config(long, short), 7).metadata.block_size == 7
