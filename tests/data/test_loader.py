"""Steps, slots and batches: the layout decides who computes a row, never which rows a step holds."""

from collections.abc import Iterable
from itertools import chain, pairwise

import datasets
import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import DataLoader

from llmtrain.data.loader import (
    IGNORED,
    Collate,
    RowBatch,
    SlotRows,
    eval_loader,
    fingerprint,
    train_loader,
)
from llmtrain.data.samplers import GlobalBatchSampler, Slot, slots_of
from llmtrain.interfaces.batches import Batch, LocalBatch

SIZES = [(1, 1), (1, 4), (3, 8), (8, 8), (9, 8), (16, 8), (23, 4), (50, 7), (64, 1)]
BLOCK = 4


@pytest.fixture(scope="module")
def rows() -> datasets.Dataset:
    """Row i holds i*10 to i*10 + 4; the last ends in places that hold no token."""
    table = np.arange(23)[:, None] * 10 + np.arange(BLOCK + 1)
    table[-1, 3:] = IGNORED
    column = datasets.Sequence(datasets.Value("int32"), length=BLOCK + 1)
    return datasets.Dataset.from_dict(
        {"input_ids": table.tolist()}, datasets.Features({"input_ids": column})
    )


def epoch_of(epoch: int, n: int, size: int, seed: int | None) -> list[Slot]:
    steps = -(-n // size)
    return [slot for k in range(steps) for slot in slots_of(epoch * steps + k, n, size, seed)]


@pytest.mark.parametrize(("n", "size"), SIZES)
@pytest.mark.parametrize("seed", [None, 0, 2**63 - 1])
def test_an_epoch_holds_every_row_once_and_empty_slots_only_at_its_end(n, size, seed):
    for epoch in range(3):
        drawn = [slot.row for slot in epoch_of(epoch, n, size, seed)]
        assert len(drawn) % size == 0
        assert None not in drawn[:n]
        assert drawn[n:] == [None] * (-n % size)
        assert sorted(drawn[:n]) == list(range(n))


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_positions_count_the_slots_of_the_whole_run(n, size):
    slots = [slot for step in range(7) for slot in slots_of(step, n, size, 0)]
    assert [slot.position for slot in slots] == list(range(7 * size))


def test_epochs_and_seeds_have_different_orders():
    drawn = {
        tuple(slot.row for slot in epoch_of(epoch, 24, 8, seed))
        for epoch in range(4)
        for seed in range(4)
    }
    assert len(drawn) == 16


def test_without_a_seed_the_stored_order_is_kept():
    assert [slot.row for slot in epoch_of(2, 10, 4, None)] == [*range(10), None, None]


def test_the_rows_of_a_step_are_known_forever():
    assert slots_of(0, 10, 4, 0) == [Slot(0, 6), Slot(1, 8), Slot(2, 4), Slot(3, 2)]
    assert slots_of(2, 10, 4, 0) == [Slot(8, 5), Slot(9, 7), Slot(10, None), Slot(11, None)]
    assert slots_of(3, 10, 4, 0) == [Slot(12, 6), Slot(13, 0), Slot(14, 9), Slot(15, 1)]


def test_the_rows_of_a_step_are_plain_numbers():
    assert all(type(slot.row) is int for slot in slots_of(0, 10, 4, 0))


@pytest.mark.parametrize(("n", "size"), SIZES)
def test_a_sampler_that_starts_at_a_step_draws_what_one_from_the_beginning_would(n, size):
    whole = list(GlobalBatchSampler(n, size, range(12), seed=3))
    for start in (0, 1, 5, 11, 12):
        sampler = GlobalBatchSampler(n, size, range(start, 12), seed=3)
        assert list(sampler) == whole[start:]
        assert len(sampler) == 12 - start


def test_a_sampler_can_be_read_again():
    sampler = GlobalBatchSampler(10, 4, range(3), seed=0)
    assert list(sampler) == list(sampler)


def test_a_start_far_into_a_huge_run_costs_nothing(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "llmtrain.data.samplers.permute",
        lambda positions, n, key: asked.append(len(positions)) or positions,
    )
    n, size, start = 10**12, 1024, 10**13
    batches = list(GlobalBatchSampler(n, size, range(start, start + 2), seed=0))
    assert [len(batch) for batch in batches] == [size, size]
    assert batches[0][0].position == start * size
    assert sum(asked) <= 2 * 4096  # a few steps at once


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize(("n", "size"), [(50, 8), (8, 8), (3, 8), (64, 4)])
def test_the_slices_that_accelerate_cuts_are_the_global_batch(processes, n, size):
    def sampler() -> GlobalBatchSampler:
        return GlobalBatchSampler(n, size, range(2, 20), seed=1)

    shards = [
        list(BatchSamplerShard(sampler(), processes, rank, split_batches=True, even_batches=False))
        for rank in range(processes)
    ]
    assert {len(shard) for shard in shards} == {18}
    assert {len(piece) for shard in shards for piece in shard} == {size // processes}
    assert [list(chain(*pieces)) for pieces in zip(*shards, strict=True)] == list(sampler())


def of_process(loader: DataLoader, processes: int, rank: int) -> DataLoader:
    shard = BatchSamplerShard(
        loader.batch_sampler, processes, rank, split_batches=True, even_batches=False
    )
    return DataLoader(loader.dataset, batch_sampler=shard, collate_fn=loader.collate_fn)


def shares_of_steps(loader: DataLoader, processes: int) -> list[tuple[LocalBatch, ...]]:
    """Return the batches of all processes for each step."""
    loaders = [of_process(loader, processes, rank) for rank in range(processes)]
    return list(zip(*loaders, strict=True))


def micro_batches_of(shares: Iterable[LocalBatch]) -> list[Batch]:
    """Return the micro-batches of all processes, in the order of the ranks."""
    return list(chain.from_iterable(share.batches for share in shares))


@pytest.mark.parametrize(("processes", "micro"), [(1, 8), (1, 3), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_every_layout_computes_the_same_rows_in_the_same_step(rows, processes, micro):
    reference = list(train_loader(rows, 8, 8, range(9), seed=5, dropout_seed=6))
    loader = train_loader(rows, 8, micro, range(9), seed=5, dropout_seed=6)
    steps = shares_of_steps(loader, processes)
    assert len(steps) == len(reference) == 9
    for shares, expected in zip(steps, reference, strict=True):
        batches = micro_batches_of(shares)
        for name in ("input_ids", "labels", "dropout_keys"):
            column = torch.cat([batch[name] for batch in batches])
            assert torch.equal(column, expected.batches[0][name])
        assert torch.cat([share.rows for share in shares]).tolist() == expected.rows.tolist()


def test_training_starts_at_any_step_with_what_an_unbroken_run_would_see(rows):
    unbroken = list(train_loader(rows, 8, 2, range(10), seed=5, dropout_seed=5))
    resumed = list(train_loader(rows, 8, 2, range(7, 10), seed=5, dropout_seed=5))
    for local_batch, again in zip(unbroken[7:], resumed, strict=True):
        for batch, same in zip(local_batch.batches, again.batches, strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[name], same[name]) for name in batch)


@pytest.mark.parametrize(("processes", "micro"), [(1, 1), (1, 8), (2, 3), (4, 8), (3, 5)])
def test_evaluation_sees_every_row_once_in_the_stored_order(rows, processes, micro):
    loader = eval_loader(rows, processes, micro)
    steps = shares_of_steps(loader, processes)
    batches = micro_batches_of(chain.from_iterable(steps))
    assert all(len(batch["labels"]) <= micro for batch in batches)
    labels = torch.cat([batch["labels"] for batch in batches])
    assert labels[: len(rows)].tolist() == rows["input_ids"][:]
    assert (labels[len(rows) :] == IGNORED).all()
    assert len(labels) - len(rows) < processes * micro


def test_evaluation_takes_smaller_batches_where_fewer_of_their_rows_are_empty(rows):
    for micro, sizes in [
        (8, [8, 8, 8]),
        (10, [8, 8, 8]),
        (12, [12, 12]),
        (23, [23]),
        (1, [1] * 23),
    ]:
        assert [len(batch.rows) for batch in eval_loader(rows, 1, micro)] == sizes
    loader = eval_loader(rows, 1, 8, source_rows=[7, 14, 2])
    assert [len(batch.rows) for batch in loader] == [7, 7, 7, 7]


def test_an_empty_slot_holds_no_token_and_does_not_touch_the_rows(rows):
    stored = SlotRows(rows)
    for slots in [
        [Slot(5, 2), Slot(6, None), Slot(7, 0), Slot(8, None)],
        [Slot(9, None), Slot(10, None)],
        [Slot(11, 0)],
    ]:
        read = stored.__getitems__(slots)
        assert read.slots == slots
        for slot, labels in zip(slots, read.columns["labels"].tolist(), strict=True):
            assert labels == (
                [IGNORED] * (BLOCK + 1) if slot.row is None else rows[slot.row]["input_ids"]
            )


def test_rows_are_found_in_tables_of_several_chunks(rows):
    ends = [0, 4, 5, 17, 23]
    parts = [rows.select(range(*pair)).flatten_indices() for pair in pairwise(ends)]
    chunked = datasets.concatenate_datasets(parts)
    assert len(chunked.data.column("input_ids").chunks) == len(parts)
    slots = [Slot(i, row) for i, row in enumerate([22, 4, 5, 3, 0, 16, 17, *range(23)])]
    found = SlotRows(chunked).__getitems__(slots).columns["input_ids"].tolist()
    assert found == [rows[slot.row]["input_ids"] for slot in slots]


def read_of(count: int) -> RowBatch:
    """``count`` rows of tokens; the second is empty, the third ends early."""
    tokens = np.arange(count * 5, dtype=np.int32).reshape(count, 5) + 1
    tokens[1:2] = IGNORED
    tokens[2:3, 3:] = IGNORED
    return RowBatch(
        [Slot(i, None if i == 1 else i) for i in range(count)],
        {"input_ids": tokens, "labels": tokens},
    )


@pytest.mark.parametrize(
    ("count", "micro", "sizes"), [(8, 4, [4, 4]), (8, 8, [8]), (5, 2, [2, 2, 1]), (3, 8, [3])]
)
def test_a_batch_is_micro_batches_of_int64_in_the_order_of_the_slots(count, micro, sizes):
    local_batch = Collate(micro, dropout_seed=1)(read_of(count))
    assert [len(batch["labels"]) for batch in local_batch.batches] == sizes
    for batch in local_batch.batches:
        assert list(batch) == ["input_ids", "labels", "dropout_keys"]
        assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
        assert batch["input_ids"].shape == batch["labels"].shape == (len(batch["labels"]), 5)
        assert batch["dropout_keys"].shape == (len(batch["labels"]),)
    together = torch.cat([batch["labels"] for batch in local_batch.batches])
    assert together.tolist() == read_of(count).columns["labels"].tolist()
    assert local_batch.rows.tolist() == [-1 if i == 1 else i for i in range(count)]
    assert local_batch.positions == 4 * count  # also those of an empty slot


def test_a_place_without_a_token_has_no_label_and_the_input_0():
    (batch,) = Collate(8)(read_of(4)).batches
    assert list(batch) == ["input_ids", "labels"]
    assert (batch["labels"][1] == IGNORED).all()
    assert (batch["input_ids"][1] == 0).all()
    assert batch["labels"][2].tolist() == [11, 12, 13, IGNORED, IGNORED]
    assert batch["input_ids"][2].tolist() == [11, 12, 13, 0, 0]
    for row in (0, 3):
        assert torch.equal(batch["input_ids"][row], batch["labels"][row])


def keys(micro: int, seed: int, positions: list[int]) -> list[int]:
    tokens = np.zeros((len(positions), 5), np.int32)
    read = RowBatch(
        [Slot(position, 0) for position in positions], {"input_ids": tokens, "labels": tokens}
    )
    local_batch = Collate(micro, dropout_seed=seed)(read)
    return torch.cat([batch["dropout_keys"] for batch in local_batch.batches]).tolist()


def test_a_dropout_key_depends_on_the_seed_and_the_position_alone():
    whole = keys(8, 7, list(range(8)))
    assert keys(2, 7, list(range(8))) == whole
    assert keys(3, 7, [5, 1]) == [whole[5], whole[1]]
    assert keys(8, 8, list(range(8))) != whole
    rows_differ = Collate(8, dropout_seed=7)(read_of(8)).batches[0]["dropout_keys"].tolist()
    assert rows_differ == whole
    many = keys(8, 7, list(range(2000)))
    assert len(set(many)) == 2000
    assert all(0 <= key < 2**63 for key in many)


def test_a_dropout_key_is_the_same_on_every_machine_and_in_every_version():
    assert keys(1, 0, [0, 1]) == [6017775124710473527, 1534736266818221247]


def test_a_fingerprint_is_that_of_the_rows_in_any_order_and_of_no_others() -> None:
    rows = np.random.default_rng(0).integers(-100, 50_000, size=(6, 17))
    whole = fingerprint(rows)
    assert fingerprint(rows[::-1]) == fingerprint(rows[:2]) + fingerprint(rows[2:]) == whole
    exchanged = rows.copy()
    exchanged[0, 3], exchanged[1, 3] = (
        rows[1, 3],
        rows[0, 3],
    )  # each place has the same tokens as before
    assert exchanged[0, 3] != exchanged[1, 3]
    assert fingerprint(exchanged) != whole
    shifted = np.concatenate([rows[:, 1:], rows[:, :1]], axis=1)
    assert fingerprint(shifted) != whole
    assert fingerprint(rows[:0]) == 0


def test_a_batch_is_sent_with_what_was_prepared_and_what_the_host_asks_for_stays() -> None:
    def prepare(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"odd": batch["input_ids"][:, 0] % 2}

    local_batch = Collate(2, dropout_seed=1, prepare=prepare)(read_of(5))
    sent = local_batch.to(torch.device("meta"))
    for batch, same in zip(sent.batches, local_batch.batches, strict=True):
        assert batch.keys() == same.keys() == {"input_ids", "labels", "dropout_keys", "odd"}
        assert all(
            column.is_meta and column.shape == same[name].shape for name, column in batch.items()
        )
    assert not sent.rows.is_meta
    assert not sent.targets.is_meta
