"""The order of an epoch: a bijection that can be entered anywhere and looks like a shuffle."""

from collections import Counter

import numpy as np
import pytest
import torch

from llmtrain.data import shuffle
from llmtrain.data.shuffle import key_of, permute

# The order of the data is part of every run's fingerprint: these may never change.
GOLDEN_KEYS = [
    ((0,), 16294208416658607535),
    ((1,), 10451216379200822465),
    ((0, 0), 12035550249420947055),
    ((0, 1), 3069472533636442495),
    ((1, 0), 6791897765849424158),
    ((7, 3), 17670481865470212032),
    ((-1,), 16490336266968443936),
]
GOLDEN_ROWS = [
    (1, 0, [0]),
    (5, 1, [4, 2, 3, 1, 0]),
    (10, 12035550249420947055, [6, 8, 4, 2, 3, 1, 9, 0]),
    (10, 3069472533636442495, [6, 0, 9, 1, 7, 5, 3, 8]),
    (64, 3, [0, 54, 50, 4, 9, 23, 39, 29]),
    (65, 3, [4, 24, 31, 30, 18, 37, 52, 35]),
    (1000, 13608149317741381227, [774, 225, 680, 45, 655, 145, 582, 764]),
    (
        *(10**9 + 7, 17670481865470212032),
        [835871604, 213055772, 937545444, 811617177, 482053719, 669595524, 935846500, 280019555],
    ),
    (
        *(2**40, 11),
        [
            *(292531921451, 663399835455, 233243256784, 11401880584),
            *(222374582963, 1022865773083, 486091454300, 884962564692),
        ],
    ),
]


@pytest.mark.parametrize(("numbers", "key"), GOLDEN_KEYS)
def test_a_key_is_the_same_on_every_machine_and_in_every_version(numbers, key):
    assert key_of(*numbers) == key


@pytest.mark.parametrize(("n", "key", "rows"), GOLDEN_ROWS)
def test_an_order_is_the_same_on_every_machine_and_in_every_version(n, key, rows):
    assert permute(np.arange(len(rows)), n, key).tolist() == rows


def test_keys_of_neighbouring_seeds_and_epochs_differ():
    keys = [key_of(seed, epoch) for seed in range(40) for epoch in range(40)]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_every_row_of_a_small_epoch_comes_exactly_once():
    for n in range(1, 601):
        assert np.array_equal(np.sort(permute(np.arange(n), n, key_of(5, n))), np.arange(n)), n


@pytest.mark.parametrize(
    "n", [1023, 1024, 1025, 4095, 4096, 4097, 16383, 16384, 16385, 65536, 65537, 99_991, 100_000]
)
def test_every_row_of_an_epoch_comes_exactly_once(n):
    rows = permute(np.arange(n), n, key_of(0, n))
    assert (rows.min(), rows.max()) == (0, n - 1)
    assert np.bincount(rows, minlength=n).max() == 1


@pytest.mark.parametrize("n", [10**9 + 7, 2**31 - 1, 2**32, 2**32 + 1, 10**12])
def test_no_row_of_a_huge_epoch_comes_twice(n):
    positions = np.unique(np.random.default_rng(0).integers(0, n, 100_000))
    rows = permute(positions, n, key_of(1, 2))
    assert rows.dtype == np.int64
    assert (rows >= 0).all()
    assert (rows < n).all()
    assert len(np.unique(rows)) == len(positions)
    assert np.histogram(rows, bins=10, range=(0, n))[0].min() > 0.95 * len(rows) / 10


@pytest.mark.parametrize("n", [1, 5, 64, 100, 10**9 + 7])
def test_a_position_has_its_row_whatever_it_is_asked_with(n):
    positions = np.arange(min(n, 60))
    key = key_of(3, 4)
    together = permute(positions, n, key)
    assert [permute(np.array([p]), n, key).item() for p in positions] == together.tolist()
    assert permute(positions[::-1], n, key).tolist() == together[::-1].tolist()
    assert permute(positions.astype(np.int32), n, key).tolist() == together.tolist()
    column = permute(positions[:, None], n, key)
    assert column.shape == (len(positions), 1)
    assert column[:, 0].tolist() == together.tolist()
    assert permute(positions[:0], n, key).shape == (0,)


def test_a_single_position_without_an_axis_has_its_row_too():
    together = permute(np.arange(20), 20, 9)
    assert [int(permute(np.array(p), 20, 9)) for p in range(20)] == together.tolist()


def test_asking_does_not_change_the_positions():
    positions = np.arange(10, dtype=np.uint64)
    permute(positions, 10, 1)
    assert positions.tolist() == list(range(10))


def ours(n: int, keys: int) -> np.ndarray:
    """[keys, n]: the orders of ``keys`` epochs, under seeds and epochs as runs use them."""
    return np.stack([permute(np.arange(n), n, key_of(i % 7, i // 7)) for i in range(keys)])


def torchs(n: int, keys: int) -> np.ndarray:
    return np.stack(
        [torch.randperm(n, generator=torch.Generator().manual_seed(i)).numpy() for i in range(keys)]
    )


def surprise(counts: np.ndarray, freedom: int) -> float:
    """Chi-square of counts that should be equal, in standard deviations (Wilson & Hilferty 1931)."""
    expected = counts.sum() / counts.size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    spread = 2 / (9 * freedom)
    return ((chi_square / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5


def surprises(orders: np.ndarray) -> dict[str, float]:
    n = orders.shape[1]
    landing = np.bincount(np.argmax(orders == 0, axis=1), minlength=n)
    table = np.stack([np.bincount(orders[:, position], minlength=n) for position in range(n)])
    found = {
        "where row 0 lands": surprise(landing, n - 1),
        "where any row lands": surprise(table, (n - 1) ** 2),
    }
    if n == 4:
        seen = Counter(map(tuple, orders.tolist()))
        counts = np.array([*seen.values(), *[0] * (24 - len(seen))])
        found["which of all orders"] = surprise(counts, 23)
    if n == 5:
        pairs = np.bincount(orders[:, 0] * 5 + orders[:, 1], minlength=25)
        found["which two come first"] = surprise(
            pairs[[a * 5 + b for a in range(5) for b in range(5) if a != b]], 19
        )
    return found


@pytest.mark.parametrize("shuffle", [ours, torchs])
@pytest.mark.parametrize(("n", "keys"), [(4, 480), (5, 500), (17, 510), (100, 1000)])
def test_every_row_lands_everywhere_as_often_as_with_randperm(shuffle, n, keys):
    found = surprises(shuffle(n, keys))
    assert max(found.values()) < 3.5, found  # one in 4,000; the keys are fixed
    assert min(found.values()) > -3.5, f"too even to be chance: {found}"


@pytest.mark.parametrize("n", [4, 5, 17])
def test_the_check_of_uniformity_catches_a_network_of_too_few_rounds(monkeypatch, n):
    monkeypatch.setattr(shuffle, "_ROUNDS", 2)
    assert max(surprises(ours(n, 480)).values()) > 5


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def togetherness(rows: np.ndarray) -> tuple[float, int]:
    """(correlation of each row with the next, how often the next row is the neighbour)."""
    return abs(correlation(rows[:-1], rows[1:])), int((np.abs(np.diff(rows)) == 1).sum())


@pytest.mark.parametrize("n", [1000, 10_000, 16_384])
@pytest.mark.parametrize("epoch", range(4))
def test_neighbours_do_not_stay_together(n, epoch):
    serial, adjacent = togetherness(permute(np.arange(n), n, key_of(0, epoch)))
    assert serial < 4 / n**0.5
    assert adjacent < 10  # a shuffle has 2 on average


def test_the_check_of_neighbours_catches_a_rotation_and_a_network_of_one_round(monkeypatch):
    serial, adjacent = togetherness((np.arange(10_000) + 1234) % 10_000)
    assert serial > 0.04
    assert adjacent > 10
    monkeypatch.setattr(shuffle, "_ROUNDS", 1)
    assert togetherness(permute(np.arange(10_000), 10_000, key_of(0, 0)))[0] > 0.04


@pytest.mark.parametrize("n", [1000, 10_000])
def test_epochs_and_seeds_have_orders_that_know_nothing_of_each_other(n):
    orders = [
        permute(np.arange(n), n, key_of(seed, epoch)) for seed in range(3) for epoch in range(3)
    ]
    for i, first in enumerate(orders):
        assert abs(correlation(first, np.arange(n))) < 4 / n**0.5
        for second in orders[:i]:
            assert abs(correlation(first, second)) < 4 / n**0.5
            assert (first == second).sum() < 9  # 1 on average
