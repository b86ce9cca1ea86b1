"""The layout decides which rank computes a row, never which rows a step has."""

from collections.abc import Iterable
from itertools import chain, pairwise

import datasets
import numpy as np
import pytest
import torch

from llmtrain.data.loader import IGNORED, LocalBatches, eval_loader, fingerprint, train_loader
from llmtrain.data.order import GlobalBatchSampler, Slot
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.data.tokenized import Tokenized
from tests.data.batches import assert_same_batches, micro_batches_of, shares_of_steps

SIZES = [(1, 4), (8, 8), (9, 8), (50, 7), (64, 1)]
BLOCK = 4


@pytest.fixture(scope="module")
def rows() -> TokenRows:
    """23 rows; row i holds i*10 to i*10 + 4. The last row ends in padding."""
    tokens = np.arange(23)[:, None] * 10 + np.arange(BLOCK + 1)
    tokens[-1, 3:] = IGNORED
    return rows_of(tokens)


def rows_of(tokens: np.ndarray) -> TokenRows:
    """Return rows of plain text with some tokens."""
    return TokenRows([ArrayRows({"input_ids": tokens})])


# --- the rows of a step


def epoch_of(epoch: int, n: int, size: int, seed: int | None) -> list[int | None]:
    """Return the rows of an epoch, in the order of the slots."""
    steps_per_epoch = -(-n // size)
    first = epoch * steps_per_epoch
    steps = range(first, first + steps_per_epoch)
    order: list[int | None] = []
    for slots in GlobalBatchSampler(n, size, steps, seed=seed):
        order += [slot.row for slot in slots]
    return order


@pytest.mark.parametrize(("n", "size"), SIZES)
@pytest.mark.parametrize("seed", [None, 2**63 - 1])
def test_an_epoch_holds_every_row_once_and_empty_slots_only_at_its_end(n, size, seed):
    for epoch in range(3):
        order = epoch_of(epoch, n, size, seed=seed)
        assert len(order) % size == 0
        assert sorted(order[:n]) == list(range(n))
        assert order[n:] == [None] * (-n % size)


def test_positions_count_the_slots_of_the_whole_run():
    slots = list(chain.from_iterable(GlobalBatchSampler(9, 8, range(7), seed=0)))
    assert [slot.position for slot in slots] == list(range(56))
    assert {type(slot.row) for slot in slots} == {int, type(None)}


def test_without_a_seed_the_stored_order_is_kept():
    assert epoch_of(2, 10, 4, seed=None) == [*range(10), None, None]


def test_the_rows_of_a_step_never_change_between_versions():
    assert epoch_of(0, 10, 4, seed=0) == [6, 8, 4, 2, 3, 1, 9, 0, 5, 7, None, None]
    assert epoch_of(1, 10, 4, seed=0)[:4] == [6, 0, 9, 1]


# --- layouts and resuming


@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 3), (2, 4), (4, 2), (8, 1)])
def test_every_layout_computes_the_same_rows_in_the_same_step(rows, processes, micro_batch):
    reference = train_loader(rows, 8, micro_batch=8, steps=range(9), seed=5, dropout_seed=6)
    loader = train_loader(rows, 8, micro_batch=micro_batch, steps=range(9), seed=5, dropout_seed=6)
    steps = shares_of_steps(loader, processes)
    assert len(steps) == 9
    for shares, expected in zip(steps, reference, strict=True):
        assert torch.cat([share.rows for share in shares]).equal(expected.rows)
        assert sum(share.token_fingerprint for share in shares) == expected.token_fingerprint
        assert sum(share.label_fingerprint for share in shares) == expected.label_fingerprint
        batches = micro_batches_of(shares)
        for name in ("input_ids", "labels", "dropout_keys"):
            column = torch.cat([batch[name] for batch in batches])
            assert column.equal(expected.batches[0][name])


def test_a_resumed_run_has_the_batches_of_an_unbroken_one(rows):
    unbroken = list(train_loader(rows, 8, micro_batch=2, steps=range(10), seed=5, dropout_seed=5))
    resumed = train_loader(rows, 8, micro_batch=2, steps=range(7, 10), seed=5, dropout_seed=5)
    for actual, expected in zip(resumed, unbroken[7:], strict=True):
        assert_same_batches(actual, expected)


# --- evaluation


@pytest.mark.parametrize(("processes", "micro_batch"), [(1, 8), (2, 3), (4, 8)])
def test_an_evaluation_has_every_row_once_in_the_stored_order(rows, processes, micro_batch):
    steps = shares_of_steps(eval_loader(rows, processes, micro_batch), processes)
    batches = micro_batches_of(chain.from_iterable(steps))
    assert max(len(batch["labels"]) for batch in batches) <= micro_batch

    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels[: len(rows)].tolist() == rows.column("input_ids").tolist()
    padding = labels[len(rows) :]
    assert (padding == IGNORED).all()
    assert len(padding) < processes * micro_batch


@pytest.mark.parametrize(
    ("micro_batch", "sizes"),
    [
        (10, [8, 8, 8]),
        (12, [12, 12]),
        (16, [13, 13]),  # not 12, which is three quarters
        (23, [23]),
    ],
)
def test_eval_batches_are_smaller_if_fewer_rows_are_then_empty(rows, micro_batch, sizes):
    loader = eval_loader(rows, 1, micro_batch)
    assert [len(batch.rows) for batch in loader] == sizes


def test_no_eval_batch_has_rows_of_two_sources(rows):
    loader = eval_loader(rows, 1, micro_batch=8, source_rows=[7, 14, 2])
    assert [batch.source for batch in loader] == [0, 1, 1, 2]
    assert [len(batch.rows) for batch in loader] == [7, 7, 7, 7]


# --- rows of slots


def test_an_empty_slot_has_no_label_and_does_not_change_the_rows(rows):
    stored = LocalBatches(rows, micro_batch=2)
    some_empty = [Slot(5, 2), Slot(6, None), Slot(7, 0), Slot(8, None)]
    all_empty = [Slot(9, None), Slot(10, None)]
    for slots in (some_empty, all_empty, [Slot(11, 0)]):
        columns = stored.read(slots)
        for slot, labels in zip(slots, columns["labels"].tolist(), strict=True):
            padding = [IGNORED] * (BLOCK + 1)
            assert labels == (padding if slot.row is None else rows[slot.row]["input_ids"])
        assert np.array_equal(columns["input_ids"], columns["labels"].clip(0))


def test_rows_are_read_from_several_shards_and_from_tables_of_several_chunks(rows):
    tokens = rows.column("input_ids")
    parts = [tokens[start:end] for start, end in pairwise([0, 4, 5, 5, 17, 23])]
    sharded = TokenRows([ArrayRows({"input_ids": part}) for part in parts])
    assert sharded.shard_rows == [4, 1, 0, 12, 6]
    tables = [datasets.Dataset.from_dict({"input_ids": part.tolist()}) for part in parts]
    chunked = datasets.concatenate_datasets(tables)
    assert len(chunked.data.column("input_ids").chunks) > 1

    order = [22, 4, 5, 3, 0, 16, 17, *range(23)]
    for several in (sharded, Tokenized.of(chunked, None).train):
        columns = LocalBatches(several, 4).read([Slot(i, row) for i, row in enumerate(order)])
        assert columns["labels"].tolist() == tokens[order].tolist()
        assert [*several] == [*rows]


# --- micro-batches


@pytest.mark.parametrize(
    ("count", "micro_batch", "sizes"),
    [(8, 4, [4, 4]), (8, 8, [8]), (5, 2, [2, 2, 1]), (3, 8, [3])],
)
def test_rows_are_divided_into_micro_batches_of_int64(rows, count, micro_batch, sizes):
    slots = [Slot(i, row) for i, row in enumerate([0, None, *range(2, count)])]
    batches = LocalBatches(rows, micro_batch, dropout_seed=1)
    local_batch = batches.__getitems__(slots)

    assert local_batch.rows.tolist() == [0, -1, *range(2, count)]
    assert local_batch.positions == BLOCK * count  # those of an empty slot are computed, too
    assert [len(batch["labels"]) for batch in local_batch.batches] == sizes
    labels = torch.cat([batch["labels"] for batch in local_batch.batches])
    assert labels.tolist() == batches.read(slots)["labels"].tolist()
    inputs = torch.cat([batch["input_ids"] for batch in local_batch.batches])
    assert inputs.equal(labels.where(labels != IGNORED, 0))
    without_keys = LocalBatches(rows, micro_batch).__getitems__(slots)
    assert list(without_keys.batches[0]) == ["input_ids", "labels"]

    for batch, size in zip(local_batch.batches, sizes, strict=True):
        assert list(batch) == ["input_ids", "labels", "dropout_keys"]
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        assert batch["input_ids"].shape == batch["labels"].shape == (size, BLOCK + 1)
        assert batch["dropout_keys"].shape == (size,)


# --- dropout keys


def dropout_keys(positions: Iterable[int], seed: int, micro_batch: int, row: int = 0) -> list[int]:
    """Return the keys of slots at some positions of the run, all with the same row."""
    slots = [Slot(position, row) for position in positions]
    rows = rows_of(np.ones((4, BLOCK + 1), int))
    local_batch = LocalBatches(rows, micro_batch, dropout_seed=seed).__getitems__(slots)
    return torch.cat([batch["dropout_keys"] for batch in local_batch.batches]).tolist()


def test_a_dropout_key_depends_only_on_the_seed_and_the_position():
    keys = dropout_keys(range(8), seed=7, micro_batch=8)
    assert dropout_keys(range(8), seed=7, micro_batch=2) == keys
    assert dropout_keys(range(8), seed=7, micro_batch=8, row=3) == keys
    assert dropout_keys([5, 1], seed=7, micro_batch=3) == [keys[5], keys[1]]
    assert not set(dropout_keys(range(8), seed=8, micro_batch=8)) & set(keys)


def test_dropout_keys_differ_and_fit_into_int64():
    keys = dropout_keys(range(2000), seed=7, micro_batch=8)
    assert len(set(keys)) == 2000
    assert all(0 <= key < 2**63 for key in keys)


def test_dropout_keys_never_change_between_versions():
    expected = [6017775124710473527, 1534736266818221247]
    assert dropout_keys([0, 1], seed=0, micro_batch=1) == expected


# --- the fingerprint of a batch


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(-100, 50_000, size=(6, 17))


def test_a_fingerprint_does_not_depend_on_the_order_or_division_of_rows(tokens):
    assert fingerprint(tokens[::-1]) == fingerprint(tokens)
    assert fingerprint(tokens[:2]) + fingerprint(tokens[2:]) == fingerprint(tokens)
    assert fingerprint(tokens[:0]) == 0
    assert fingerprint(np.arange(10).reshape(2, 5)) == 2547627419, "runs have it in their records"


def test_a_fingerprint_changes_if_two_rows_exchange_a_token(tokens):
    exchanged = tokens.copy()
    exchanged[:2, 3] = tokens[:2, 3][::-1]
    assert not np.array_equal(exchanged, tokens)
    assert fingerprint(exchanged) != fingerprint(tokens)


def test_a_fingerprint_changes_if_tokens_are_shifted_in_their_row(tokens):
    assert fingerprint(np.roll(tokens, -1, axis=1)) != fingerprint(tokens)
