"""Many shards come in windows: few are open at a time, and the rows of a window are mixed."""

from itertools import chain

import numpy as np
import pytest

import llmtrain as lt
from llmtrain.data import order
from llmtrain.data.loader import train_loader
from llmtrain.data.order import GlobalBatchSampler, Mixture, permute, shuffle_name
from llmtrain.data.shards import ArrayRows, TokenRows
from llmtrain.seeds import key_of

SHARDS = np.random.default_rng(0).integers(30, 90, 150).tolist()  # they have different sizes
SHARDS[0] = 0
SHARDS[70] = 0
ROWS = sum(SHARDS)
SIZE = 16
STEPS = -(-ROWS // SIZE)


def epoch_of(epoch: int, window: int, seed: int = 3, lengths: np.ndarray | None = None) -> list:
    """Return the rows of an epoch, in the order of the slots."""
    sampler = GlobalBatchSampler(
        ROWS,
        SIZE,
        range(epoch * STEPS, (epoch + 1) * STEPS),
        seed,
        lengths=lengths,
        shard_rows=SHARDS,
        window=window,
    )
    slots = chain.from_iterable(sampler)
    return [slot.row for slot in slots if slot.row is not None]


def windows_in(rows: list[int], shard_rows: list[int]) -> list[set[int]]:
    """Return the shards of each window of an epoch, from the order of its rows.

    A window ends at each position at which the rows of no shard have begun but not ended.
    """
    shards = np.repeat(np.arange(len(shard_rows)), shard_rows)[rows].tolist()
    rows_left = [*shard_rows]
    windows: list[set[int]] = [set()]
    for shard in shards:
        if not any(rows_left[opened] for opened in windows[-1]):
            windows.append(set())
        windows[-1].add(shard)
        rows_left[shard] -= 1
    return windows[1:]


# --- at most as many shards as a window has


@pytest.mark.parametrize(
    ("shard_rows", "window"), [([], 1), ([20], 1), ([7, 0, 13], 3), ([1] * 20, 64)]
)
def test_few_shards_have_the_order_of_one(shard_rows, window):
    sampler = GlobalBatchSampler(20, 6, range(4), seed=3, shard_rows=shard_rows, window=window)
    rows = [slot.row for slot in chain.from_iterable(sampler)][:20]
    # From the version before there were windows.
    recorded = [1, 13, 12, 4, 7, 5, 18, 16, 11, 9, 6, 3, 8, 10, 14, 17, 0, 15, 2, 19]
    assert rows == recorded
    assert rows == permute(np.arange(20), 20, key_of(3, 0)).tolist()


def test_each_source_of_a_mixture_has_windows_if_it_alone_has_many_shards():
    sizes = [40, ROWS, 1950]
    shard_rows = [[10, 30], SHARDS, [30] * 65]
    mixture = Mixture(sizes, [5, 3, 2], [*chain.from_iterable(shard_rows)], window=32)
    positions = np.arange(7 * ROWS)
    rows = mixture.rows_at(positions, seed=4)
    rows_of_source = [
        rows[(first <= rows) & (rows < first + size)][: 2 * size].reshape(2, size) - first
        for first, size in zip(mixture.first_row, sizes, strict=False)
    ]

    without_shards = Mixture(sizes, [5, 3, 2]).rows_at(positions, seed=4)
    assert rows[rows < 40].tolist() == without_shards[without_shards < 40].tolist()
    for source, windows in [(1, 5), (2, 3)]:
        for epoch in rows_of_source[source].tolist():
            assert sorted(epoch) == list(range(sizes[source]))
            shards_of_windows = windows_in(epoch, shard_rows[source])
            assert len(shards_of_windows) == windows
            assert max(map(len, shards_of_windows)) <= 32


def test_a_mixture_of_few_shards_has_the_order_of_one_each():
    mixture = Mixture([40, 25, 70], [5, 3, 2], shard_rows=[40, 5, 20, 0, 69, 1], window=3)
    recorded = [21, 52, 82, 4, 12, 63, 3, 113, 44, 19, 25, 49, 91, 33, 38, 45, 10, 112, 47, 22]
    assert mixture.rows_at(np.arange(10, 30), seed=4).tolist() == recorded


# --- windows


@pytest.mark.parametrize("window", [1, 2, 7, 64, 149])
@pytest.mark.parametrize("epoch", [0, 5])
def test_every_row_of_a_window_comes_once_and_before_the_next_window(window, epoch):
    rows = epoch_of(epoch, window)
    assert sorted(rows) == list(range(ROWS))

    windows = windows_in(rows, SHARDS)
    assert len(windows) == min(-(-150 // window), 148)  # two shards are empty
    sizes = [len(shards) for shards in windows]
    assert max(sizes) <= window
    assert max(sizes) - min(sizes) <= 3  # instead of 1, because of these


def test_windows_change_with_epoch_and_seed_and_the_rows_in_them_are_mixed():
    first_windows = {
        tuple(sorted(windows_in(epoch_of(epoch, window=7, seed=seed), SHARDS)[0]))
        for epoch in range(3)
        for seed in range(3)
    }
    assert len(first_windows) == 9
    rows = np.array(epoch_of(0, window=64))
    assert (np.abs(np.diff(rows)) == 1).sum() < 30  # a shuffle of three windows has 6 on average

    sampler = GlobalBatchSampler(300, 20, range(15), seed=0, shard_rows=[20] * 15, window=1)
    orders = {tuple(slot.row % 20 for slot in slots) for slots in sampler}
    assert len(orders) == 15


@pytest.mark.parametrize(("window", "share"), [(64, 0.01996), (8, 0.1248), (200, 0.00499)])
def test_rows_of_a_batch_share_a_shard_as_rarely_as_chance_allows(window, share):
    """Compare with the chance that two of a window's rows, drawn at random, share a shard.

    200 shards of 500 rows make 4 or 25 windows or one: (500 - 1) / (rows of a window - 1).
    """
    sampler = GlobalBatchSampler(
        100_000, 256, range(390), seed=0, shard_rows=[500] * 200, window=window
    )
    batches = np.array([[slot.row for slot in slots] for slots in sampler]) // 500
    counts = np.stack([np.bincount(batch, minlength=200) for batch in batches])
    pairs = (counts * (counts - 1)).sum(axis=1) / (256 * 255)
    assert pairs.mean() == pytest.approx(share, rel=0.03)


def test_rows_are_grouped_by_length_with_windows_too():
    lengths = np.random.default_rng(1).integers(1, 50, ROWS)
    grouped = epoch_of(1, window=8, lengths=lengths)
    ungrouped = epoch_of(1, window=8)
    assert sorted(grouped) == list(range(ROWS))
    assert grouped != ungrouped
    assert sorted(grouped[: 50 * SIZE]) == sorted(ungrouped[: 50 * SIZE])


def test_a_loader_draws_one_window_of_shards_after_the_other():
    shards = [ArrayRows({"input_ids": np.zeros((count, 2), int)}) for count in (5, 8, 10)]
    loader = train_loader(TokenRows(shards), 8, 8, range(3), seed=5, window=1)
    order = [row for batch in loader for row in batch.rows.tolist() if row >= 0]
    assert sorted(order) == list(range(23))
    shards = np.repeat([0, 1, 2], [5, 8, 10])[order]
    assert np.count_nonzero(np.diff(shards)) == 2


# --- any position


@pytest.mark.parametrize("window", [2, 64])
def test_a_step_has_the_same_rows_wherever_a_run_resumes(window):
    steps = range(3 * STEPS)
    unbroken = GlobalBatchSampler(ROWS, SIZE, steps, 3, shard_rows=SHARDS, window=window)
    batches = list(unbroken)
    for step in [steps[-1], 0, STEPS, *range(7, steps[-1], 97)]:
        resumed = GlobalBatchSampler(
            ROWS, SIZE, range(step, step + 1), 3, shard_rows=SHARDS, window=window
        )
        assert list(resumed) == [batches[step]]
        assert unbroken.slots_of(step) == batches[step]


def test_a_huge_run_permutes_its_shards_once_and_else_only_the_rows_near_a_step(monkeypatch):
    permuted = []

    def counting_permute(positions: np.ndarray, n: int, key: int) -> np.ndarray:
        permuted.append(len(positions))
        return permute(positions, n, key)

    monkeypatch.setattr(order, "permute", counting_permute)
    steps_per_epoch = 10**8 // 64
    first = 10**6 * steps_per_epoch - 50
    sampler = GlobalBatchSampler(10**8, 64, range(10**13), 0, shard_rows=[1000] * 10**5)
    rows = [slot.row for step in range(first, first + 500) for slot in sampler.slots_of(step)]
    assert 0 <= min(rows) <= max(rows) < 10**8
    assert sum(permuted) <= 2 * 10**5 + 11 * 50 * 64  # two epochs, and some megabatches


# --- the fingerprint


@pytest.mark.parametrize(
    ("shard_counts", "by_length", "name"),
    [
        ([64], False, "shuffled"),
        ([64, 64], True, "shuffled, grouped by length over 50 batches"),
        ([65], False, "shuffled in windows of 64 shards"),
        ([1, 65], True, "shuffled in windows of 64 shards, grouped by length over 50 batches"),
    ],
)
def test_only_more_shards_than_a_window_change_the_name_of_the_order(shard_counts, by_length, name):
    assert shuffle_name(shard_counts, 64, by_length) == name


def test_a_window_has_at_least_one_shard():
    assert lt.DataConfig().shuffle_window == order.WINDOW
    with pytest.raises(lt.UserError, match="shuffle_window"):
        lt.DataConfig(shuffle_window=0)


# --- the shards that a step may need


@pytest.mark.parametrize("kind", ["plain", "by length", "mixture"])
def test_a_step_needs_no_other_shards_than_those_of_its_first_and_last_row(kind: str) -> None:
    lengths = np.random.default_rng(5).integers(1, 50, ROWS) if kind == "by length" else None
    window = 24 if kind == "by length" else 8  # whose rows are more than those of a megabatch
    mixture = None
    if kind == "mixture":
        mixture = Mixture([sum(SHARDS[:60]), sum(SHARDS[60:])], [3, 1], SHARDS, window)
    steps = range(2 * STEPS)
    sampler = GlobalBatchSampler(
        ROWS, SIZE, steps, 3, mixture, lengths, shard_rows=SHARDS, window=window
    )
    ends = np.cumsum(SHARDS)
    groups = set()
    for step, slots in zip(steps, sampler, strict=True):
        first, last = map(set, sampler.shards_at(step))
        rows = [slot.row for slot in slots if slot.row is not None]
        needed = np.searchsorted(ends, rows, side="right").tolist()
        assert first | last >= {*needed}
        # Rows of the window that ends come first.
        is_old = [shard not in last for shard in needed]
        assert lengths is not None or is_old == sorted(is_old, reverse=True) or mixture
        assert max(len(first), len(last)) <= window * (1 if mixture is None else 2)
        groups.add(frozenset(first))

    # A window is needed in many steps.
    assert len(groups) < len(steps) / 4
