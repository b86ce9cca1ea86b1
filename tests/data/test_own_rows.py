"""Rows that a recipe makes itself: ``Tokenized.of`` checks, counts and hashes them."""

from pathlib import Path
from typing import Any

import datasets
import pytest

from llmtrain.data import tokenizer as tok
from llmtrain.data.loader import IGNORED, train_loader
from llmtrain.data.tokenized import Tokenized
from llmtrain.errors import UserError
from llmtrain.training.rows import tokenize
from tests.data.preparation import TEXTS, data_config, write_texts

pytestmark = pytest.mark.usefixtures("cache")

TOKENIZER = tok.as_pretrained(tok.train_tokenizer("byte", TEXTS, lambda: iter(TEXTS)), 8)
IDS = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
LABELS = [[IGNORED, 2, IGNORED, 4], [5, 6, 7, 8], [IGNORED] * 4]


def dataset(**columns: list) -> datasets.Dataset:
    return datasets.Dataset.from_dict(columns)


PLAIN = dataset(input_ids=IDS, labels=LABELS)


# --- counts


def test_rows_are_described_by_their_columns_and_the_tokenizer() -> None:
    rows = Tokenized.of(PLAIN, TOKENIZER, PLAIN)

    metadata = rows.metadata
    assert metadata.task == "text"
    assert metadata.block_size == 3  # the last token predicts nothing
    assert rows.vocabulary == metadata.vocabulary == len(TOKENIZER)
    assert metadata.tokenizer_sha256 == tok.digest(TOKENIZER)
    assert metadata.train_rows == metadata.eval_rows == 3
    assert metadata.source_rows == [3]
    assert (metadata.records, metadata.eval_records) == (6, 3)
    assert not rows.is_packed
    assert not rows.in_order
    assert rows.stop_token_ids == ()
    assert rows.new_tokens == []


def test_target_tokens_are_the_labels_but_not_the_first_of_a_row() -> None:
    """Nothing predicts the first token of a row."""
    rows = Tokenized.of(PLAIN, TOKENIZER, dataset(input_ids=IDS, labels=IDS))

    assert rows.metadata.train_tokens == 2 + 3 + 0
    assert rows.metadata.eval_tokens == 3 * 3
    assert Tokenized.of(PLAIN, TOKENIZER).metadata.eval_tokens == 0


def test_rows_that_were_tokenised_have_the_same_counts_as_own_rows(tmp_path: Path) -> None:
    path = write_texts(tmp_path / "a.jsonl", TEXTS * 9)
    tokenized = tokenize(data_config(path, eval_fraction=0.3), 8)

    rows = Tokenized.of(tokenized.train, tokenized.tokenizer, tokenized.eval)

    assert tokenized.metadata.eval_bytes > 0
    for name in ("block_size", "train_rows", "eval_rows", "train_tokens", "eval_tokens"):
        assert getattr(rows.metadata, name) == getattr(tokenized.metadata, name)
    assert rows.metadata.eval_bytes == tokenized.metadata.eval_bytes
    assert rows.metadata.vocabulary == tokenized.metadata.vocabulary
    assert rows.train[0]["input_ids"] == tokenized.train[0]["input_ids"]


# --- the data hash


def data_hash(train: datasets.Dataset, eval: datasets.Dataset | None = None) -> str:
    return Tokenized.of(train, TOKENIZER, eval).metadata.data_sha256


INT32 = datasets.Sequence(datasets.Value("int32"), length=4)
FIRST_ROW = PLAIN.select([0]).flatten_indices()
OTHER_ROWS = PLAIN.select([1, 2]).flatten_indices()


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(PLAIN.cast(datasets.Features(input_ids=INT32, labels=INT32)), id="int32"),
        pytest.param(datasets.concatenate_datasets([FIRST_ROW, OTHER_ROWS]), id="two-parts"),
        pytest.param(PLAIN.with_format("numpy"), id="numpy"),
        pytest.param(dataset(input_ids=IDS, labels=LABELS, n=IDS), id="unread-column"),
    ],
)
def test_the_data_hash_does_not_depend_on_how_rows_are_stored(rows) -> None:
    assert data_hash(rows) == data_hash(PLAIN)


def test_the_data_hash_depends_on_the_content_of_the_rows() -> None:
    positions = [[0, 1, 0, 1]] * 3
    hashes = {
        "plain": data_hash(PLAIN),
        "with eval rows": data_hash(PLAIN, PLAIN),
        "another order": data_hash(PLAIN.select([1, 0, 2])),
        "fewer rows": data_hash(PLAIN.select([0, 1])),
        "no labels": data_hash(dataset(input_ids=IDS)),
        "other labels": data_hash(dataset(input_ids=IDS, labels=IDS)),
        "positions": data_hash(dataset(input_ids=IDS, labels=LABELS, position_ids=positions)),
    }

    assert len(set(hashes.values())) == len(hashes), hashes


# --- training on them


def test_a_selection_keeps_its_order_if_rows_are_drawn_in_order() -> None:
    selection = PLAIN.select([2, 0])

    rows = Tokenized.of(selection, TOKENIZER, in_order=True)

    assert rows.in_order
    assert [*rows.train] == [
        {"input_ids": IDS[2], "labels": LABELS[2]},
        {"input_ids": IDS[0], "labels": LABELS[0]},
    ]
    loader = train_loader(rows.train, global_batch_size=2, micro_batch=2, steps=range(1), seed=None)
    (global_batch,) = loader
    assert global_batch.rows.tolist() == [0, 1]
    (micro_batch,) = global_batch.batches
    assert micro_batch["input_ids"].tolist() == [IDS[2], IDS[0]]
    assert micro_batch["labels"].tolist() == [LABELS[2], LABELS[0]]


# --- rows that are refused


def refuse(*arguments: Any) -> str:
    """Return the message, of one line, with which rows are refused."""
    with pytest.raises(UserError) as refused:
        Tokenized.of(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"input_ids": [[1], [1, 2, 3], [1, 2]]}, id="two-lengths-with-an-even-mean"),
        pytest.param({"input_ids": IDS, "labels": [[1, 2, 3]] * 3}, id="labels-of-another-length"),
        pytest.param({"input_ids": [[1, None], [1, 2]]}, id="null-token"),
        pytest.param({"input_ids": [[1.5, 2.5]]}, id="fractions"),
        pytest.param({"input_ids": [1, 2, 3]}, id="no-lists"),
        pytest.param({"input_ids": []}, id="no-rows"),
        pytest.param({"input_ids": [[1]]}, id="nothing-to-predict"),
        pytest.param({"labels": IDS}, id="only-labels"),
        pytest.param({"input_ids": [[0, 1, 257, 2]] * 3}, id="token-of-no-tokenizer"),
        pytest.param({"input_ids": IDS, "labels": [[0, 1, 257, 2]] * 3}, id="label-of-no-token"),
        pytest.param({"input_ids": [[0, 1, -1, 2]] * 3}, id="negative-token"),
        pytest.param({"input_ids": IDS, "labels": [[0, 1, -101, 2]] * 3}, id="negative-label"),
    ],
)
def test_columns_that_are_no_rows_are_refused(columns: dict[str, list]) -> None:
    refuse(dataset(**columns), TOKENIZER)
    refuse(dataset(input_ids=IDS), TOKENIZER, dataset(**columns))


def test_negative_numbers_are_refused_without_a_tokenizer() -> None:
    assert "input_ids holds negative" in refuse(dataset(input_ids=[[0, -1]]), None)
    assert "labels holds negative" in refuse(dataset(input_ids=[[0, 1]], labels=[[0, -1]]), None)


def test_eval_rows_of_another_length_are_refused() -> None:
    refuse(dataset(input_ids=IDS), TOKENIZER, dataset(input_ids=[[1, 2, 3]]))


@pytest.mark.parametrize("name", ["labels", "position_ids"])
def test_splits_with_different_columns_are_refused(name: str) -> None:
    plain = dataset(input_ids=IDS)
    other = dataset(input_ids=IDS, **{name: LABELS})
    assert name in refuse(plain, TOKENIZER, other)
    assert name in refuse(other, TOKENIZER, plain)
