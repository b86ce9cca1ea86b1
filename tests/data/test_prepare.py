"""Documents -> rows: no token is lost, doubled or moved, and a tokenizing is made once or not at all."""

import json
import random
import re
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from llmtrain.data import corpus as corpora
from llmtrain.data import file_sources, text_rows
from llmtrain.data import prepare as tokenizing
from llmtrain.data import tokenizer as tok
from llmtrain.data.config import DataConfig
from llmtrain.data.loader import IGNORED
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.data.store import TOKEN_COLUMNS
from llmtrain.errors import UserError
from tests.launching import PYTHON, run

BLOCK = 8
TEXTS = [
    "plain words, and some more.",
    "ünï 漢字 🙂👩‍👩‍👧 e\u0301",
    "lines\nof\r\na text\n\n\t  with   runs of    spaces \n",
    "a literal <|endoftext|> is text",
    "",
    "x",
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("LLMTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


def config(path: Path, **settings) -> DataConfig:
    return DataConfig(
        **{"dataset": [str(path)], "tokenizer": "byte", "eval_fraction": 0.0} | settings
    )


def tokenize_texts(
    folder: Path, texts: list[str], block_size: int = BLOCK, **settings
) -> Tokenized:
    return tokenize(config(write(folder / "corpus.jsonl", texts), **settings), block_size)


def stream(rows: Iterable[dict] | None) -> list[int]:
    """The tokens that the rows were cut from; checks the overlap and the tail."""
    if rows is None:
        return []
    table = np.array([row["input_ids"] for row in rows])
    assert np.array_equal(table[:-1, -1], table[1:, 0])
    joined = np.append(table[0, 0], table[:, 1:])
    tokens = joined[joined != IGNORED]
    assert np.array_equal(joined[: len(tokens)], tokens), "a hole that is not at the end"
    assert len(joined) - len(tokens) < table.shape[1] - 1, "a row without a target"
    return tokens.tolist()


def documents_of(rows: Iterable[dict] | None, made: Tokenized) -> list[str]:
    end = made.tokenizer.eos_token_id
    tokens = stream(rows)
    if not tokens:
        return []
    assert tokens[0] == tokens[-1] == end
    ends = [i for i, token in enumerate(tokens) if token == end]
    return [made.tokenizer.decode(tokens[a + 1 : b]) for a, b in pairwise(ends)]


def uncut(texts: list[str], made: Tokenized) -> list[int]:
    """The stream, each document tokenised whole."""
    backend = made.tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    end = made.tokenizer.eos_token_id
    encoded = (backend.encode(text, add_special_tokens=False).ids for text in texts)
    return [end, *(token for ids in encoded for token in [*ids, end])]


def complaint(*arguments, **options) -> str:
    with pytest.raises(UserError) as caught:
        tokenize(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in cache.rglob("*") if path.suffix != ".lock"]


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:300"])
@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_every_token_but_the_first_is_a_target_exactly_once(tmp_path, tokenizer, block_size):
    made = tokenize_texts(tmp_path, TEXTS, block_size, tokenizer=tokenizer)
    tokens = stream(made.train)
    assert tokens == uncut(TEXTS, made)
    targets = np.array(made.train.dataset[:]["input_ids"])[:, 1:]
    assert (targets != IGNORED).sum() == len(tokens) - 1 == made.metadata.train_tokens
    assert targets.shape == (made.metadata.train_rows, block_size)
    assert made.metadata.train_rows == -(-made.metadata.train_tokens // block_size)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:300"])
def test_documents_come_back_exactly_and_in_their_order(tmp_path, tokenizer):
    made = tokenize_texts(tmp_path, TEXTS, tokenizer=tokenizer)
    assert documents_of(made.train, made) == TEXTS
    assert stream(made.train).count(made.tokenizer.eos_token_id) == len(TEXTS) + 1


def test_byte_tokens_are_the_bytes(tmp_path):
    made = tokenize_texts(tmp_path, ["abca", "b"], block_size=3)
    a, b, c = (made.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    assert stream(made.train) == [0, a, b, c, a, 0, b, 0]
    assert np.array(made.train.dataset[:]["input_ids"]).dtype.kind == "i"


@pytest.mark.parametrize("rows_per_batch", [1, 2, 5, 1024])
@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_rows_are_the_same_however_the_stream_arrives(
    tmp_path, monkeypatch, rows_per_batch, block_size
):
    monkeypatch.setattr(text_rows, "TOKENS_PER_BATCH", rows_per_batch * block_size)
    random_numbers = random.Random(0)
    for length in [*range(0, 20), 24, 25, 26, 200]:
        tokens = [random_numbers.randrange(1, 60_000) for _ in range(length)]
        pieces, start = [], 0
        while start < length:
            size = random_numbers.choice([0, 1, 2, 9, 40])
            piece = np.array(tokens[start : start + size], np.int32)
            pieces.append(text_rows.Piece(piece, begins_document=random_numbers.random() < 0.5))
            start += size
        path = tmp_path / f"{length}.arrow"
        written = text_rows.write_stream(path, iter(pieces), block_size, ["input_ids"])
        assert written.targets == max(length - 1, 0)
        assert written.rows == -(-max(length - 1, 0) // block_size)
        if written.rows:
            assert stream(datasets.Dataset.from_file(str(path))) == tokens
        one_piece = [text_rows.Piece(np.array(tokens, np.int32))]
        again = text_rows.write_stream(path, iter(one_piece), block_size, ["input_ids"])
        assert again == written

        isolated = text_rows.write_stream(path, iter(pieces), block_size, TOKEN_COLUMNS)
        assert isolated[:2] == written[:2]
        if written.rows:
            rows = datasets.Dataset.from_file(str(path))
            assert stream(rows) == tokens
            assert rows["labels"][:] == rows["input_ids"][:]
            begins = [False for _ in range(length)]
            start = 0
            for piece in pieces:
                if piece.begins_document and len(piece):
                    begins[start] = True
                start += len(piece)
            assert joined_positions(rows) == positions_of(begins, block_size)


def joined_positions(rows: datasets.Dataset) -> list[int]:
    """The position ids of all inputs, without padding: the last token of each row is no input."""
    table = np.array(rows["position_ids"])[:, :-1].ravel()
    tokens = np.array(rows["input_ids"])[:, :-1].ravel()
    return table[tokens != IGNORED].tolist()


def positions_of(begins: list[bool], block_size: int) -> list[int]:
    """The position id of each input, given which tokens of the stream begin a document."""
    positions, position = [], 0
    for i, begin in enumerate(begins):
        position = 0 if begin or i % block_size == 0 else position + 1
        positions.append(position)
    is_last_of_a_row = (len(begins) - 1) % block_size == 0  # then the last token is no input
    return positions[:-1] if is_last_of_a_row else positions


# --- documents that do not see each other

E = 0  # end-of-text of the tokenizer ``byte``


def isolated(folder: Path, texts: list[str], block_size: int, **settings) -> Tokenized:
    return tokenize_texts(folder, texts, block_size, isolate_documents=True, **settings)


def test_positions_restart_at_the_end_of_text_in_front_of_a_document(tmp_path):
    made = isolated(tmp_path, ["ab", "", "c"], block_size=4)
    first, second = made.train
    a, b, c = (made.tokenizer.convert_tokens_to_ids(letter) for letter in "abc")
    assert first == {"input_ids": [E, a, b, E, E], "position_ids": [0, 1, 2, 0, 0]}
    assert second == {"input_ids": [E, c, E, IGNORED, IGNORED], "position_ids": [0, 1, 2, 0, 1]}
    assert made.is_packed


def test_positions_restart_at_the_border_of_a_row(tmp_path):
    made = isolated(tmp_path, ["abcdef", "g"], block_size=3)
    assert [row["position_ids"] for row in made.train] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 1, 2]]


@pytest.mark.parametrize("block_size", [1, 2, 7, 64])
def test_isolated_documents_have_the_rows_of_sequences_that_see_each_other(tmp_path, block_size):
    usual = tokenize_texts(tmp_path, TEXTS, block_size)
    made = isolated(tmp_path, TEXTS, block_size)
    assert made.train.dataset["input_ids"][:] == usual.train.dataset["input_ids"][:]
    assert made.train.column_names == ["input_ids", "position_ids"]
    assert made.metadata.train_tokens == usual.metadata.train_tokens == len(stream(made.train)) - 1


def test_isolated_documents_are_other_data_and_are_found_again(tmp_path, capsys):
    usual = tokenize_texts(tmp_path, TEXTS)
    first = isolated(tmp_path, TEXTS, BLOCK)
    assert capsys.readouterr().out.count("; tokenised") == 2
    assert first.metadata.data_sha256 != usual.metadata.data_sha256
    again = isolated(tmp_path, TEXTS, BLOCK)
    assert capsys.readouterr().out.endswith("; from the cache\n")
    assert again.metadata == first.metadata


@pytest.fixture(scope="module")
def long_text() -> str:
    random_numbers = random.Random(1)
    words = [
        "word",
        "it's",
        "n't",
        "x",
        "漢字",
        "ünï",
        "🙂",
        "12",
        "...",
        "!?",
        "<|endoftext|>",
        "e\u0301",
        "a_b",
    ]
    gaps = [
        " ",
        " ",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\n\n  ",
        "\t",
        "",
        "\u3000",
        "\u00a0",
        "\x85",
        "\u2028",
        "\u200b",
    ]
    return "".join(random_numbers.choice(words) + random_numbers.choice(gaps) for _ in range(1500))


def cut_every(monkeypatch, piece: int, batch: int) -> None:
    monkeypatch.setattr(corpora, "_SEGMENT_CHARACTERS", piece)
    monkeypatch.setattr(corpora, "_ENCODE_CHARACTERS", batch)


@pytest.mark.parametrize("tokenizer", ["char", "byte", "bpe:400"])
@pytest.mark.parametrize("sizes", [(1, 1), (7, 11), (100, 10_000)])
def test_a_document_cut_into_pieces_gives_the_tokens_of_the_uncut_one(
    monkeypatch, tmp_path, long_text, tokenizer, sizes
):
    cut_every(monkeypatch, *sizes)
    texts = [long_text, "short", "", long_text[:50]]
    made = tokenize_texts(tmp_path, texts, tokenizer=tokenizer)
    assert stream(made.train) == uncut(texts, made)
    assert documents_of(made.train, made) == texts


@pytest.mark.parametrize("separator", ["\x1c", "\x1d", "\x1e", "\x1f"])
def test_an_ascii_separator_that_only_python_takes_for_white_space_is_no_place_to_cut(
    monkeypatch, tmp_path, separator
):
    texts = [f"ab! {f'!{separator}' * 20}\n" * 20]
    cut_every(monkeypatch, 7, 1000)
    made = tokenize_texts(tmp_path, texts, tokenizer="bpe:300")
    assert stream(made.train) == uncut(texts, made)


def test_the_test_of_cutting_can_fail(monkeypatch, tmp_path, long_text):

    def cut_anywhere(text: str) -> Iterator[corpora._Segment]:
        for start in range(0, len(text), 7):
            is_last = start + 7 >= len(text)
            yield corpora._Segment(text[start : start + 7], is_first=start == 0, is_last=is_last)

    monkeypatch.setattr(corpora, "_segments_of", cut_anywhere)
    made = tokenize_texts(tmp_path, [long_text], tokenizer="bpe:400")
    assert stream(made.train) != uncut([long_text], made)


@pytest.mark.parametrize("piece", [1, 3, 50, 10**6])
def test_pieces_join_to_the_text_and_are_not_much_longer_than_asked(monkeypatch, long_text, piece):
    monkeypatch.setattr(corpora, "_SEGMENT_CHARACTERS", piece)
    for text in [long_text, "", "x", " ", "no-white-space-at-all" * 9, "   ", " lead", "trail "]:
        segments = [*corpora._segments_of(text)]
        assert "".join(segment.text for segment in segments) == text
        assert [segment.is_first for segment in segments] == [True, *[False] * (len(segments) - 1)]
        assert [segment.is_last for segment in segments] == [*[False] * (len(segments) - 1), True]
    longest = max(len(word) for word in re.findall(r"\S*\s*", long_text))
    assert max(map(len, corpora._segments_of(long_text))) <= piece + longest


def some_documents(count: int) -> list[str]:
    return [f"document {i} says {i * i}" for i in range(count)]


def split_of(folder: Path, texts: list[str], fraction: float) -> tuple[list[str], list[str]]:
    made = tokenize_texts(folder, texts, block_size=4, eval_fraction=fraction)
    train, held_out = documents_of(made.train, made), documents_of(made.eval, made)
    assert made.metadata.eval_bytes == sum(len(text.encode()) for text in held_out)
    assert made.metadata.eval_records == len(held_out)
    assert made.metadata.records == len(texts)
    return train, held_out


@pytest.mark.parametrize("fraction", [0.05, 0.3, 0.7])
def test_every_document_is_either_trained_on_or_held_out(tmp_path, fraction):
    texts = some_documents(400)
    train, held_out = split_of(tmp_path, texts, fraction)
    assert sorted(train + held_out) == sorted(texts)
    assert train == [text for text in texts if text in set(train)]
    assert held_out == [text for text in texts if text in set(held_out)]
    assert abs(len(held_out) / 400 - fraction) < 0.08


def test_held_out_documents_never_move_when_documents_are_added(tmp_path):
    texts = some_documents(300)
    train, held_out = split_of(tmp_path, texts[:100], 0.1)
    assert held_out
    more_train, more_held_out = split_of(tmp_path, texts[200:] + texts[:200][::-1], 0.1)
    assert set(held_out) < set(more_held_out)
    assert set(train) < set(more_train)


def test_a_larger_fraction_holds_out_the_same_documents_and_more(tmp_path):
    texts = some_documents(200)
    assert set(split_of(tmp_path, texts, 0.1)[1]) < set(split_of(tmp_path, texts, 0.3)[1])


def test_a_document_and_its_copy_are_on_the_same_side(tmp_path):
    train, held_out = split_of(tmp_path, some_documents(100) * 2, 0.3)
    assert held_out
    assert not set(train) & set(held_out)


@pytest.mark.parametrize("count", [2, 3, 10])
def test_where_no_document_falls_under_the_fraction_the_last_part_of_the_longest_is_held_out(
    tmp_path, count
):
    longest = "the longest document of all: " + "words and words " * 10
    texts = [*some_documents(count - 1), longest]
    train, (held_out,) = split_of(tmp_path, texts, 1e-3)
    assert longest.endswith(held_out)
    assert train == [*texts[:-1], longest.removesuffix(held_out)]
    assert split_of(tmp_path, texts[::-1], 1e-3)[1] == [held_out]


def test_one_large_document_and_an_empty_or_a_small_one_leave_text_to_train_on(tmp_path):
    large = "some words, and more of them\n" * 300
    for other in ("", "small"):
        for texts in ([large, other], [other, large]):
            train, held_out = split_of(tmp_path, texts, 0.05)
            assert sum(map(len, train)) > 0.9 * len(large)
            assert 0 < sum(map(len, held_out)) < 0.1 * len(large)


@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.001])
def test_of_a_single_document_the_last_part_is_held_out(tmp_path, fraction):
    text = "".join(chr(0x4E00 + i) if i % 3 else "\n" for i in range(200))
    train, held_out = split_of(tmp_path, [text], fraction)
    assert len(train) == len(held_out) == 1
    assert train[0] + held_out[0] == text
    assert abs(len(held_out[0]) - 200 * fraction) <= 1
    assert held_out[0]


@pytest.mark.parametrize(
    "texts", [["one document of some words"], some_documents(20)], ids=["one", "many"]
)
def test_without_a_fraction_nothing_is_held_out(tmp_path, texts):
    made = tokenize_texts(tmp_path, texts)
    assert made.eval is None
    assert documents_of(made.train, made) == texts
    facts = made.metadata
    assert (facts.eval_records, facts.eval_tokens, facts.eval_rows, facts.eval_bytes) == (
        0,
        0,
        0,
        0,
    )


def test_held_out_characters_are_in_the_alphabet(tmp_path):
    texts = [*some_documents(50), *(f"held out perhaps: {chr(0x4E00 + i)}" for i in range(200))]
    made = tokenize_texts(tmp_path, texts, tokenizer="char", eval_fraction=0.2)
    assert sorted(documents_of(made.train, made) + documents_of(made.eval, made)) == sorted(texts)


def test_facts_tell_what_was_tokenised(tmp_path):
    texts = some_documents(100)
    made = tokenize_texts(tmp_path, texts, tokenizer="bpe:300", eval_fraction=0.2)
    facts = made.metadata
    assert facts.dataset == str(tmp_path / "corpus.jsonl")
    assert (facts.tokenizer, facts.vocabulary, facts.block_size) == ("bpe:300", 300, BLOCK)
    assert facts.tokenizer_sha256 == tok.digest(made.tokenizer)
    assert (facts.train_rows, facts.eval_rows) == (len(made.train), len(made.eval))
    assert (facts.train_tokens, facts.eval_tokens) == (
        len(stream(made.train)) - 1,
        len(stream(made.eval)) - 1,
    )
    assert all(len(digest) == 64 for digest in (facts.tokenizer_sha256, facts.data_sha256))


def test_the_data_hash_is_of_the_tokens_and_their_split(tmp_path):
    texts = some_documents(50)
    before = tokenize_texts(tmp_path, texts, eval_fraction=0.2).metadata.data_sha256
    assert (
        tokenize_texts(tmp_path, texts, eval_fraction=0.2, block_size=5).metadata.data_sha256
        == before
    )
    assert tokenize_texts(tmp_path, texts, eval_fraction=0.5).metadata.data_sha256 != before
    assert tokenize_texts(tmp_path, texts[::-1], eval_fraction=0.2).metadata.data_sha256 != before
    assert (
        tokenize_texts(tmp_path, texts, eval_fraction=0.2, tokenizer="char").metadata.data_sha256
        != before
    )


def test_a_tokenizer_that_was_saved_makes_the_rows_of_the_one_that_was_trained(tmp_path, long_text):
    texts = [long_text, "short <|endoftext|>"]
    trained = tokenize_texts(tmp_path, texts, tokenizer="bpe:300")
    trained.tokenizer.backend_tokenizer.enable_truncation(5)
    trained.tokenizer.backend_tokenizer.enable_padding(length=9)
    trained.tokenizer.save_pretrained(tmp_path / "tokenizer")
    loaded = tokenize_texts(tmp_path, texts, tokenizer=str(tmp_path / "tokenizer"))
    assert stream(loaded.train) == stream(trained.train)
    assert loaded.metadata.data_sha256 == trained.metadata.data_sha256


def test_only_the_first_process_speaks(tmp_path, monkeypatch, capsys):
    tokenize_texts(tmp_path, TEXTS)
    out = capsys.readouterr().out
    assert out.startswith("data ")
    assert out.count("\n") == 1
    monkeypatch.setenv("RANK", "1")
    tokenize_texts(tmp_path, TEXTS)
    assert capsys.readouterr().out == ""


def test_what_was_tokenised_is_found_again_without_reading_the_text(tmp_path, monkeypatch, capsys):
    first = tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert capsys.readouterr().out.endswith("; tokenised\n")

    def unread(paths, field):
        raise AssertionError("the text was read again")

    monkeypatch.setattr(file_sources, "_read_files", unread)
    second = tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert capsys.readouterr().out.endswith("; from the cache\n")
    assert second.metadata == first.metadata
    assert stream(second.train) == stream(first.train)
    assert stream(second.eval) == stream(first.eval)
    with pytest.raises(AssertionError, match="read again"):
        tokenize_texts(tmp_path, [*TEXTS, "new"], eval_fraction=0.3)


FOUND = """
import sys
from llmtrain import DataConfig
from llmtrain.data.loader import train_loader
from llmtrain.data.prepare import tokenize
rows = tokenize(DataConfig(dataset=[sys.argv[1]], tokenizer="byte", eval_fraction=0.0), int(sys.argv[2]))
next(iter(train_loader(rows.train, 2, 2, range(3), seed=0)))
print({"datasets", "pandas"} & {*sys.modules})
"""


def test_rows_that_are_found_are_read_without_what_imports_slowly(tmp_path):
    tokenize_texts(tmp_path, TEXTS)
    found = run([*PYTHON, "-c", FOUND, str(tmp_path / "corpus.jsonl"), str(BLOCK)]).assert_ok()
    assert found.out.splitlines()[-1] == "set()"
    assert "from the cache" in found.out


def test_a_change_of_anything_that_shapes_the_rows_makes_new_ones(tmp_path, capsys):
    path = tmp_path / "corpus.jsonl"
    usual = some_documents(20)

    def said(texts: list[str] = usual, block_size: int = BLOCK, **settings) -> str:
        path.write_text(
            "".join(json.dumps({"text": text, "body": text + " body"}) + "\n" for text in texts)
        )
        made = tokenize(config(path, **{"eval_fraction": 0.5} | settings), block_size)
        suffix = " body" if settings.get("text_field") == "body" else ""
        found = documents_of(made.train, made) + documents_of(made.eval, made)
        assert sorted(found) == sorted(text + suffix for text in texts)
        assert made.metadata.block_size == block_size
        return capsys.readouterr().out.rpartition("; ")[2].strip()

    variants = [
        {},
        {"texts": [*usual[:-1], usual[-1] + "!"]},
        {"texts": usual[::-1]},
        {"tokenizer": "char"},
        {"tokenizer": "bpe:257"},
        {"tokenizer": "bpe:258"},
        {"block_size": BLOCK + 1},
        {"eval_fraction": 0.4},
        {"text_field": "body"},
    ]
    assert [said(**variant) for variant in variants] == ["tokenised"] * len(variants)
    assert [said(**variant) for variant in variants] == ["from the cache"] * len(variants)


def test_settings_that_do_not_shape_the_rows_find_the_same_ones(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    tokenize_texts(tmp_path, TEXTS, global_batch_size=7, per_device_train_batch_size=3)
    assert "from the cache" in capsys.readouterr().out


def test_a_moved_data_set_is_the_same_data_set(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    moved = (tmp_path / "corpus.jsonl").rename(tmp_path / "elsewhere.jsonl")
    tokenize(config(moved), BLOCK)
    assert capsys.readouterr().out.endswith("from the cache\n")


def test_a_moved_data_set_is_called_by_its_new_name(tmp_path, capsys):
    tokenize_texts(tmp_path, TEXTS)
    capsys.readouterr()
    moved = (tmp_path / "corpus.jsonl").rename(tmp_path / "elsewhere.jsonl")
    assert tokenize(config(moved), BLOCK).metadata.dataset == str(moved)
    assert "elsewhere.jsonl" in capsys.readouterr().out


def test_another_tokenizer_in_the_same_folder_makes_new_rows(tmp_path, capsys):
    folder = tmp_path / "tokenizer"
    for train in (["aaaa bbbb " * 20], ["cccc dddd " * 20]):
        trained = tok.train_tokenizer("bpe:260", iter(train), lambda: iter(()))
        tok.as_pretrained(trained, 8).save_pretrained(folder)
        tokenize_texts(tmp_path, ["aaaa bbbb cccc dddd"], tokenizer=str(folder))
        assert capsys.readouterr().out.endswith("; tokenised\n")
    tokenize_texts(
        tmp_path, ["aaaa bbbb cccc dddd"], tokenizer=str(folder.rename(tmp_path / "moved"))
    )
    assert capsys.readouterr().out.endswith("from the cache\n")


def test_two_that_tokenise_at_once_make_the_rows_once(tmp_path, monkeypatch):
    made, make, start = [], tokenizing._make, threading.Barrier(2)

    def slow_make(*arguments, **options):
        made.append(threading.get_ident())
        time.sleep(0.3)
        make(*arguments, **options)

    monkeypatch.setattr(tokenizing, "_make", slow_make)
    path = write(tmp_path / "corpus.jsonl", TEXTS)

    def tokenize_together(_: int) -> Tokenized:
        start.wait(timeout=30)
        return tokenize(config(path), BLOCK)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tokenize_together, range(2))
    assert len(made) == 1
    assert first.metadata == second.metadata
    assert stream(first.train) == stream(second.train)


BAD = {
    "no documents": ("a.jsonl", b"", {}, 8, "holds no text"),
    "empty documents": ("a.jsonl", b'{"text": ""}\n' * 3, {}, 8, "holds no text"),
    "empty file": ("a.txt", b"", {}, 8, "holds no text"),
    "a broken line": (
        "a.jsonl",
        b'{"text": "' + b"words " * 9 + b'"}\noops\n',
        {},
        8,
        "a.jsonl, line 2",
    ),
    "not utf-8": ("a.txt", b"words\n" * 9 + b"\xff", {}, 8, "a.txt, line 10"),
    "half a surrogate": ("a.jsonl", b'{"text": "a\\ud800"}\n', {}, 8, "a.jsonl, line 1"),
    "no such field": (
        "a.csv",
        b"id,text\n1,words\n",
        {"text_field": "body"},
        8,
        "a.csv, line 2: no field 'body'",
    ),
    "no parquet": ("a.parquet", b"words", {}, 8, "a.parquet"),
    "a block too large": ("a.txt", b"words", {}, 100, "--block_size 100 is larger"),
    "everything held out": (
        "a.jsonl",
        b'{"text": "words"}\n{"text": "more"}\n',
        {"eval_fraction": 0.9999},
        1,
        "lower it",
    ),
    "all of one document held out": ("a.txt", b"words", {"eval_fraction": 0.99}, 1, "lower it"),
    "a size of bpe": ("a.txt", b"words" * 9, {"tokenizer": "bpe:256"}, 8, "257"),
    "no size of bpe": ("a.txt", b"words" * 9, {"tokenizer": "bpe"}, 8, "bpe:N"),
    "a size of char": ("a.txt", b"words" * 9, {"tokenizer": "char:8"}, 8, "takes no size"),
    "no such tokenizer": (
        "a.txt",
        b"words" * 9,
        {"tokenizer": "./absent"},
        8,
        "./absent: no tokenizer can be loaded",
    ),
}


@pytest.mark.parametrize("case", BAD.values(), ids=BAD)
def test_a_failed_tokenising_is_one_line_and_leaves_nothing_behind(tmp_path, cache, case):
    name, content, settings, block_size, said = case
    path = tmp_path / name
    path.write_bytes(content)
    assert said in complaint(config(path, **settings), block_size)
    assert left_behind(cache) == []


def test_a_disk_that_fills_leaves_nothing_behind_and_the_next_try_succeeds(
    tmp_path, cache, monkeypatch
):
    write_stream, calls = corpora.write_stream, []

    def full_disk(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return write_stream(*arguments, **options)

    monkeypatch.setattr(corpora, "write_stream", full_disk)
    with pytest.raises(UserError, match="No space left on device; set LLMTRAIN_CACHE"):
        tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3)
    assert left_behind(cache) == []
    assert tokenize_texts(tmp_path, TEXTS, eval_fraction=0.3).metadata.records == len(TEXTS)


def test_a_block_that_is_too_large_is_answered_with_one_that_fits(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("some words")
    fits = int(re.search(r"use at most (\d+)", complaint(config(path), 100))[1])
    assert tokenize(config(path), fits).metadata.block_size == fits
    assert "is larger" in complaint(config(path), fits + 2)


def test_the_text_that_is_shorter_than_a_row_is_named(tmp_path):
    for name, count in (("long", 60), ("short", 1)):
        (tmp_path / f"{name}.txt").write_text("words " * count)
    paths = [tmp_path / "long.txt", tmp_path / "short.txt"]
    data = DataConfig(dataset=list(map(str, paths)), tokenizer="byte", eval_fraction=0.0)
    assert f"(8 tokens of {paths[1]}); use at most 7" in complaint(data, 100)


def test_a_data_set_that_was_mended_is_tokenised(tmp_path):
    path = write(tmp_path / "a.jsonl", TEXTS)
    good = path.read_text()
    path.write_text(good + "oops\n")
    assert "line 7" in complaint(config(path), BLOCK)
    path.write_text(good)
    made = tokenize(config(path), BLOCK)
    assert documents_of(made.train, made) == TEXTS


def test_a_hub_dataset_is_tokenised_and_found_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf-cache")
    (tmp_path / "corpus").mkdir()
    write(tmp_path / "corpus" / "train.jsonl", TEXTS)
    for done in ("tokenised", "from the cache"):
        made = tokenize(config(tmp_path / "corpus", dataset_train_split="train"), BLOCK)
        assert documents_of(made.train, made) == TEXTS
        assert capsys.readouterr().out.endswith(f"; {done}\n")


def test_a_tokenizer_that_begins_every_text_with_bos_has_it_before_every_document(tmp_path):
    words = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), BLOCK)
    words.add_special_tokens({"bos_token": "<s>"})
    begin, end = words.bos_token_id, words.eos_token_id
    words.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    words.save_pretrained(tmp_path / "words")
    made = tokenize_texts(tmp_path, ["ab", "<s> is text"], tokenizer=str(tmp_path / "words"))
    tokens = stream(made.train)
    assert [tokens[0], tokens[-1]] == [begin, end]
    assert tokens.count(begin) == tokens.count(end) == 2
    assert made.tokenizer.decode(tokens) == "<s>ab<|endoftext|><s><s> is text<|endoftext|>"

    # Such a document begins with BOS, and holds the end-of-text token after it.
    made = isolated(tmp_path, ["ab", "c"], 6, tokenizer=str(tmp_path / "words"))
    (row,) = made.train
    assert made.tokenizer.decode(row["input_ids"]) == "<s>ab<|endoftext|><s>c<|endoftext|>"
    assert row["position_ids"] == [0, 1, 2, 3, 0, 1, 2]
