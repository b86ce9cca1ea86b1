"""Rows of one's own: checked, counted and hashed by their content, and drawn like any others."""

import datasets
import numpy as np
import pytest

from llmtrain.data import tokenizer as tok
from llmtrain.data.loader import IGNORED, train_loader
from llmtrain.data.prepare import Tokenized, tokenize
from llmtrain.errors import UserError
from tests.data.test_prepare import TEXTS, cache, config, write  # noqa: F401 - the cache is a fixture

TOKENIZER = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8)
IDS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
LABELS = [[IGNORED, 2, IGNORED, 4], [5, 6, 7, 8], [IGNORED] * 4]


def dataset(**columns: list) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


def test_rows_are_counted_by_their_trained_labels() -> None:
    text = "ü and 漢字"
    (ids,) = TOKENIZER([text])["input_ids"]
    width = len(ids) + 1
    train = dataset(
        input_ids=[[0] * width] * 3,
        labels=[[7] * width, [7] + [IGNORED] * len(ids), [IGNORED] * width],
    )
    rows = Tokenized.of(train, TOKENIZER, dataset(input_ids=[[0, *ids]]))
    facts = rows.metadata
    assert (facts.task, facts.block_size, facts.vocabulary) == ("text", len(ids), 257)
    assert rows.vocabulary == 257
    assert (facts.train_rows, facts.eval_rows, facts.records, facts.eval_records) == (
        3,
        1,
        4,
        1,
    )
    assert (facts.train_tokens, facts.eval_tokens) == (
        len(ids),
        len(ids),
    )  # a first label is never a target
    assert facts.eval_bytes == len(text.encode())
    assert (facts.tokenizer_sha256, facts.source_rows) == (tok.digest(TOKENIZER), [3])
    assert (rows.is_packed, rows.stop_token_ids, rows.in_order, rows.new_tokens) == (
        False,
        (),
        False,
        [],
    )


def test_without_held_out_rows_there_are_no_bytes() -> None:
    rows = Tokenized.of(dataset(input_ids=IDS), TOKENIZER, in_order=True)
    assert rows.eval is None
    assert rows.in_order
    assert (rows.metadata.eval_rows, rows.metadata.eval_tokens, rows.metadata.eval_bytes) == (
        0,
        0,
        0,
    )


def test_the_hash_is_of_the_content_and_not_of_how_it_is_stored() -> None:
    def sha256(train: datasets.Dataset, held_out: datasets.Dataset | None = None) -> str:
        return Tokenized.of(train, TOKENIZER, held_out).metadata.data_sha256

    plain = dataset(input_ids=IDS, labels=LABELS)
    column = datasets.Sequence(datasets.Value("int32"), length=4)
    features = datasets.Features(input_ids=column, labels=column)
    parts = datasets.concatenate_datasets(
        [plain.select([0]).flatten_indices(), plain.select([1, 2]).flatten_indices()]
    )
    for same in (
        plain.cast(features),
        parts,
        plain.with_format("numpy"),
        dataset(input_ids=IDS, labels=LABELS, n=IDS),
    ):
        assert sha256(same) == sha256(plain)
    others = [
        plain.select([1, 0, 2]),
        plain.select([0, 1]),
        dataset(input_ids=IDS),
        dataset(input_ids=IDS, labels=IDS),
        dataset(input_ids=IDS, labels=LABELS, position_ids=[[0, 1, 0, 1]] * 3),
    ]
    found = {sha256(plain), sha256(plain, plain), *map(sha256, others)}
    assert len(found) == 2 + len(others)


def test_a_selection_is_drawn_as_it_is_selected_and_in_order_where_one_asks() -> None:
    rows = Tokenized.of(
        dataset(input_ids=IDS, labels=LABELS).select([2, 0]), TOKENIZER, in_order=True
    )
    (local_batch,) = train_loader(rows.train, 2, 2, range(1), None if rows.in_order else 0)
    assert local_batch.rows.tolist() == [0, 1]
    assert local_batch.batches[0]["input_ids"].tolist() == [IDS[2], IDS[0]]
    assert local_batch.batches[0]["labels"].tolist() == [LABELS[2], LABELS[0]]
    assert [*rows.train] == [{"input_ids": IDS[i], "labels": LABELS[i]} for i in (2, 0)]


def test_tokenised_rows_are_rows_too(tmp_path) -> None:
    made = tokenize(config(write(tmp_path / "a.jsonl", TEXTS * 9), eval_fraction=0.3), 8)
    rows = Tokenized.of(made.train, made.tokenizer, made.eval)
    for name in (
        "block_size",
        "train_rows",
        "eval_rows",
        "train_tokens",
        "eval_tokens",
        "eval_bytes",
        "vocabulary",
    ):
        assert getattr(rows.metadata, name) == getattr(made.metadata, name)
    assert np.array_equal(rows.train[0]["input_ids"], made.train[0]["input_ids"])


@pytest.mark.parametrize(
    "columns",
    [
        {"input_ids": [[1, 2, 3], [1, 2]]},
        {"input_ids": [[1], [1, 2, 3], [1, 2]]},
        {"input_ids": IDS, "labels": [[1, 2, 3]] * 3},
        {"input_ids": [[1, 2], None]},
        {"input_ids": [[1, None], [1, 2]]},
        {"input_ids": [[1.5, 2.5]]},
        {"input_ids": ["some text"]},
        {"input_ids": [1, 2, 3]},
        {"input_ids": []},
        {"input_ids": [[]]},
        {"input_ids": [[1]]},
        {"text": ["some text"]},
        {"labels": IDS},
    ],
    ids=str,
)
def test_columns_that_are_no_rows_are_an_error_of_one_line(columns) -> None:
    good = dataset(input_ids=IDS)
    for given in ((dataset(**columns),), (good, dataset(**columns))):
        with pytest.raises(UserError, match="must be lists of integers, all of one length"):
            Tokenized.of(given[0], TOKENIZER, *given[1:])


def test_held_out_rows_of_another_length_are_an_error() -> None:
    with pytest.raises(UserError, match="all of one length"):
        Tokenized.of(dataset(input_ids=IDS), TOKENIZER, dataset(input_ids=[[1, 2, 3]]))


@pytest.mark.parametrize("name", ["input_ids", "labels"])
def test_a_token_that_the_tokenizer_does_not_have_is_an_error(name: str) -> None:
    columns = {"input_ids": IDS, "labels": LABELS} | {name: [[0, 1, 257, 2]] * 3}
    with pytest.raises(UserError, match=f"{name} holds 257; the tokenizer has 257 tokens"):
        Tokenized.of(dataset(**columns), TOKENIZER)
